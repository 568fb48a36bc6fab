"""Records that something damaged: of one run they hide no other, and nothing waits for ever on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli.main import _exit_code, app
from launcher.rundir.files import MAX_RECORD_BYTES, delete_folder, read_json, read_json_lines
from launcher.rundir.find import find_run, runs_in
from launcher.rundir.layout import RunDir
from launcher.rundir.record_forms import METRIC, fits
from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.host import SILENT_SECONDS, shows_life, supervisor_gone, supervisor_lock
from tests.lab import Lab, events, wait_for

NEVER_ENDS = "[" * 200_000


def garbage(name: str) -> Callable[[RunDir], None]:
    def write(run: RunDir) -> None:
        (run.path / name).write_text(NEVER_ENDS)

    return write


def pipe(name: str) -> Callable[[RunDir], None]:
    def replace(run: RunDir) -> None:
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)

    return replace


def about(**fields: object) -> Callable[[RunDir], None]:
    def change(run: RunDir) -> None:
        run.submitted.write_text(json.dumps({**json.loads(run.submitted.read_text()), **fields}))

    return change


def lines(name: str) -> Callable[[RunDir], None]:
    def append(run: RunDir) -> None:
        with open(run.path / name, "a") as file:
            file.write('5\n[1]\n"x"\nnull\n{}\n{"event": 7}\n{"event": "downgrade"}\n{"event": "attempt"}\n')
            file.write('{"time": "2026-11-21T08:54:01.1Z", "event": "downgrade", "changes": {"a": 5}}\n')

    return append


def folder(name: str) -> Callable[[RunDir], None]:
    def make(run: RunDir) -> None:
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).mkdir()

    return make


DAMAGE = {
    "cluster 5": about(cluster=5),
    "job 5": about(job=5),
    "ssh without hosts": about(cluster={"name": "c", "scheduler": "ssh", "ssh": {}, "paths": {}}),
    "sweep 5": about(sweep=5),
    "GPUs in words": about(gpus_per_node="eight"),
    "nested run": garbage("run.json"),
    "nested state": garbage("state.json"),
    "nested plan": garbage("plan.json"),
    "state 5": lambda run: run.state.write_text('{"state": 5, "time": [], "reason": {}}'),
    "pipe state": pipe("state.json"),
    "pipe events": pipe("events.jsonl"),
    "pipe metrics": pipe("metrics.jsonl"),
    "pipe lock": pipe("supervisor.lock"),
    "pipe verdict": pipe("attempts/000/verdict.json"),
    "nested verdict": garbage("attempts/000/verdict.json"),
    "events": lines("events.jsonl"),
    "metrics": lines("metrics.jsonl"),
    "folder state": folder("state.json"),
    "folder events": folder("events.jsonl"),
    "attempt of a strange name": lambda run: (run.path / "attempts" / "²").mkdir(),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root with one run that has succeeded."""
    lab = Lab(tmp_path_factory.mktemp("healthy"))
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    job = lab.job(command="true", resources=resources, recipe={"sharding": "none"})
    assert lab.cli("run", str(job)).returncode == 0
    run = lab.newest()
    wait_for(run.report.is_file, "report.html")  # written after the run's end
    return run.path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs root of a user with no others."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_one_damaged_run_hides_no_other_and_no_verb_shows_a_traceback(
    root: Path, healthy: Path, damage: Callable[[RunDir], None]
) -> None:
    for name in ("good-1", "bad-1"):
        shutil.copytree(healthy, root / name)
        about(id=name)(RunDir(root / name))
    damage(RunDir(root / "bad-1"))
    listed = CliRunner().invoke(app, ["list", "--json"])
    states = {one["run_id"]: one["state"] for one in json.loads(listed.stdout)}
    assert states["good-1"] == "succeeded" and "bad-1" in states
    assert CliRunner().invoke(app, ["list"]).exit_code == 0
    for verb in (["why"], ["status"], ["logs"], ["cancel"], ["clean", "-y"]):
        error = CliRunner().invoke(app, [*verb, "bad-1"]).exception
        assert error is None or isinstance(error, SystemExit) or _exit_code(error) is not None, (verb, error)
    assert CliRunner().invoke(app, ["why", "good-1"]).exit_code == 0


@pytest.mark.parametrize("text", ["{", "5", "{}", '{"job": {"name": "a"}}'])
def test_a_run_json_that_cannot_be_read_is_told_with_what_to_do(root: Path, healthy: Path, text: str) -> None:
    shutil.copytree(healthy, root / "bad-1")
    RunDir(root / "bad-1").submitted.write_text(text)
    told = f"{root / 'bad-1' / 'run.json'} cannot be read"
    (listed,) = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert listed["state"] == "damaged" and told in listed["reason"] and "rm -r" in listed["reason"]
    assert told in CliRunner().invoke(app, ["why", "bad-1"]).stdout
    assert CliRunner().invoke(app, ["report", "bad-1"]).exit_code == 0
    page = (root / "bad-1" / "report.html").read_text()
    assert told in page and "None" not in page
    for verb in (["resume"], ["resume", "--set", "steps=9"], ["snapshot"]):
        error = CliRunner().invoke(app, [*verb, "bad-1"]).exception
        assert error is not None and str(error).startswith(told) and _exit_code(error) == 4
    RunDir(root / "bad-1").submitted.unlink()
    for name in ("bad-1", str(root / "bad-1")):
        error = CliRunner().invoke(app, ["status", name]).exception
        assert str(error).startswith(f"{root / 'bad-1'} has no run.json") and _exit_code(error) == 3


def test_the_newest_run_is_the_newest_that_can_be_read(root: Path, healthy: Path) -> None:
    for name in ("good-1", "bad-1"):
        shutil.copytree(healthy, root / name)
    (root / "bad-1" / "run.json").write_text("5")
    assert find_run(None).id == "good-1"


def test_a_folder_that_nobody_may_enter_hides_no_run(tmp_path: Path, healthy: Path) -> None:
    shutil.copytree(healthy, tmp_path / "good-1")
    (tmp_path / "another-users").symlink_to("another-users")  # as good as forbidden, also for root
    assert [run.id for run in runs_in(tmp_path)] == ["good-1"]


def test_a_record_without_end_is_no_record(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with open(file, "wb") as hole:
        hole.truncate(MAX_RECORD_BYTES + 1)
    assert read_json(file) is None
    assert read_json_lines(tmp_path / "none.jsonl") == []


def test_a_record_takes_the_memory_of_its_file(tmp_path: Path) -> None:
    """A login node may limit the address space (ulimit -v)."""
    file = tmp_path / "state.json"
    file.write_text("{}")
    tracemalloc.start()
    assert read_json(file) == {}
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20


def test_forms() -> None:
    line = {"time": "2026-11-21T08:54:01.123456Z", "attempt": 0, "step": 1, "seconds": 1}
    assert fits(line, METRIC) and not fits({**line, "step": True}, METRIC) and not fits(5, METRIC)
    assert not fits({**line, "time": "2026-99-99T08:54:01Z"}, METRIC)


ASKS = """\
import os, sys
from pathlib import Path
import launcher.schedulers.local  # read before this process may read less
from launcher.rundir.layout import RunDir
from launcher.schedulers.lookup import statuses
if os.getuid() == 0:
    os.setuid(65534)
[status] = statuses([RunDir(Path(sys.argv[1]))])
print(status.state)
"""


def test_who_may_only_read_sees_a_living_run_and_a_dead_one(tmp_path: Path, healthy: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):  # pytest's are private, and /tmp has bits of its own to keep
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(folder.stat().st_mode | 0o055)
    run = RunDir(tmp_path / "run-1")
    shutil.copytree(healthy, run.path)
    run.state.write_text('{"state": "running", "attempt": 0}')
    run.events.unlink()
    run.attempt(0).verdict.unlink()
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    asked = [sys.executable, "-c", ASKS, str(run.path)]
    run.supervisor_lock.chmod(0o644)
    with supervisor_lock(run):
        run.supervisor_lock.chmod(0o444)
        assert subprocess.run(asked, capture_output=True, text=True).stdout == "running\n"
    assert subprocess.run(asked, capture_output=True, text=True).stdout == "lost\n"


DELETES = """
import os, pathlib, sys
from launcher.rundir.files import delete_folder
if os.geteuid() == 0:
    os.setuid(65534)
delete_folder(pathlib.Path(sys.argv[1]))
"""


def test_a_folder_that_cannot_be_deleted_is_named_and_not_a_file_in_it(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(folder.stat().st_mode | 0o055)
    run = tmp_path / "run-1"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "out").touch()
    (run / "logs").chmod(0o555)
    done = subprocess.run([sys.executable, "-c", DELETES, str(run)], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"PermissionError: [Errno 13] Permission denied: '{run}'"
    link = tmp_path / "link"
    link.symlink_to(run)
    with pytest.raises(OSError, match="symbolic link"):
        delete_folder(link)


def test_a_run_is_lost_when_its_host_has_another_name_or_says_nothing_any_more(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not supervisor_gone(run), "none has ever lived"
    with supervisor_lock(run):
        os.utime(run.supervisor_lock, (0, 0))
        assert not supervisor_gone(run), "its lock is held"
    record = json.loads(run.supervisor_lock.read_text())
    run.supervisor_lock.write_text(json.dumps({**record, "host": "a-container-before"}))
    assert supervisor_gone(run), "the same kernel sees its locks"
    run.supervisor_lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot": "another"}))
    assert not supervisor_gone(run), "its locks may not show here"
    silent = time.time() - SILENT_SECONDS - 1
    os.utime(run.supervisor_lock, (silent, silent))
    assert supervisor_gone(run)


def test_a_living_run_of_another_host_is_not_lost_where_the_clock_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.supervisor_lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot": "another"}))
    ahead = time.time() + 2 * SILENT_SECONDS
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert not supervisor_gone(run) and shows_life(run), "its files tell the file server's time"


def test_a_supervisor_that_crashes_says_so_and_where(lab: Lab) -> None:
    job = lab.job(command="true", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    out = lab.folder / "rendered"
    assert lab.cli("render", str(job), "-o", str(out)).returncode == 0
    told = lab.cli("status", str(out))
    assert told.returncode == 0 and "rendered" in told.stdout
    assert "is not running: rendered" in lab.cli("cancel", str(out)).stderr
    (out / "plan.json").write_text('{"recipe": 5}')
    done = subprocess.run(
        [sys.executable, "-m", "launcher.supervise", str(out)], capture_output=True, text=True
    )
    assert done.returncode == EXIT_CODES["unknown"] and "Traceback" in done.stderr
    state = RunDir(out).read_state()
    assert state.state == "failed" and "the supervisor crashed (ValidationError" in state.reason
    assert "\n" not in state.reason
    assert lab.cli("clean", "-y", str(out)).returncode == 0 and not out.exists()


RECORDS = """\
import json, os
folder = os.environ["LAUNCHER_RUN_DIR"] + "/attempts/000/errors"
os.makedirs(folder, exist_ok=True)
for name, record in {
    "000": {"rank": 0, "failure": "succeeded"},
    "001": {"failure": "gpu-oom"},
    "002": {"rank": 0, "failure": "gpu-oom"},
    "003": {"rank": "x"},
    "004": [],
}.items():
    with open(f"{folder}/rank-{name}.json", "w") as file:
        json.dump(record, file)
raise SystemExit(1)
"""


def test_records_of_another_form_neither_end_the_supervisor_nor_change_the_exit_code(lab: Lab) -> None:
    lab.script(RECORDS)
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    job = lab.job(command="python train.py", resources=resources, retries={"same": 0})
    done = lab.cli("run", str(job))
    assert done.returncode == EXIT_CODES["unknown"], done.stdout + done.stderr
    assert lab.newest().read_state().failure == "unknown"


GONE = """\
import os, shutil
run = os.environ["LAUNCHER_RUN_DIR"]
os.rename(f"{run}/state.json", f"{run}/moved")
os.mkdir(f"{run}/state.json")
raise SystemExit(int(os.environ["CODE"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("code", "state"), [(0, "succeeded"), (3, "failed")])
def test_a_run_whose_state_cannot_be_written_ended_as_its_events_tell(
    lab: Lab, code: int, state: str
) -> None:
    lab.script(GONE)
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    fields = {"command": "python train.py", "resources": resources, "retries": {"same": 0}}
    run = lab.submit(str(lab.job(**fields, env={"CODE": str(code)})))
    wait_for(lambda: events(run, "finished"), "end of the run")
    wait_for(lambda: lab.status(run)["state"] == state, f"state {state}")
