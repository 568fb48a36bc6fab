"""The supervisor of each node: starts an attempt, judges how it ended and chooses the next one."""
