"""Checkpoints: their folder (`folder`), saving and restoring (`checkpoints`), state per rank (`rank_state`),
writing (`writer`, `space`), reading (`reader`), nodes without a shared folder (`parts`), and `export`."""
