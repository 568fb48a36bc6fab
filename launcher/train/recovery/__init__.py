"""Out of memory, and on: what a rank does itself, without a new process.

`probe` finds the largest micro-batch that fits before the first step, on each rank alone. In a step, `gate`
tells all ranks after each micro-batch whether one of them ran out of memory in it. That rank has issued the
rest of its `collectives` with zeros, so that nobody waits for it; what another rank's code raises because of
them does not count. All then `cleanup` what the failed pass left in the model, `undo` what else has changed,
and repeat the step one rung lower (the event `downgrade`). If they do not meet, a `deadline` ends the
attempt.

What cannot be repeated in the same process ends in a new attempt in the same allocation: the `alarm` wakes
ranks that wait in a collective, and the `handover` carries the last complete step to the next attempt.
"""
