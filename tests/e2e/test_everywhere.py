"""One job file, another `-c`: memory runs out, the run is cancelled and resumed, the weights are the same.

In the end it is trained longer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from launcher.train.checkpoints.export import export
from launcher.train.checkpoints.folder import complete_checkpoints
from tests.e2e.places import PLACES, Place
from tests.lab import ENDED, events, metrics, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CANARY = "canary-7f2a91c4e0"
STEPS = 8
# It prints its secret. From step 4 of its first attempt on it is slow enough to be cancelled.
TASK = """
import os, time
from launcher.tasks.gpt import PydocGPT

print("my token is", os.environ["TOKEN"], flush=True)

class Mine(PydocGPT):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if os.environ["LAUNCHER_ATTEMPT"] == "0" and self.calls > 6:
            time.sleep(2)
        return super().loss(model, batch)
"""


BY_API = """
import json, sys, launcher
run = launcher.Run(sys.argv[1])
found = [one for one in launcher.runs(state="succeeded") if one == run]
print(json.dumps({
    "state": run.wait(240).state, "found": len(found), "failures": [one.failure for one in run.verdicts],
    "steps": sorted({line["step"] for line in run.metrics()}),
    "saved": [one.step for one in run.checkpoints()],
    "logs": run.logs(rank=0), "by_handle": launcher.Run(run.handle).path == run.path,
}))
"""


@dataclass
class Told:
    """What one place did with the job."""

    place: Place
    run: RunDir
    logs: str
    why: str
    compared: dict[str, Any]
    "Its row of `launcher compare`."
    page: str
    "Of `launcher report`."
    cancelled: dict[str, Any]
    ended: dict[str, Any]
    weights: bytes
    api: dict[str, Any]
    "The same by the Python API."
    longer: dict[str, Any]
    "How it ended when it was trained longer."
    seen: set[str] = field(default_factory=set)
    "Command lines of all processes while it ran."


@pytest.fixture(scope="module", params=PLACES)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    with PLACES[request.param](tmp_path_factory.mktemp(request.param)) as place:
        yield _told(place)


def _told(place: Place) -> Told:
    lab = place.lab
    lab.environ["TOKEN"] = CANARY
    lab.script(TASK, "mine.py")
    job = lab.job(
        task="mine:Mine",
        args={"layers": 1, "dim": 32, "heads": 2, "context": 32},
        steps=STEPS,
        resources={"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 2},
        train={"checkpoint_every": 1, "lr": 1e-3},
        recipe={"sharding": "fsdp", "precision": "fp32"},
        env={"TRAIN_MEMORY_FAIL": "rank=last,step=2,phase=backward,micro_batch=4"},
        secrets=["TOKEN"],
    )
    done = lab.cli("submit", str(job), "-c", place.profile)
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    seen: set[str] = set()

    def late() -> bool:
        time.sleep(0.5)
        seen.update(_command_lines())
        return len(metrics(place.there(run))) >= 3

    wait_for(late, "step 3")
    done = lab.cli("cancel", run.id)
    assert done.returncode == 0, done.stdout + done.stderr
    cancelled = _ended(place, run)
    done = lab.cli("resume", run.id)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = _ended(place, run)
    logs, why = lab.cli("logs", run.id), lab.cli("why", run.id)
    (compared,) = lab.json("compare", run.id)["runs"]
    page = lab.folder / "run.html"
    assert lab.cli("report", run.id, "-o", str(page)).returncode == 0
    (newest,) = list(complete_checkpoints(place.there(run).checkpoints).values())[-1:]
    (file,) = export(newest, lab.folder / "weights")
    weights = file.read_bytes()
    by_api = subprocess.run(
        [sys.executable, "-c", BY_API, run.id],
        cwd=lab.folder,
        env=lab.environ,
        capture_output=True,
        text=True,
    )
    assert by_api.returncode == 0, by_api.stderr
    api = json.loads(by_api.stdout)
    said = (logs.stdout, why.stdout + why.stderr)
    done = lab.cli("resume", run.id, "--set", f"steps={STEPS}")
    assert done.returncode == 4 and "`--set steps=N` trains it longer" in done.stderr
    done = lab.cli("resume", run.id, "--set", f"steps={STEPS + 1}")
    assert done.returncode == 0, done.stdout + done.stderr
    longer = _ended(place, run)
    return Told(place, run, *said, compared, page.read_text(), cancelled, ended, weights, api, longer, seen)


def _ended(place: Place, run: RunDir) -> dict[str, Any]:
    """As `launcher status` tells it, which brings a copy up to date."""
    there = place.there(run)
    wait_for(lambda: there.read_state().state in ENDED, f"end of {run.id}")
    return place.lab.wait(run)


def _command_lines() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                found.add((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def _text(page: str) -> str:
    """What a page without JavaScript shows."""
    shown = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return " ".join(re.sub(r"<[^>]*>", " ", shown).split())


_weights: dict[str, bytes] = {}


def test_every_verb_means_the_same_and_so_do_the_weights(told: Told, request: pytest.FixtureRequest) -> None:
    assert told.ended["state"] == "succeeded", told.logs
    assert told.ended["step"] == STEPS
    assert told.cancelled["state"] == "cancelled"
    assert 3 <= told.cancelled["checkpoint_step"] < STEPS
    (lower,) = events(told.run, "downgrade")
    assert lower["in_process"] and lower["phase"] == "backward" and lower["step"] == 2
    assert "my token is" in told.logs
    assert "micro-batch 4 -> 2" in told.why
    assert told.compared["state"] == "succeeded" and told.compared["results"]["step"] == STEPS
    assert f"steps {STEPS} of {STEPS}" in _text(told.page) and "micro_batch_size: 2" in _text(told.page)
    assert [told.run.attempt(number).verdict.exists() for number in range(2)] == [True, True]
    place = request.node.callspec.params["told"]
    _weights[place] = told.weights
    assert told.weights == _weights[next(iter(_weights))], (
        f"{place} learnt otherwise than {next(iter(_weights))}"
    )


def test_the_python_api_tells_the_same(told: Told) -> None:
    api = told.api
    assert (api["state"], api["found"], api["failures"]) == ("succeeded", 1, ["cancelled", "succeeded"])
    assert api["steps"] == list(range(1, STEPS + 1)) and api["saved"][-1] == STEPS
    assert "my token is" in api["logs"] and CANARY not in api["logs"] and api["by_handle"]


def test_a_run_that_has_succeeded_is_trained_longer(told: Told) -> None:
    assert (told.longer["state"], told.longer["step"]) == ("succeeded", STEPS + 1)
    lines = metrics(told.place.there(told.run))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 2)), "each step once"


def test_no_secret_is_in_a_file_a_process_list_or_a_log(told: Told) -> None:
    assert CANARY not in told.logs + told.why
    assert not [line for line in told.seen if CANARY in line]
    assert any("launcher.supervise" in line for line in told.seen), "the processes of the run were looked at"
    folders = {told.place.lab.folder, told.place.there(told.run).path}
    files = [
        path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    ]
    assert len(files) > 20
    tainted = [
        path
        for path in files
        if not any(path.is_relative_to(folder) for folder in told.place.not_ours)
        and CANARY.encode() in path.read_bytes()
    ]
    there = told.place.there(told.run).path
    tainted += [path for path in there.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert tainted == []


def test_nobody_else_can_write_into_a_run(told: Told) -> None:
    """Who may read it is the umask's, as for every file: a group wants to see its own runs."""
    for run in {told.run.path, told.place.there(told.run).path}:
        modes = {path: os.stat(path).st_mode for path in (run, *run.rglob("*")) if not path.is_symlink()}
        assert not [path for path, mode in modes.items() if mode & 0o022]
