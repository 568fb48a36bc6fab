"""Checks of collectives over the backend of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Measured, Opinion, Verdict
from launcher.planning.hardware import GIGA, TERA, gpu_type_of
from launcher.spec.quantities import format_bytes

GLOO_LEAST = 25e6
"Bytes/s of bus bandwidth: a fifth of 1 Gb/s Ethernet, the slowest network of a data centre."
NCCL_SHARE = 0.5
"Minimum fraction of a link's data sheet for large messages. nccl-tests reaches 0.75 to 0.95."
SHEET_SHARE, MEDIAN_SHARE = 0.5, 0.5
"Minimum fraction of the data sheet's FLOP/s and memory bandwidth that a healthy GPU reaches."
LARGE = 2**19
"Message size in bytes from which bandwidth, not latency, dominates."
WORDS = {"hang": "hangs", "error": "fails", "wrong": "wrong values", "ok": "works"}
"How a test of ranks ended, by kind of outcome."
NAMES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "point-to-point")


def connect(measured: Measured, expected: Expected) -> Opinion:
    if measured.value["kind"] == "ok":
        return Opinion("good", "connects")
    return _failed(measured.value, expected, "connects")


def collective(measured: Measured, expected: Expected) -> Opinion:
    value = measured.value
    if value["kind"] != "ok":
        return _failed(value, expected, "right values")
    largest = value["sizes"][-1]
    least = least_bandwidth(expected)
    if largest["bytes"] < LARGE or least is None:
        return Opinion("good")
    wanted = f"at least {rate(least)}"
    if largest["bus"] >= least:
        return Opinion("good", wanted)
    suspect = "the network" if expected.nodes > 1 else "the load of the node"
    pairs = " and the pairs of ranks below" if expected.ranks > 2 else ""
    return Opinion(
        "poor",
        wanted,
        "The ranks exchange large messages slowly, so that gradients take long.",
        f"See {suspect} above{pairs}; --tune looks for faster settings.",
    )


def compute(measured: Measured, expected: Expected) -> Opinion:
    """Judge each rank by the data sheet of its GPU, or else by the median of all ranks."""
    value = measured.value
    if value["kind"] == "wrong":
        who = ranks(value["ranks"], expected)
        cause = f"Equal inputs gave different bits on {who}: its processor or memory is faulty."
        return Opinion("broken", "equal bits", cause, "Leave the node out, and have it checked.")
    if value["kind"] != "ok":
        return _failed(value, expected, "equal bits")
    gpu = gpu_type_of(expected.gpu_type or "", expected.gpu_memory) if expected.gpus_per_node else None
    flops = {rank: speeds["flops"] for rank, speeds in value["each"].items()}
    bytes_per_second = {rank: speeds["bytes_per_second"] for rank, speeds in value["each"].items()}
    least_flops = SHEET_SHARE * gpu.half * TERA if gpu else MEDIAN_SHARE * median(flops.values())
    least_bytes = (
        SHEET_SHARE * gpu.bandwidth * GIGA if gpu else MEDIAN_SHARE * median(bytes_per_second.values())
    )
    slow = sorted(
        {rank for rank, speed in flops.items() if speed < least_flops}
        | {rank for rank, speed in bytes_per_second.items() if speed < least_bytes}
    )
    wanted = "half the data sheet" if gpu else "half the median"
    if not slow:
        return Opinion("good", wanted)
    cause = f"{ranks(slow, expected)} computes or copies slowly. All others wait for it in every step."
    cure = "Look for other processes, heat and power limits there, or leave the node out."
    return Opinion("poor", wanted, cause, cure)


def least_bandwidth(expected: Expected) -> float | None:
    """Return the minimum bus bandwidth in bytes/s for large messages, or None if unknown."""
    if expected.backend == "gloo":
        return GLOO_LEAST
    if expected.nodes > 1:
        return NCCL_SHARE * expected.inter_node if expected.inter_node else None
    gpu = gpu_type_of(expected.gpu_type or "", expected.gpu_memory)
    return NCCL_SHARE * (gpu.nvlink or gpu.pcie) * GIGA if gpu else None


def pairs(measured: Measured, expected: Expected) -> Opinion:
    value = measured.value
    if not value["bad"]:
        return Opinion("good", "all")
    fault = "is slow" if value["slow"] else "fails"
    verdict: Verdict = "poor" if value["slow"] else "broken"
    if value["culprits"]:
        cause = f"Every pair with {ranks(value['culprits'], expected)} {fault}; all others are good."
        return Opinion(verdict, "all", cause, _cure(value["culprits"], expected))
    names = ", ".join(f"{first} and {second}" for first, second in value["bad"][:4])
    between = {tuple(sorted(rank // expected.ranks_per_node for rank in pair)) for pair in value["bad"]}
    cause = f"What {fault}: ranks {names}" + ("." if len(value["bad"]) <= 4 else " and others.")
    if len(between) == 1 and len(set(next(iter(between)))) == 2:
        cause += f" All are between node {min(between)[0]} and node {min(between)[1]}."
    cure = "Leave one of these nodes out, and have the cables and switches between them checked."
    if expected.nodes == 1:
        cure = "See the checks of this node above."
    return Opinion(verdict, "all", cause, cure)


def _failed(value: Mapping[str, Any], expected: Expected, wanted: str) -> Opinion:
    """Return the opinion on a hang, an error or wrong values, with the ranks to blame."""
    who = ranks(value["ranks"], expected)
    if value["kind"] == "wrong":
        cause = (
            f"The values that {who} sent or received are wrong."
            if who
            else (
                "Every rank got a wrong sum: one of them gave wrong numbers."
                + (" The pairs of ranks below tell which." if expected.ranks > 2 else "")
            )
        )
    elif value["kind"] == "error":
        cause = f"{who or 'Every rank'} failed in {value['at']}: {value['error']}".rstrip(".") + "."
    elif value["state"] in ("T", "t"):
        cause = (
            f"{who} is stopped (SIGSTOP, state {value['state']}) in {value['at']}; the others wait for it."
        )
    elif value["error"]:
        cause = f"{who} failed in {value['at']}: {value['error']}".rstrip(".") + ". The others wait for it."
    elif who:
        cause = f"{who} does not get as far as the others, who wait in {value['at']}."
    else:
        cause = f"All ranks wait in {value['at']} until the time is over: messages do not arrive."
    return Opinion("broken", wanted, cause, _cure(value["ranks"], expected))


def _cure(blamed: Sequence[int], expected: Expected) -> str:
    nodes = sorted({rank // expected.ranks_per_node for rank in blamed})
    if expected.nodes > 1 and len(nodes) == 1:
        return f"Leave node {nodes[0]} out (slurm.extra.exclude or ssh.hosts), and have it checked."
    network = "the checks of the network, and " if expected.nodes > 1 else ""
    return f"See {network}the settings that were tried below."


def ranks(numbers: Sequence[int], expected: Expected) -> str:
    """Name ranks with their nodes, such as `rank 3 (node 1)`; return "" for none."""
    words = [
        f"rank {number}" + (f" (node {number // expected.ranks_per_node})" if expected.nodes > 1 else "")
        for number in numbers
    ]
    return " or ".join(words) if len(words) <= 2 else f"{', '.join(words[:-1])} and {words[-1]}"


def rate(speed: float) -> str:
    """Format bytes/s, such as `1.2 GB/s`."""
    return f"{speed / 1e9:.3g} GB/s" if speed >= 1e9 else f"{speed / 1e6:.3g} MB/s"


def _show(value: Mapping[str, Any]) -> str:
    if value["kind"] != "ok":
        return WORDS[value["kind"]]
    if not value["sizes"]:
        return "connects"
    first, last = value["sizes"][0], value["sizes"][-1]
    return f"{first['seconds'] * 1e6:.0f} us, {rate(last['bus'])} at {format_bytes(last['bytes'])}"


def _speeds(value: Mapping[str, Any]) -> str:
    if value["kind"] != "ok":
        return WORDS[value["kind"]]
    flops = min(speeds["flops"] for speeds in value["each"].values())
    bytes_per_second = min(speeds["bytes_per_second"] for speeds in value["each"].values())
    speed = f"{flops / TERA:.3g} TFLOP/s" if flops >= TERA else f"{flops / GIGA:.3g} GFLOP/s"
    return f"{speed}, {rate(bytes_per_second)}"


ROWS = (
    Check("compute", "product, memory sweep", "collectives", compute, _speeds, of_node=False),
    Check("joined", "process group", "collectives", connect, _show, of_node=False),
    *(Check(name, name, "collectives", collective, _show, of_node=False) for name in NAMES),
    Check(
        "pairs", "pairs of ranks", "collectives", pairs,
        lambda value: f"{value['good']} of {value['good'] + len(value['bad'])} good", of_node=False,
    ),
)  # fmt: skip
