"""The settings that a search tries, in order. Pure.

Sources: NCCL's documentation, "Environment Variables"; torch's documentation of torch.distributed, "Choosing
the network interface to use". The settings for NCCL have not yet been tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

from launcher.doctor.outcome import Outcome

Purpose = Literal["works", "faster"]
Where = Literal["anywhere", "inside", "between"]
"Where collectives fail, or where a setting has an effect: inside nodes, between nodes, or both."

FASTER = 1.1
"A setting is faster if it reaches this many times the bandwidth. Less is noise."


class Setting(NamedTuple):
    """Environment variables to try together."""

    env: Mapping[str, str]
    explains: str
    "The fault, if training works with this setting."
    purpose: Purpose = "works"
    where: Where = "anywhere"
    "Where the setting has an effect."

    @property
    def text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.env.items())


NCCL = (
    Setting(
        {"NCCL_SHM_DISABLE": "1"}, "Shared memory between the processes of a node fails.", where="inside"
    ),
    Setting(
        {"NCCL_P2P_DISABLE": "1"}, "GPUs cannot read each other's memory, though the driver says so.",
        where="inside",
    ),
    Setting({"NCCL_IB_DISABLE": "1"}, "InfiniBand or RoCE does not connect the nodes.", where="between"),
    Setting(
        {"NCCL_NET_GDR_LEVEL": "LOC"}, "Network adapters fail to reach the GPUs' memory (GPUDirect RDMA).",
        where="between",
    ),
    Setting({"NCCL_NET": "Socket"}, "The network plugin of this system or image fails.", where="between"),
    Setting({"NCCL_NVLS_ENABLE": "0"}, "Reductions in the NVLink switch (NVLS) fail."),
    Setting({"NCCL_CUMEM_ENABLE": "0"}, "NCCL's memory through cuMem fails in this container."),
    Setting({"NCCL_ALGO": "Ring"}, "Another algorithm than the ring fails."),
    Setting({"NCCL_PROTO": "Simple"}, "The protocols for small messages (LL, LL128) give wrong values."),
    Setting(
        {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
        "One TCP connection does not fill the network.", "faster", "between",
    ),
    Setting({"NCCL_IB_QPS_PER_CONNECTION": "4"}, "One queue pair uses one path.", "faster", "between"),
    Setting({"NCCL_ALGO": "Tree"}, "NCCL chooses the slower algorithm.", "faster"),
)  # fmt: skip
"The most likely faults come first, and among them the features that cost least to disable."


NO_SETTING = Setting({}, "")


def candidates(
    backend: str,
    where: Where,
    interfaces: Sequence[str],
    adapters: Sequence[str] = (),
    *,
    several: bool = True,
    tune: bool = False,
) -> list[Setting]:
    """Return the settings to try: single settings first, then pairs of them.

    Settings that have an effect where collectives fail (`where`) come first. On one node (not `several`),
    settings between nodes are left out. `interfaces` and `adapters` (InfiniBand) are those that all nodes
    have.
    """
    name = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    sign = "" if backend == "gloo" else "="  # without it, NCCL reads a prefix
    by_interface = [
        Setting(
            {name: f"{sign}{interface}"}, f"Another interface than {interface} does not connect the nodes.",
            where="between",
        )
        for interface in interfaces
    ]  # fmt: skip
    if backend == "gloo":
        return by_interface if several else [Setting({name: "lo"}, "The interface of the host's name fails.")]
    by_adapter = [
        Setting(
            {"NCCL_IB_HCA": f"={adapter}"}, f"Another adapter than {adapter} does not connect the nodes.",
            where="between",
        )
        for adapter in adapters
    ]  # fmt: skip
    settings = [setting for setting in NCCL if tune or setting.purpose == "works"]
    settings += [*by_interface, *by_adapter]
    settings = [setting for setting in settings if several or setting.where != "between"]
    if where != "anywhere":
        settings.sort(key=lambda setting: setting.where not in (where, "anywhere"))
    return [*settings, *([] if tune else _pairs(settings))]


def _pairs(settings: Iterable[Setting]) -> list[Setting]:
    """Return pairs of the first five settings, for nodes with two faults."""
    first = list(settings)[:5]
    return [
        Setting({**first.env, **second.env}, f"{first.explains} {second.explains}")
        for first, second in combinations(first, 2)
    ]


def fastest(outcomes: Iterable[tuple[Setting, Outcome]]) -> Setting | None:
    """Return the setting with the highest bus bandwidth of the largest message; None if none works."""
    working = [
        (outcome.sizes[-1]["bus"], setting) for setting, outcome in outcomes if outcome.ok and outcome.sizes
    ]
    return max(working, key=lambda pair: pair[0])[1] if working else None


def gain(turns: Sequence[tuple[Outcome, Outcome]]) -> tuple[float, float] | None:
    """Return the highest bus bandwidth without a setting and the lowest with it; None if it is not faster.

    Each turn is (outcome without the setting, outcome with it).
    """
    if not all(outcome.ok and outcome.sizes for turn in turns for outcome in turn):
        return None
    slow = max(before.sizes[-1]["bus"] for before, _ in turns)
    fast = min(after.sizes[-1]["bus"] for _, after in turns)
    return (slow, fast) if fast >= FASTER * slow else None
