"""Sharding of one model over data-parallel ranks: FSDP (`sharding`), and `replicas` on a mesh.

`cleanup` resets FSDP after a pass that failed. The other modules find what sharding would silently
break or lose in the model: changed arguments, kept memory, weights that are written while they are gathered,
replicas that differ.
"""
