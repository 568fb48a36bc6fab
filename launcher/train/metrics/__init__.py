"""Metrics, memory readings, memory snapshots and trackers of a training run."""
