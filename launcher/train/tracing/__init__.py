"""Traces of a training step on tensors without memory: its allocations and its amount of computation."""
