"""A training step run on tensors without memory: what it would allocate, and how much it would compute."""
