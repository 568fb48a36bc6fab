"""Compiled graphs of DTensors: what torch 2.13 gets wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch.distributed.tensor._dtensor_spec import DTensorSpec

_ZERO_SIZE = "unsafe_treat_script_objects_as_zero_size"


@contextmanager
def compiled_dtensors() -> Iterator[None]:
    """Compile within this context, and run what was compiled.

    torch reuses a graph for a DTensor whose local part has the same shape, even if its global shape differs.
    Two ranks hold 19 and 18 of 37 tokens, and 18 each of 36 tokens: the second rank would run the graph for
    37 while the first compiles one for 36.

    The backward pass may need the mesh. torch raises an error when it weighs the mesh against
    `activation_memory_budget`. If a recomputation draws random numbers on the CPU, torch saves their states
    after the mesh, but later expects them before it.
    """
    equal = DTensorSpec._check_equals

    def with_shapes(self: DTensorSpec, other: object, skip_shapes: bool = False) -> bool:
        return equal(self, other)

    with ExitStack() as stack:
        stack.enter_context(patch.object(DTensorSpec, "_check_equals", with_shapes))
        if hasattr(functorch_config, _ZERO_SIZE):
            stack.enter_context(functorch_config.patch({_ZERO_SIZE: True}))
        if hasattr(graph_compile, "is_opaque_node"):  # older versions save no mesh
            functionalize = partitioners.functionalize_rng_ops

            def states_first(
                joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, *rest: Any
            ) -> tuple[fx.GraphModule, fx.GraphModule]:
                existing = {*_saved(forward), *_inputs(backward)}
                forward, backward = functionalize(joint, forward, backward, *rest)
                _reorder(forward, backward, existing)
                return forward, backward

            stack.enter_context(patch.object(partitioners, "functionalize_rng_ops", states_first))
        yield


def _reorder(forward: fx.GraphModule, backward: fx.GraphModule, existing: set[Any]) -> None:
    """Move random states, which are not `existing`, before the meshes that are saved with them."""
    inputs, saved = _inputs(backward), _saved(forward)
    states = [node for node in inputs if node not in existing]
    meshes = [node for node in inputs[: inputs.index(states[0])] if graph_compile.is_opaque_node(node)]
    if not meshes:
        return
    for state in states:
        meshes[0].prepend(state)
    states = [node for node in saved if node not in existing]
    at = saved.index(states[0]) - len(meshes)
    [output] = forward.graph.find_nodes(op="output")
    output.args = ((*saved[:at], *states, *(node for node in saved[at:] if node in existing)),)
    forward.recompile()
    backward.recompile()


def _saved(forward: fx.GraphModule) -> list[Any]:
    [output] = forward.graph.find_nodes(op="output")
    return list(output.args[0])


def _inputs(backward: fx.GraphModule) -> list[fx.Node]:
    return list(backward.graph.find_nodes(op="placeholder"))
