"""Compiled blocks that change a buffer in place and compute with it.

torch's partitioner may compute a cheap value again in the backward pass rather than keep it. If the value
comes from a buffer that the forward pass changes, the backward pass would read what was written since, and
the gradient would be wrong without an error (torch 2.13; pull request 197039 of pytorch/pytorch).
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy


def keep_reads_of_changed_inputs(graph: fx.Graph) -> None:
    """Let the partitioner keep what a forward pass computes directly from an input that it changes.

    `graph` contains both passes and writes such an input at its end.
    """
    for node in graph.nodes:
        if _writes(node) and node.args[0].op == "placeholder":
            _keep_reads_of(node.args[0])


def _keep_reads_of(node: fx.Node) -> None:
    for reader in node.users:
        if reader.op != "call_function" or (_writes(reader) and reader.args[0] is node):
            continue
        if _is_view(reader):
            _keep_reads_of(reader)
        else:
            reader.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _writes(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # of the parts that a view such as `split` returns
        return True
    return isinstance(node.target, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in node.target._schema.returns
    )
