"""The table of the files of a run, held against a run that really ran."""

from __future__ import annotations

import re

import pytest

from launcher.rundir.file_table import ATTEMPT, DELETED, FILES, GROWING, SENT, SUBMITTED, expression
from launcher.supervise.no_shared_folder.file_sync import DOWN, up
from tests.lab import Lab, wait_for


@pytest.mark.e2e
def test_a_run_leaves_only_files_of_the_table(lab: Lab) -> None:
    lab.script("print('hello')\n")
    run = lab.submit(str(lab.job(command="python train.py", secrets=[{"name": "TOKEN", "env": "HOME"}])))
    assert lab.wait(run)["state"] == "succeeded"
    wait_for(run.report.is_file, "report.html")  # it is written after the run's end, and then replaced whole
    files = [path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()]
    assert {"run.json", "events.jsonl", "attempts/000/exits/rank-001.json"} <= set(files)
    unknown = [file for file in files if not any(re.fullmatch(expression(row.path), file) for row in FILES)]
    assert unknown == []


def test_what_grows_has_an_ending_of_its_own() -> None:
    """Copies tell by the name alone how a file changes."""
    replaced = [row.path for row in FILES if row.change != "grows" and row.path.endswith(GROWING)]
    assert replaced == [] and GROWING == (".err", ".jsonl", ".log", ".out")


def test_requests_are_sent_and_deleted_again_and_submissions_only_sent() -> None:
    assert {"cancel", "slurm-unfit", "plans/*/*.json"} <= set(DELETED) <= set(SENT)
    assert SUBMITTED == ("run.json", "plan.json", "scripts", "plans")


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("events.jsonl", True),
        ("attempts/003/logs/node-02/rank-004.out", True),
        ("attempts/003-save/exits/rank-004.json", True),
        ("attempts/003/nodes/node-02.ended.json", True),
        ("attempts/003/nodes/node-01.ended.json", False),
        ("attempts/003/logs/node-01/rank-004.out", False),
        ("attempts/../exits/rank-004.json", False),
        ("attempts/x/exits/rank-004.json", False),
        ("attempts/003/exits/.rank-004.json.partial", False),
        ("state.json", False),
        ("attempts/003/exits/../../../rank-1.json", False),
    ],
)
def test_node_0_takes_only_what_is_the_other_nodes_to_send(path: str, taken: bool) -> None:
    assert any(kind.covers(path) for kind in up(2)) is taken


def test_what_both_directions_have_in_common_is_nothing() -> None:
    assert not {kind.row.path for kind in up(1)} & {kind.row.path for kind in DOWN}
    assert any(kind.row.path == f"{ATTEMPT}/recipe.json" for kind in DOWN)
