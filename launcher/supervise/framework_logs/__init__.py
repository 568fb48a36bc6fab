"""Copy the metrics that frameworks log by themselves into metrics.jsonl while a `command:` runs."""
