"""What launcher changes in the graphs of compiled blocks, as one pass of inductor."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from launcher.train.compiling import changed_inputs
from launcher.train.tensor import tensor_parallel_rng


@functools.cache
def graph_options() -> dict[str, Any]:
    """Return the options with which torch.compile changes the graph of a block's forward and backward pass.
    torch's cache identifies the pass by a hash of its source."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # imports for a second

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            changed_inputs.keep_reads_of_changed_inputs(graph)
            tensor_parallel_rng.give_own_numbers(graph)

        def uuid(self) -> object:
            return get_hash_for_files((changed_inputs.__file__, tensor_parallel_rng.__file__))

    return {"joint_custom_pre_pass": GraphPass()}
