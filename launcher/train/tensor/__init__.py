"""Tensor parallelism inside the layers: `styles` that torch lacks, adapters of cut layers (`cut_adapter`),
tensors in `unequal_parts`, the loss of a cut vocabulary, random numbers (`tensor_parallel_rng`), and
gradients of layers that stay whole (`replicated_gradients`).

`launcher.train.tensor_parallel` applies them, and has what tasks import.
"""
