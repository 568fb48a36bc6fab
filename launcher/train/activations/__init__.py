"""What blocks keep for their backward pass: the policies of a recipe's `activations`.

`activations` applies them. `selective` and `compression` implement two of them. `recomputation` makes a
block's second forward pass start from the same state as the first. The other modules find the tensors and
containers that a block changes, and the local parts of DTensors.
"""
