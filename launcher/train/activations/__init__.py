"""What blocks keep for their backward pass: the policies of a recipe's `activations`.

`activations` applies them. `selective` and `compression` are two of them, `recomputation` makes a block's
second forward pass begin like the first one. The other modules tell which tensors and containers a block
changes or holds only a part of.
"""
