"""Sharding of one model over data-parallel ranks: `sharding` for FSDP, `ddp`, and `replicas` on a mesh.

The other modules find what sharding would break or lose without a word in the model: changed arguments, kept
or replaced parameters, weights that are written while they are gathered, replicas that differ.
"""
