"""Slurm: what is asked of it, what it answers in words, and a run over one or many of its jobs."""
