"""Find out from a program's output why it ended."""
