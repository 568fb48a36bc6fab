"""Judging is pure: a value and what is expected of it give a finding, and findings give a page."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from launcher.doctor.checks import CHECKS
from launcher.doctor.examine import examine, worst
from launcher.doctor.options import Options
from launcher.doctor.page import WIDTH, page
from launcher.doctor.values import Expected, Measured
from launcher.spec.quantities import GIB
from tests.doctor.values import finding, verdicts


def speeds(teraflops: float, gigabytes: float) -> dict[str, Any]:
    """Eight ranks, one of which has other speeds than the data sheet of an H100."""
    healthy = {"flops": 0.7 * 989.5e12, "bytes_per_second": 0.8 * 3350e9}
    one = {"flops": teraflops * 1e12, "bytes_per_second": gigabytes * 1e9}
    each = {str(rank): one if rank == 1 or teraflops < 1 else healthy for rank in range(8)}
    return {"kind": "ok", "ranks": [], "each": each, "error": "", "at": "", "state": ""}


TORCH = {"torch": "2.13.0+cpu", "cuda": "", "nccl": "", "misfits": []}
GPU = Expected(gpus_per_node=8, gpu_type="H100", gpu_memory=79 * GIB)


@pytest.mark.parametrize(
    ("check", "value", "expected", "verdict"),
    [
        ("memory", 60 * GIB, Expected(memory=62 * GIB), "good"),
        ("memory", 50 * GIB, Expected(memory=62 * GIB), "broken"),
        ("memory", 50 * GIB, Expected(), "good"),
        ("free-memory", {"free": 3 * GIB, "limit": 8 * GIB}, Expected(), "poor"),
        ("shm", 2**20, Expected(), "broken"),
        ("shm", 64 * 2**20, Expected(), "poor"),
        ("shm", 2 * GIB, Expected(), "good"),
        ("shm", 2 * GIB, Expected(shm=16 * GIB), "poor"),
        ("memlock", {"bytes": -1, "infiniband": True}, Expected(), "good"),
        ("memlock", {"bytes": 8 * 2**20, "infiniband": True}, Expected(), "broken"),
        ("memlock", {"bytes": 64 * 2**10, "infiniband": False}, Expected(), "poor"),
        ("nofile", 1000, Expected(), "broken"),
        ("nofile", -1, Expected(), "good"),
        ("stack", 2**20, Expected(), "poor"),
        ("clock", -30.0, Expected(), "poor"),
        ("clock", 3600.0, Expected(), "broken"),
        ("encoding", "ANSI_X3.4-1968", Expected(), "poor"),
        ("encoding", "UTF-8", Expected(), "good"),
        ("python", "3.9.18", Expected(), "broken"),
        ("torch", TORCH, Expected(), "good"),
        ("torch", TORCH, GPU, "broken"),
        ("torch", {**TORCH, "torch": "2.9.1", "cuda": "12.8"}, GPU, "broken"),
        (
            "torch",
            {**TORCH, "cuda": "12.8", "misfits": ["nvidia-nccl-cu12 2.26 instead of 2.27"]},
            GPU,
            "poor",
        ),
        ("bitsandbytes", {"version": "0.43.1", "cuda": [], "torch": ""}, Expected(), "poor"),
        ("bitsandbytes", {"version": "0.50.2", "cuda": ["12.8"], "torch": "12.9"}, GPU, "good"),
        ("bitsandbytes", {"version": "0.50.2", "cuda": ["12.8"], "torch": "13.0"}, GPU, "poor"),
        ("space", 10**6, Expected(), "broken"),
        ("space", 5 * GIB, Expected(), "poor"),
        ("inodes", 0, Expected(), "broken"),
        ("write", 10e6, Expected(), "poor"),
        ("rename", "keeps", Expected(), "broken"),
        ("flock", "excludes nobody", Expected(), "poor"),
        ("gpus", 7, GPU, "broken"),
        ("gpus", 8, GPU, "good"),
        ("gpu-name", "NVIDIA H100 80GB HBM3", GPU, "good"),
        ("gpu-name", "NVIDIA A100-SXM4-80GB", GPU, "poor"),
        ("gpu-name", "NVIDIA A100-SXM4-80GB", replace(GPU, gpu_type="A100 SXM"), "good"),
        ("gpu-name", "NVIDIA A100-SXM4-80GB", replace(GPU, gpu_type="A100 PCIe"), "poor"),
        ("gpu-memory", 40 * GIB, GPU, "broken"),
        ("gpu-used", {"bytes": 30 * GIB, "pids": [4242]}, GPU, "broken"),
        ("gpu-ecc", 2, GPU, "broken"),
        ("gpu-rows", 1, GPU, "broken"),
        ("gpu-xid", 3, GPU, "poor"),
        ("gpu-clocks", ["power cap"], GPU, "good"),
        ("gpu-clocks", ["hardware thermal slowdown"], GPU, "poor"),
        ("gpu-mig", True, GPU, "broken"),
        ("gpu-nvlink", 2, GPU, "poor"),
        ("gpu-p2p", "status 3", GPU, "poor"),
        ("compute", speeds(600, 3000), GPU, "good"),
        ("compute", speeds(600, 900), GPU, "poor"),
        ("compute", {**speeds(600, 3000), "kind": "wrong", "ranks": [1]}, GPU, "broken"),
        ("compute", speeds(0.01, 10), Expected(), "good"),
        ("driver", {"driver": "535.104", "cuda": "12.2", "torch": "12.8"}, GPU, "good"),
        ("driver", {"driver": "470.82", "cuda": "11.4", "torch": "12.8"}, GPU, "broken"),
    ],
)
def test_a_value_gets_its_verdict(check: str, value: Any, expected: Expected, verdict: str) -> None:
    found = finding(check, value, expected)
    assert found.verdict == verdict
    assert verdict == "good" or (found.expected and found.cause.endswith(".") and found.cure)


def test_what_could_not_be_measured_is_a_finding_with_the_reason() -> None:
    found = finding("gpus", None, GPU, error="NVML Shared Library Not Found")
    assert found.verdict == "broken" and "NVML Shared Library Not Found." in found.cause and found.cure


def test_equal_findings_of_several_nodes_and_gpus_are_one() -> None:
    values = [Measured("gpu-ecc", node, 0, f"GPU {gpu}") for node in (0, 1) for gpu in range(8)]
    sick = Measured("gpu-ecc", 1, 2, "GPU 3")
    found = examine([*(one for one in values if (one.node, one.subject) != (1, "GPU 3")), sick], GPU)
    assert [(one.verdict, one.nodes, len(one.subjects)) for one in found] == [
        ("good", (0, 1), 8),
        ("broken", (1,), 1),
    ]
    lines = page("x", found, 2)
    assert any("uncorrected ECC errors," in line for line in lines)
    assert any("node 1, GPU 3" in line for line in lines)


def test_nodes_that_differ_are_named() -> None:
    values = [Measured("python", node, "3.11.7" if node else "3.12.1") for node in range(3)]
    [alike, differs] = examine(values, Expected(nodes=3))
    assert (alike.verdict, alike.measured) == ("good", "3.12.1; 3.11.7")
    assert (differs.verdict, differs.nodes) == ("broken", (0,))
    assert "3.12.1 on node 0; 3.11.7 on node 1-2" in differs.cause


def test_the_page_fits_80_columns_and_has_every_cause_and_cure() -> None:
    long = Measured("space", 1, 10**6, "run folder /scratch/" + "a-very-long-name/" * 6)
    values = [long, Measured("shm", 0, 2**20), Measured("gpus", 0, None, error="no " + "word " * 60)]
    found = examine(values, GPU)
    lines = page("a title of many words " * 8, found, 2)
    assert all(len(line) <= WIDTH for line in lines)
    text = " ".join(" ".join(lines).split())
    assert all(" ".join(one.cause.split()) in text for one in found)
    assert lines[-1] == "3 broken"


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(4, other) for other in range(4)], "4 to 1, 4 to 2, 4 to 3"),
        ([(4, other) for other in range(4)] + [(5, 4)], "5 ways of node 4"),
        ([(other, sick) for other in range(4) for sick in (4, 5)], "8 ways of node 4 or node 5"),
        ([(one, one + 1) for one in range(0, 12, 2)], "2 to 3, 4 to 5, 6 to 7 and 2 other ways"),
    ],
)
def test_nodes_that_faulty_ways_have_in_common_are_named(pairs: list[tuple[int, int]], told: str) -> None:
    values = [Measured("loss", one, 0.2, f"{one} to {other}") for one, other in pairs]
    lines = page("x", examine(values, Expected(nodes=12)), 12, {node: f"n{node}" for node in range(12)})
    text = " ".join(" ".join(lines).split())
    assert told in text and all(f"node {node}: n{node}" in text for node in re.findall(r"node (\d+)", told))


def test_the_worst_verdict_decides() -> None:
    assert worst([]) == "good"
    assert worst(examine([Measured("shm", 0, 2**26), Measured("stack", 0, -1)], Expected())) == "poor"


def test_verdicts_without_findings_are_empty() -> None:
    assert verdicts([Measured("stack", 0, -1)]) == {}


def test_every_row_has_a_name_of_its_own_and_a_title_that_fits() -> None:
    assert all(name == row.name and len(row.title) <= 27 for name, row in CHECKS.items())


def test_options_travel_in_the_command() -> None:
    for options in (Options(), Options("quick"), Options("thorough", tune=True)):
        assert Options.of_command(options.command) == options
    assert Options.of_command(["python", "train.py"]) is None
