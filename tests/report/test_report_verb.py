"""`launcher report` of real runs: while one goes on, and at its end."""

from __future__ import annotations

import os
import subprocess
import sys

from launcher.rundir.files import read_json_lines
from tests.lab import PATIENCE, Lab, wait_for

HELD = """
import os, pathlib, time
run = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"])
print("in the script")
while not (run / "go").exists():
    time.sleep(0.05)
"""


def test_a_page_is_written_again_while_the_run_goes_on_and_once_when_it_has_ended(lab: Lab) -> None:
    lab.script(HELD)
    job = lab.job(command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": 1}, recipe=None)
    run = lab.submit(str(job), "-c", "local")
    lab.wait(run, "running")
    memory = run.attempts()[-1].memory(0)
    wait_for(lambda: memory.exists() and len(read_json_lines(memory)) >= 2, "samples of the rank's memory")
    page = lab.folder / "live.html"
    watch = [sys.executable, "-m", "launcher", "report", run.id, "--watch", "--every", "1", "-o", str(page)]
    with subprocess.Popen(watch, cwd=lab.folder, env=lab.environ, stdout=subprocess.PIPE) as watching:
        wait_for(lambda: "running" in page.read_text(), "page of the living run")
        assert 'http-equiv="refresh" content="1"' in page.read_text()
        (run.path / "go").touch()
        assert watching.wait(PATIENCE) == 0
    assert "succeeded" in page.read_text() and "refresh" not in page.read_text()
    wait_for(run.report.is_file, "report.html")
    assert "succeeded" in run.report.read_text() and "train.py" in run.report.read_text()
    assert "host memory of a rank" in run.report.read_text()
    done = lab.cli("report", run.id)
    assert done.returncode == 0 and done.stdout.strip() == str(run.report)
    missing = lab.cli("report", run.id, "-o", "nowhere/run.html")
    assert missing.returncode == 2 and "there is no directory" in missing.stderr
    os.mkfifo(lab.folder / "pipe")  # as /dev/stdout may be
    for place in ("pipe", "."):
        wrong = lab.cli("report", run.id, "-o", place)
        assert wrong.returncode == 2 and f"--output: {place} is not a regular file" in wrong.stderr
    assert (lab.folder / "pipe").is_fifo()
    page.write_text("old")
    (lab.folder / "link.html").symlink_to(page)
    assert lab.cli("report", run.id, "-o", "link.html").stdout.strip() == "link.html"
    assert (lab.folder / "link.html").is_symlink() and "succeeded" in page.read_text()
