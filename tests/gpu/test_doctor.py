"""The doctor on GPUs: NVML's values, speeds against the data sheet, NCCL, its settings, and a whole run.

Not yet run on a GPU. One GPU is enough for all but the tests that say so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor.checks import CHECKS
from launcher.doctor.examine import examine
from launcher.doctor.job_needs import JobNeeds
from launcher.doctor.measure.gpus import measure_gpus
from launcher.doctor.measure.group import Group
from launcher.doctor.measure.job import measure_job
from launcher.doctor.outcome import BUS, Outcome, outcome
from launcher.doctor.rank_test import RankTest
from launcher.doctor.settings import Setting, candidates
from launcher.doctor.values import Expected, Measured
from launcher.planning.hardware import gpu_type_of
from launcher.spec.quantities import GIB
from launcher.supervise.ports import free_port
from tests.lab import Lab

pytestmark = pytest.mark.gpu

SECONDS = 60.0
"Time limit of a test of ranks: the first one starts CUDA and NCCL."


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


two_gpus = pytest.mark.skipif("gpus() < 2", reason="needs two GPUs")


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group() as group:
        yield group


def run(
    group: Group, what: str, ranks: int = 1, env: Mapping[str, str] | None = None, *, on_one: bool = False,
    seconds: float = SECONDS, **options: Any,
) -> Outcome:  # fmt: skip
    """Run a test of ranks, each on a GPU of its own, or all `on_one`."""
    given = {"gpus": True, **options}
    test = RankTest(what, given, tuple(range(ranks)), "127.0.0.1", free_port(), seconds, env or {})
    [told] = group.run([test], {rank: 0 if on_one else rank for rank in range(ranks)})
    return outcome(test, told)


def by_check(values: list[Measured]) -> dict[str, list[Measured]]:
    return {check: [one for one in values if one.check == check] for check in {one.check for one in values}}


def test_nvml_tells_of_every_gpu() -> None:
    import torch

    values = list(measure_gpus(0))
    assert {value.check for value in values} <= set(CHECKS)
    assert not [value for value in values if value.error]
    found = by_check(values)
    assert gpu_name() in {one.value for one in found["gpu-name"]}
    total = torch.cuda.get_device_properties(0).total_memory
    assert all(0.95 < total / one.value <= 1 for one in found["gpu-memory"]), "CUDA keeps a little for itself"
    expected = Expected(gpus_per_node=gpus(), gpu_type=gpu_name(), gpu_memory=total)
    verdicts = {one.check: one.verdict for one in examine(values, expected)}
    assert {verdicts[check] for check in ("gpus", "driver", "gpu-name", "gpu-memory")} == {"good"}


def test_a_data_centre_gpu_tells_of_ecc_rows_clocks_and_mig() -> None:
    if not any(name in gpu_name() for name in ("A100", "H100", "H200", "B200")):
        pytest.skip("another GPU may not count errors")
    assert {"gpu-ecc", "gpu-rows", "gpu-clocks", "gpu-mig"} <= set(by_check(list(measure_gpus(0))))


def test_memory_that_a_process_holds_is_found() -> None:
    import torch

    held = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda:0")
    try:
        [finding, *_] = [one for one in examine(measure_gpus(0), Expected()) if one.check == "gpu-used"]
    finally:
        del held
        torch.cuda.empty_cache()
    assert finding.verdict == "broken" and "holds memory" in finding.cause


def test_the_free_memory_of_the_gpu_is_compared_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    needs = JobNeeds({"name": "j", "batch": {"global": 1}, "command": ["true"]}, gpu=2**60)
    [free] = [one for one in measure_job(0, needs, tmp_path) if one.check == "job-gpu-memory"]
    assert 0 < free.value <= torch.cuda.get_device_properties(0).total_memory * 1.05
    [finding] = examine([free], Expected(job=needs))
    assert finding.verdict == "broken", "no GPU has 2^60 bytes"


def test_a_healthy_gpu_reaches_half_its_data_sheet(group: Group) -> None:
    end = run(group, "compute")
    assert end.ok and end.each[0]["flops"] > 1e12 and end.each[0]["bytes_per_second"] > 1e10
    if gpu_type_of(gpu_name()) is None:
        pytest.skip("no data sheet of this GPU")
    expected = Expected(gpus_per_node=1, gpu_type=gpu_name())
    [finding] = examine([Measured("compute", 0, asdict(end))], expected)
    assert (finding.verdict, finding.expected) == ("good", "half the data sheet"), finding.measured


@pytest.mark.parametrize("name", [name for name in BUS if name != "point-to-point"])
def test_nccl_gives_right_values_on_one_gpu(group: Group, name: str) -> None:
    """A rank cannot send to itself, so that point-to-point needs two."""
    end = run(group, "collective", name=name, sizes=[8, 2**20, 2**28])
    assert end.ok and [one["bytes"] for one in end.sizes] == [8, 2**20, 2**28], end


@pytest.mark.parametrize(
    "setting", candidates("nccl", "anywhere", [], several=True, tune=True), ids=lambda one: one.text
)
def test_nccl_takes_every_setting_of_the_search(group: Group, setting: Setting) -> None:
    """On one GPU this shows that NCCL knows the value; whether it cures anything is not shown."""
    if setting.env.get("NCCL_ALGO") == "Tree":
        pytest.skip("a tree needs two nodes")
    assert run(group, "connect", env=setting.env).ok


def test_two_ranks_on_one_gpu_are_an_error_and_no_hang(group: Group) -> None:
    end = run(group, "connect", 2, on_one=True)
    assert end.kind == "error" and "NCCL" in end.error


@two_gpus
@pytest.mark.parametrize("name", list(BUS))
def test_two_gpus_exchange_right_values_at_the_speed_of_their_link(group: Group, name: str) -> None:
    end = run(group, "collective", 2, name=name, sizes=[8, 2**20, 2**28])
    assert end.ok, end
    expected = Expected(ranks_per_node=2, gpus_per_node=2, gpu_type=gpu_name())
    [finding] = examine([Measured(name, 0, asdict(end))], expected)
    assert finding.verdict == "good", finding


@two_gpus
@pytest.mark.parametrize("setting", candidates("nccl", "inside", [], several=False), ids=lambda one: one.text)
def test_two_gpus_work_with_every_setting_of_the_search(group: Group, setting: Setting) -> None:
    assert run(group, "collective", 2, setting.env, name="all-reduce", sizes=[8, 2**20]).ok


@two_gpus
def test_p2p_is_told_for_each_pair() -> None:
    found = by_check(list(measure_gpus(0)))["gpu-p2p"]
    assert len(found) == gpus() * (gpus() - 1) // 2 and not [one for one in found if one.error]


def test_a_whole_run_on_the_gpus_of_this_machine(lab: Lab) -> None:
    """The scripts, NVML, a matrix product, and a tiny model in one process, under DDP and FSDP2."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    profile = {
        "name": "here",
        "scheduler": "local",
        "node": {"gpu": {"type": gpu_name(), "memory": memory, "count": gpus()}},
    }
    (lab.folder / "here.yaml").write_text(json.dumps(profile))
    environ = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    lab.environ.update(environ)
    done = lab.cli("doctor", "-c", "here.yaml", "--json")
    told = json.loads(done.stdout)
    assert (told["backend"], told["ranks"], told["complete"]) == ("nccl", gpus(), True), done.stderr
    verdicts = {one["check"]: one["verdict"] for one in told["findings"]}
    good = {
        "answers",
        "ranks",
        "gpus",
        "driver",
        "torch",
        "compute",
        "model-alone",
        "model-ddp",
        "model-fsdp",
    }
    assert {check: verdicts.get(check) for check in good} == dict.fromkeys(good, "good"), told["findings"]
