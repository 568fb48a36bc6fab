"""Real frameworks with W&B and TensorBoard run out of memory after their first checkpoint."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_CODES
from tests.lab import Lab, events, verdicts
from tests.train.test_metrics import wandb_records

SCRIPTS = Path(__file__).parent / "frameworks"
PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
ON_TWO_CPU_RANKS = ("--set", "resources.gpus_per_node=0", "--set", "resources.ranks_per_node=2")


class Case(NamedTuple):
    script: str
    packages: str = "torch"
    samples: int = 64
    "56 do not fill whole steps: 28 on each rank are 3 micro-batches of 8 and a rest, or 7 of 4."
    length: str = "steps=6"
    failing_rank: str | None = None
    "The others then wait in a collective. None: memory runs out on every rank."

    def __str__(self) -> str:
        return f"{self.script.removeprefix('with_')} {self.samples}"


CASES = [
    Case("with_ddp", samples=56, failing_rank="0"),
    Case("with_ddp", failing_rank="0"),
    Case("with_fsdp", samples=56),
    Case("with_transformers", "transformers accelerate"),
    Case("with_accelerate", "accelerate", samples=56),
    Case("with_lightning", "lightning", samples=32, length="epochs=3"),
    Case("with_deepspeed", "deepspeed", samples=56, failing_rank="1"),
]
GLOBAL_BATCH = 16


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])], ids=str
)
def test_a_framework_goes_on_from_its_checkpoint_with_half_the_micro_batch(lab: Lab, case: Case) -> None:
    for package in (*case.packages.split(), "wandb", "tensorboard"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[frameworks]'")
    lab.script((SCRIPTS / f"{case.script}.py").read_text())
    lab.script((SCRIPTS / "small_gpu.py").read_text(), "small_gpu.py")
    lab.script(_blocks(PAGE, "yaml")[0], "job.yaml")
    lab.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(lab.folder), "SAMPLES": str(case.samples)}
    if case.failing_rank is not None:
        lab.environ["FAILING_RANK"] = case.failing_rank

    done = lab.cli("run", "job.yaml", "--set", case.length, *ON_TWO_CPU_RANKS, timeout=240)
    run = lab.newest()
    assert done.returncode == 0, done.stderr + lab.all_logs(run)
    assert lab.status(run)["state"] == "succeeded"

    failed, last = verdicts(run)
    assert (failed["failure"], last["failure"]) == ("gpu-oom", "succeeded")
    assert failed["exception"].startswith(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert failed["memory"]["requested"] == 2 * 2**30
    [downgrade] = events(run, "downgrade")
    assert downgrade["changes"] == {"micro_batch_size": [8, 4], "grad_accum": [1, 2]}

    first, second = _consumed(run, attempt=0), _consumed(run, attempt=1)
    assert list(first) == [1, 2, 3], "memory runs out in step 4"
    assert list(second) == [3, 4, 5, 6], "the newest checkpoint is that of step 2"
    for passes, sizes in ((first, [8] * 2), (second, [4] * 4)):
        for step, samples in passes.items():
            assert [len(one) for one in samples] == sizes, f"step {step}"
            assert len(set(itertools.chain(*samples))) == GLOBAL_BATCH, f"step {step}"
    assert set(itertools.chain(*first[3])) == set(itertools.chain(*second[3]))
    whole = {**first, **second}
    per_epoch = case.samples // GLOBAL_BATCH
    for begin in range(1, 6 - per_epoch + 2, per_epoch):
        seen = {sample for step in range(begin, begin + per_epoch) for one in whole[step] for sample in one}
        assert len(seen) == per_epoch * GLOBAL_BATCH, f"the epoch that begins with step {begin}"

    _trackers_are_on(lab.folder)


@pytest.mark.e2e
@pytest.mark.slow
def test_deepspeed_goes_on_from_the_checkpoint_before_one_that_a_rank_could_not_write(lab: Lab) -> None:
    for package in ("deepspeed", "wandb", "tensorboard"):
        pytest.importorskip(package)
    lab.script((SCRIPTS / "with_deepspeed.py").read_text())
    lab.script((SCRIPTS / "small_gpu.py").read_text(), "small_gpu.py")
    lab.script(_blocks(PAGE, "yaml")[0], "job.yaml")
    lab.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(lab.folder), "SAMPLES": "56"}
    lab.environ |= {"FAILING_RANK": "none", "FULL_DISK": "1"}
    done = lab.cli("run", "job.yaml", "--set", "steps=6", *ON_TWO_CPU_RANKS, timeout=240)
    run = lab.newest()
    assert done.returncode == EXIT_CODES["disk-full"], done.stderr + lab.all_logs(run)
    done = lab.cli("resume", "--follow", timeout=240)
    assert done.returncode == 0, done.stderr + lab.all_logs(run)
    assert list(_consumed(run, attempt=1)) == [3, 4, 5, 6]


def _consumed(run: RunDir, attempt: int) -> dict[int, list[list[int]]]:
    """Return the samples of each forward pass on both ranks, by optimizer step."""
    steps: dict[int, list[list[int]]] = {}
    for rank in (0, 1):
        for line in (run.path / f"consumed-{rank}.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["attempt"] == attempt:
                steps.setdefault(record["step"], []).extend(record["passes"])
    return steps


def _trackers_are_on(folder: Path) -> None:
    """Assert that each attempt has left files of both trackers, and that they have metrics."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    boards, offline_runs = [*folder.rglob("*.tfevents.*")], [*folder.rglob("offline-run-*/*.wandb")]
    assert len(boards) >= 2 and len(offline_runs) == 2
    assert any(EventAccumulator(str(board)).Reload().Tags()["scalars"] for board in boards)
    assert any(
        record.HasField("history") for file in offline_runs for record in wandb_records(file.read_bytes())
    )


def test_the_lines_that_the_page_shows_are_those_of_the_scripts() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.M)
    shown = {match[1]: section for section in sections if (match := re.search(r"/(with_\w+)\.py`", section))}
    assert set(shown) == {case.script for case in CASES} == {file.stem for file in SCRIPTS.glob("with_*.py")}
    for script, section in shown.items():
        lines = (SCRIPTS / f"{script}.py").read_text().splitlines()
        blocks = _blocks(section, "python")
        assert blocks, script
        for block in blocks:
            height = len(block.splitlines())
            windows = (lines[first : first + height] for first in range(len(lines)))
            assert block.rstrip() in (textwrap.dedent("\n".join(one)) for one in windows), (
                f"{script}:\n{block}"
            )


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.S | re.M)
