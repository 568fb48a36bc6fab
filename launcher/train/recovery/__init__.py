"""Out of memory, and on: what a rank does itself, without a new process.

`probe` finds the largest micro-batch that fits before the first step, on each rank alone. In a step, `gate`
tells all ranks before each micro-batch whether one of them ran out of memory in the one before. That rank has
issued the rest of its `collectives` with zeros, so that nobody waits for it. All then `cleanup` what the
failed pass left in the model, `undo` random state and buffers, and repeat the step one rung lower
(`downgrade`). Where they do not meet again behind that, a `deadline` ends the attempt.

What cannot be repeated in the same process ends in a new attempt in the same allocation: the `alarm` wakes
ranks that wait in a collective, and the `handover` carries the last complete step to the next attempt.
"""
