"""Recovery from OOM inside the ranks, without a new process.

`probe` finds the largest micro-batch that fits before the first step, on each rank alone. After each
micro-batch, the ranks use `agreement` to learn whether one of them ran out of memory. That rank has already
issued its remaining `collectives` with zeros, so no other rank waits for it; errors that the zeros cause on
other ranks are ignored. Every rank then removes what the failed pass left in the model
(`launcher.train.sharding.cleanup`), restores other state (`launcher.train.undo`), and repeats the step with
the next smaller recipe (`fallback`, event `downgrade`). If the ranks do not reach this point together, a
`deadline` ends the attempt.

If the step cannot be repeated in the same process, a new attempt starts in the same allocation: see
`launcher.train.handover`.
"""
