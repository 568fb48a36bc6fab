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

    torch uses a graph again for a tensor whose part on this rank has the same shape, even if the shape of the
    whole differs. Of 37 tokens two ranks have 19 and 18, and of 36 tokens 18 each: the second rank would run
    the graph for 37 while the first compiles one for 36.

    The backward pass may need the mesh. torch refuses to weigh it against `activation_memory_budget`. And if
    a recomputation draws random numbers on the CPU, it saves their states behind the mesh, where it then
    expects tensors before it.
    """
    equal = DTensorSpec._check_equals

    def with_shapes(self: DTensorSpec, other: object, skip_shapes: bool = False) -> bool:
        return equal(self, other)

    with ExitStack() as stack:
        stack.enter_context(patch.object(DTensorSpec, "_check_equals", with_shapes))
        if hasattr(functorch_config, _ZERO_SIZE):
            stack.enter_context(functorch_config.patch({_ZERO_SIZE: True}))
        if hasattr(graph_compile, "is_opaque_node"):  # older versions save no mesh
            own = partitioners.functionalize_rng_ops

            def states_first(
                joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, *rest: Any
            ) -> tuple[fx.GraphModule, fx.GraphModule]:
                known = {*_saved(forward), *_inputs(backward)}
                forward, backward = own(joint, forward, backward, *rest)
                _reorder(forward, backward, known)
                return forward, backward

            stack.enter_context(patch.object(partitioners, "functionalize_rng_ops", states_first))
        yield


def _reorder(forward: fx.GraphModule, backward: fx.GraphModule, known: set[Any]) -> None:
    """Move random states, which are not `known`, before the meshes that are saved with them."""
    inputs, saved = _inputs(backward), _saved(forward)
    states = [one for one in inputs if one not in known]
    meshes = [one for one in inputs[: inputs.index(states[0])] if graph_compile.is_opaque_node(one)]
    if not meshes:
        return
    for state in states:
        meshes[0].prepend(state)
    states = [one for one in saved if one not in known]
    at = saved.index(states[0]) - len(meshes)
    [output] = forward.graph.find_nodes(op="output")
    output.args = ((*saved[:at], *states, *(one for one in saved[at:] if one in known)),)
    forward.recompile()
    backward.recompile()


def _saved(forward: fx.GraphModule) -> list[Any]:
    [output] = forward.graph.find_nodes(op="output")
    return list(output.args[0])


def _inputs(backward: fx.GraphModule) -> list[fx.Node]:
    return list(backward.graph.find_nodes(op="placeholder"))
