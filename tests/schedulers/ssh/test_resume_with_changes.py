"""A resume with another job that the host refuses: its changes are gone there, too."""

from __future__ import annotations

import sys

from launcher.spec.verdict import EXIT_CODES
from tests.schedulers.ssh.hosts import NAMES, Laptop


def test_changes_of_a_resume_that_was_refused_are_gone_on_the_host_too(laptop: Laptop) -> None:
    python, first = laptop.folder / "python", laptop.folder / "first"
    first.write_text("")
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then . {first}; fi\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    laptop.profile("own.yaml", NAMES[:1], paths={"python": str(python), "runs": str(laptop.runs)})
    ranks = {"gpus_per_node": 0, "ranks_per_node": 1}
    command = "bash -c 'echo $WORD; false'"
    job = laptop.job(command=command, env={"WORD": "old"}, retries={"same": 0}, resources=ranks)
    laptop.said("submit", str(job), "-c", "own.yaml")
    run = laptop.newest()
    assert laptop.wait(run)["state"] == "failed"
    there = laptop.on_disk(run).path
    first.write_text(f"if [ -e {there}/plans/001 ]; then echo refused >&2; exit 1; fi\n")
    assert "refused" in laptop.said("resume", run.id, "--set", "env.WORD=new", code=4)
    first.write_text("")
    laptop.said("resume", run.id, "--follow", code=EXIT_CODES["unknown"])
    logs = sorted(there.glob("attempts/*/logs/node-00/rank-000.out"))
    assert [log.read_text().split()[-1] for log in logs] == ["old", "old"]


def test_a_fix_of_the_code_reaches_the_host_in_the_way_that_why_names(laptop: Laptop) -> None:
    laptop.script("raise ValueError('old code')")
    job = laptop.job(command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    laptop.said("submit", str(job), "-c", "one.yaml")
    run = laptop.newest()
    assert laptop.wait(run)["state"] == "failed"
    said = laptop.said("why", run.id)
    assert "`resume` uses the code that was sent" in said and "only with `--set" in said
    laptop.script("print('new code')")
    laptop.said("resume", run.id, "--follow", code=EXIT_CODES["user-error"])
    laptop.said("resume", run.id, "--set", "name=fixed", "--follow")
    assert "new code" in laptop.said("logs", run.id)
