"""Pipeline parallelism: each stage holds some of the blocks, and runs the micro-batches of a step in turn.

A task describes its model with launcher.train.pipeline_parts. `cut` leaves a rank the modules of its
stage, `channel` sends activations and gradients to the neighbours, and `stage` runs forward and backward
passes in the order of launcher.spec.pipeline_schedule. `weights` computes weight gradients that a backward
pass has postponed.

torch.distributed.pipelining has the same schedules. Its stages take the shapes of the first micro-batch for
all, run it twice, keep a buffer for every micro-batch of the step, and leave FSDP's parameters and gradients
unsharded for the whole step; here each micro-batch may have its own shape, and `sharding` and `grad_sync`
mean what they mean without stages.
"""
