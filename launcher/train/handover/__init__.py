"""Handover of the last complete step to the next attempt in the same allocation, through shared memory.

`progress` knows the step, `alarm` wakes ranks that wait, `restart` ends the attempt, `handover` writes and
reads the state (`tensor_file`, `reshard`), and `to_checkpoint` turns it into a checkpoint after the run.
`grace_period` has the state saved when the run must stop.
"""
