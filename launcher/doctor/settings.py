"""The settings that a search tries, in the order in which it tries them. Pure.

Sources: NCCL's documentation, "Environment Variables"; torch's documentation of torch.distributed, "Choosing
the network interface to use". The settings for NCCL have not yet been tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

from launcher.doctor.outcome import Outcome

Purpose = Literal["works", "faster"]

FASTER = 1.1
"A setting is faster if it has so many times the bandwidth. Less is noise."


class Setting(NamedTuple):
    """Variables to try together, and what they change."""

    env: Mapping[str, str]
    explains: str
    "What is wrong if training works with it."
    purpose: Purpose = "works"
    between_nodes: bool = False
    "Whether it changes nothing on one node."

    @property
    def text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.env.items())


NCCL = (
    Setting({"NCCL_SHM_DISABLE": "1"}, "Shared memory between the processes of a node fails."),
    Setting({"NCCL_P2P_DISABLE": "1"}, "GPUs cannot read each other's memory, though the driver says so."),
    Setting({"NCCL_IB_DISABLE": "1"}, "InfiniBand or RoCE does not connect the nodes.", between_nodes=True),
    Setting(
        {"NCCL_NET_GDR_LEVEL": "LOC"}, "Network adapters fail to reach the GPUs' memory (GPUDirect RDMA).",
        between_nodes=True,
    ),
    Setting({"NCCL_NET": "Socket"}, "The network plugin of this system or image fails.", between_nodes=True),
    Setting({"NCCL_NVLS_ENABLE": "0"}, "Reductions in the NVLink switch (NVLS) fail."),
    Setting({"NCCL_CUMEM_ENABLE": "0"}, "NCCL's memory through cuMem fails in this container."),
    Setting({"NCCL_ALGO": "Ring"}, "Another algorithm than the ring fails."),
    Setting({"NCCL_PROTO": "Simple"}, "The protocols for small messages (LL, LL128) give wrong values."),
    Setting(
        {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
        "One TCP connection does not fill the network.", "faster", between_nodes=True,
    ),
    Setting({"NCCL_IB_QPS_PER_CONNECTION": "4"}, "One queue pair uses one path.", "faster", True),
    Setting({"NCCL_ALGO": "Tree"}, "NCCL chooses the slower algorithm.", "faster"),
)  # fmt: skip
"The cheapest explanation first: what disturbs most clusters, and costs least to give up."


def candidates(
    backend: str, nodes: int, interfaces: Sequence[str], adapters: Sequence[str] = (), *, tune: bool = False
) -> list[Setting]:
    """Return the settings to try: one at a time, then pairs of those that make something work.

    `interfaces` are those that all nodes have, `adapters` the InfiniBand adapters that all have.
    """
    several = nodes > 1
    name = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    sign = "" if backend == "gloo" else "="  # without it, NCCL reads a prefix
    by_interface = [
        Setting({name: f"{sign}{one}"}, f"Another interface than {one} does not connect the nodes.")
        for one in interfaces
    ]
    if backend == "gloo":
        return by_interface if several else [Setting({name: "lo"}, "The interface of the host's name fails.")]
    by_adapter = [
        Setting({"NCCL_IB_HCA": f"={one}"}, f"Another adapter than {one} does not connect the nodes.")
        for one in adapters
    ]
    chosen = [one for one in NCCL if (several or not one.between_nodes) and (tune or one.purpose == "works")]
    found = [*chosen, *(by_interface + by_adapter if several else [])]
    return [*found, *([] if tune else _pairs(found))]


def _pairs(settings: Iterable[Setting]) -> list[Setting]:
    """Return pairs of the first five settings, for two faults at the same time."""
    first = list(settings)[:5]
    return [
        Setting({**one.env, **other.env}, f"{one.explains} {other.explains}")
        for one, other in combinations(first, 2)
    ]


def fastest(base: Outcome, tried: Sequence[tuple[Setting, Outcome]]) -> tuple[Setting, Outcome] | None:
    """Return the fastest setting if it is faster than without; None otherwise."""
    working = [(one, end) for one, end in tried if end.ok and end.sizes]
    best = max(working, key=lambda pair: pair[1].sizes[-1]["bus"], default=None)
    if best is None or not base.ok or best[1].sizes[-1]["bus"] < FASTER * base.sizes[-1]["bus"]:
        return None
    return best
