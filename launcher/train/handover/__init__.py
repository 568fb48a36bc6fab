"""Handover of the last complete step to the next attempt in the same allocation, through shared memory.

`progress` knows the step, `alarm` wakes ranks that wait, `restart` ends the attempt, `handover` writes and
reads the state (`tensor_file`, `reshard`), and `save` turns it into a checkpoint. `grace_period` does this
when the run must stop.
"""
