"""`launcher doctor`: the real CLI submits the doctor's run and shows its results."""

from __future__ import annotations

import json

import pytest

from launcher.rundir.layout import RunDir
from tests.lab import Lab


@pytest.mark.e2e
def test_the_quick_check_of_this_machine(lab: Lab) -> None:
    lab.environ["LAUNCHER_RUNS"] = str(lab.folder / "runs\033[31m")
    done = lab.cli("doctor", "--quick")
    assert done.returncode in (0, 1), done.stderr
    assert "\033" not in done.stdout and "/runs\\x1b[31m/" in "".join(done.stdout.split())
    lines = done.stdout.splitlines()
    assert lines[0].startswith("doctor: local, 1 node, 2 ranks, gloo, quick")
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["good", "ranks", "that", "connected", "2", "2"] for line in lines)
    run = lab.newest()
    again = lab.cli("doctor", "--show", run.id, "--compare")
    assert again.stdout.startswith(done.stdout)
    compared = again.stdout.removeprefix(done.stdout)
    assert compared == "\nno earlier run of the doctor found local healthy\n" and not again.stderr
    told = lab.json("doctor", "--show", run.id, "--compare", code=done.returncode)
    assert (told["healthy"], told["changes"]) == (None, [])
    assert (told["backend"], told["ranks"], told["level"]) == ("gloo", 2, "quick")
    assert (told["verdict"] == "broken") is bool(done.returncode)
    assert {"shm", "torch", "write"} <= {one["check"] for one in told["measured"]}
    answer = run.attempt(0).path / "doctor/node-00-000.json"
    answer.write_text("garbage\n")
    spoiled = lab.cli("doctor", "--show", run.id)
    words = " ".join(spoiled.stdout.split())
    assert spoiled.returncode == 1 and "which has files that cannot be read: " in words
    assert answer.name in "".join(words.split()) and "Restore the file" in words
    assert "node examined itself" not in words


@pytest.mark.e2e
def test_a_profile_checks_each_node_before_a_job(lab: Lab) -> None:
    (lab.folder / "clusters").mkdir()
    profile = {"name": "small", "scheduler": "local", "checks": "doctor", "setup": ["ulimit -n 256"]}
    (lab.folder / "clusters/small.yaml").write_text(json.dumps(profile))
    lab.script("print('trained')\n")
    done = lab.cli("run", str(lab.job(command="python train.py", retries={"same": 0})), "-c", "small")
    run = lab.newest()
    assert done.returncode and not list(run.path.glob("attempts/000/exits/*"))
    said = lab.all_logs(run)
    assert "broken open files" in said and "fails the doctor's checks: open files 256: " in said
    why = lab.cli("why", run.id).stdout.splitlines()
    assert why[1].startswith("cause     node-failed: node 0 ")
    assert why[-1] == "examine   launcher doctor -c small"


def test_another_run_has_no_results(lab: Lab) -> None:
    run = RunDir(lab.folder / "runs/other")
    run.path.mkdir(parents=True)
    run.run.write_text(
        json.dumps({"id": "other", "job": {"command": ["true"]}, "cluster": {"name": "local"}})
    )
    done = lab.cli("doctor", "--show", str(run.path))
    assert done.returncode == 2 and "is not a run of `launcher doctor`" in done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("trains", [False, True], ids=["before-a-step", "after-a-step"])
def test_nodes_are_examined_before_a_run_starts_again(lab: Lab, trains: bool) -> None:
    """There is no other node here: the run goes on, and tells what was found.

    A limit with which it trained does not count: the run began with it.
    """
    (lab.folder / "clusters").mkdir()
    profile = {"name": "small", "scheduler": "local", "setup": ["ulimit -n 256"]}
    (lab.folder / "clusters/small.yaml").write_text(json.dumps(profile))
    lab.script(
        "import os, signal, sys\nif os.environ['LAUNCHER_ATTEMPT'] == '0':\n"
        # Only rank 0 writes metrics: had rank 1 failed first, it could be ended before that.
        "    if os.environ['RANK'] == '1': signal.pause()\n"
        + ("    import launcher; launcher.log(1, loss=2.0)\n" if trains else "")
        + "    sys.exit('GPU has fallen off the bus')\n"
    )
    done = lab.cli("run", str(lab.job(command="python train.py")), "-c", "small")
    assert done.returncode == 0, done.stderr
    judged = lab.newest().attempt(0).read_verdict()
    assert judged is not None and judged.verdict.failure == "node-failed"
    if trains:
        assert judged.then == "retry with the same recipe"
    else:
        assert judged.then.startswith("retry with the same recipe, although node 0 (")
        assert "fails the doctor's checks: open files 256: " in judged.then
