"""Logs that frameworks write by themselves, taken over into metrics.jsonl while a `command:` runs."""
