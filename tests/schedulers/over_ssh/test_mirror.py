"""The copy of a run directory: what was written on either side since the last round trip, and only that."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launcher.rundir.files import replace_json
from launcher.rundir.find import latest_checkpoint
from launcher.rundir.layout import RunDir
from launcher.schedulers.login import LocalLogin, LoginError, ask
from launcher.schedulers.over_ssh import exchange
from launcher.schedulers.over_ssh.mirror import ChangedThereError, Mirrored, RefusedError
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.wanted_files import Wanted
from tests.schedulers.sshd import Sshd


class Counted(LocalLogin):
    """Counts what came back."""

    def __init__(self) -> None:
        super().__init__()
        self.trips, self.bytes = 0, 0

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        done = super().run(script, stdin=stdin, timeout=timeout)
        self.trips, self.bytes = self.trips + 1, len(done.stdout)
        return done


class Both:
    """A run on both sides."""

    def __init__(self, folder: Path, login: LocalLogin | SshLogin | None = None) -> None:
        self.login = login or Counted()
        self.here, self.there = RunDir(folder / "here/a run"), RunDir(folder / "it's there/a run")
        self.mirror = Mirrored(self.login, self.here.path.parent, str(self.there.path.parent))
        self.here.scripts.mkdir(parents=True)
        self.here.checkpoints.mkdir()
        (self.here.path / "run.json").write_text('{"id": "a run", "job": {}}')
        (self.here.scripts / "job.sbatch").write_text("#!/bin/bash\n")
        (self.here.scripts / "job.sbatch").chmod(0o755)
        self.here.event("submitting")
        replace_json(self.here.state, {"state": "submitted"})
        self.mirror.choose([self.here])

    def sync(self, script: str = ":", **wanted: object) -> subprocess.CompletedProcess[bytes]:
        self.mirror.choose([self.here], Wanted(**wanted))  # type: ignore[arg-type]
        return self.mirror.run(script)

    def write(self, path: str, text: str) -> Path:
        """There."""
        file = self.there.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def read(self, path: str) -> str | None:
        """Here."""
        file = self.here.path / path
        return file.read_text() if file.exists() else None


@pytest.fixture(params=["with perl", "without perl"])
def both(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    if request.param == "without perl":
        monkeypatch.setattr(exchange, "_SEND", exchange._SEND.replace("command -v perl", "false"))
    elif shutil.which("perl") is None:
        pytest.skip("perl is not installed")
    both = Both(tmp_path)
    both.sync()
    return both


def _kinds(run: RunDir) -> list[str]:
    return [event.kind for event in run.read_events()]


def test_a_new_run_is_there_whole_before_the_script_runs(tmp_path: Path) -> None:
    both = Both(tmp_path)
    done = both.sync("cat 'a run/scripts/job.sbatch'; ls -A; exit 3")
    assert (done.returncode, done.stdout) == (3, b"#!/bin/bash\na run\n")
    assert both.there.read_state().as_json() == {"state": "submitted"} and both.there.checkpoints.is_dir()
    assert (both.there.scripts / "job.sbatch").stat().st_mode & 0o777 == 0o755
    assert not (both.there.path / ".mirror.json").exists()


def test_copies_are_for_us_alone_and_runs_for_no_other_to_write_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        both = Both(tmp_path)
        both.sync()
        both.write("attempts/000/logs/node-00/rank-000.out", "a line\n")
        both.sync(logs=True)
    finally:
        os.umask(before)
    assert both.here.path.parent.stat().st_mode & 0o777 == 0o700
    assert both.here.path.stat().st_mode & 0o022, "inside, it is the umask's"
    ours = [both.there.path, both.there.scripts, both.there.events, both.there.checkpoints]
    assert [path for path in ours if path.stat().st_mode & 0o022] == []


def test_where_the_run_cannot_be_written_the_script_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "it's there").write_text("no folder")
    both = Both(tmp_path)
    both.mirror.strict = True
    with pytest.raises(
        RefusedError, match=r"nothing was done on this host: mkdir: .*it.s there.*File exists"
    ):
        both.sync(f"touch '{tmp_path}/ran'")
    assert not (tmp_path / "ran").exists()


class Breaking(LocalLogin):
    """A connection that breaks after `whole` files of what is sent."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.whole = whole

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        with tarfile.open(fileobj=io.BytesIO(stdin)) as tar:
            end = tar.getmembers()[self.whole].offset
        return super().run(script, stdin=stdin[:end], timeout=timeout)


@pytest.mark.parametrize("whole", [1, 3])
def test_a_parcel_that_arrives_in_part_is_not_taken_for_a_whole_one(tmp_path: Path, whole: int) -> None:
    both = Both(tmp_path, Breaking(whole))
    both.mirror.strict = True
    with pytest.raises(RefusedError):
        both.sync(f"touch '{tmp_path}/ran'")
    assert list(both.there.path.parent.iterdir()) == [] and not (tmp_path / "ran").exists()


def test_when_what_comes_first_fails_nothing_is_written(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.mirror.first, both.mirror.strict = "echo no such snapshot >&2; false", True
    with pytest.raises(RefusedError, match="no such snapshot"):
        both.sync()
    assert not both.there.path.parent.exists()


def test_nothing_comes_back_that_is_known(both: Both) -> None:
    both.sync()
    before = both.login.bytes
    both.write("metrics.jsonl", "x" * 5000 + "\n")
    both.sync()
    assert before < 200 and both.login.bytes > 5000
    with open(both.there.metrics, "a") as file:
        file.write("more\n")
    both.sync()
    assert both.login.bytes < 400 and both.read("metrics.jsonl") == "x" * 5000 + "\nmore\n"
    assert both.login.trips == 4


def test_replaced_files_come_whole_and_vanished_ones_go(both: Both) -> None:
    both.write("attempts/000/verdict.json", "one")
    both.write("attempts/000/stop", "")
    both.sync()
    assert both.read("attempts/000/verdict.json") == "one" and both.read("attempts/000/stop") == ""
    replace_json(both.there.attempt(0).verdict, 123)
    (both.there.path / "attempts/000/stop").unlink()
    both.sync()
    assert both.read("attempts/000/verdict.json") == "123\n" and both.read("attempts/000/stop") is None


def test_a_file_that_was_cut_or_made_anew_is_read_from_its_beginning(both: Both) -> None:
    log = both.write("supervisor.log", "a long first text\n")
    both.sync()
    log.write_text("short\n")
    both.sync()
    assert both.read("supervisor.log") == "short\n"
    log.with_suffix(".new").write_text("another file, and longer than the one before\n")
    log.with_suffix(".new").replace(log)
    both.sync()
    assert both.read("supervisor.log") == "another file, and longer than the one before\n"


def test_checkpoints_come_as_names_alone(both: Both) -> None:
    for step in (10, 20):
        both.write(f"checkpoints/step-{step:08d}/weights.json", "x" * 9999)
    both.sync()
    assert latest_checkpoint(both.here) == 20 and both.login.bytes < 1000
    shutil.rmtree(both.there.checkpoints / "step-00000020")
    both.sync()
    assert latest_checkpoint(both.here) == 10
    assert list((both.here.checkpoints / "step-00000010").iterdir()) == []


def test_lines_of_ranks_come_when_they_are_asked_for(both: Both) -> None:
    for rank in range(3):
        both.write(f"attempts/000/logs/node-0{rank // 2}/rank-00{rank}.out", f"rank {rank}\n")
    log = "attempts/000/logs/node-0{}/rank-00{}.out"
    both.sync()
    assert both.read(log.format(0, 0)) is None
    both.sync(logs=True, ranks=frozenset({1}))
    assert both.read(log.format(0, 1)) == "rank 1\n" and both.read(log.format(0, 0)) is None
    both.sync(logs=True, nodes=frozenset({1}))
    assert both.read(log.format(1, 2)) == "rank 2\n" and both.read(log.format(0, 0)) is None
    both.sync(logs=True)
    both.sync()
    assert both.read(log.format(0, 0)) == "rank 0\n", "not asked for is not gone"
    both.sync(logs=True)
    assert both.login.bytes < 300


def test_what_is_too_large_or_not_ours_to_read_stays_there(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LARGEST_RECORD", 100)
    record = "attempts/000/errors/rank-{:03d}.json"
    left_there = [record.format(0), "weights.pt", "tensorboard/events.json", ".hidden.json", "wandb/x.log"]
    for name in left_there:
        both.write(name, "x" * 101)
    both.write(record.format(1), "x" * 100)
    both.sync()
    assert both.read(record.format(1)) == "x" * 100
    assert [both.read(name) for name in left_there] == [None] * len(left_there)


def test_a_long_absence_comes_in_parts(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PART", 1000)
    text = "".join(f"line {i}\n" for i in range(500))
    for rank in range(2):
        both.write(f"attempts/000/logs/node-00/rank-00{rank}.out", text)
    trips = both.login.trips
    assert both.sync("echo once", logs=True).stdout == b"once\n"
    assert both.read("attempts/000/logs/node-00/rank-001.out") == text
    assert both.login.trips - trips == 2 * len(text) // 1000 + 1


def test_events_written_on_both_sides_are_all_there_on_both(both: Both) -> None:
    both.there.event("job")
    both.here.event("submitted")
    both.there.event("started")
    both.sync()
    assert _kinds(both.here) == _kinds(both.there) == ["submitting", "job", "started", "submitted"]
    both.sync()
    assert _kinds(both.here) == _kinds(both.there) == ["submitting", "job", "started", "submitted"]


def test_events_written_while_a_round_trip_runs_are_sent_with_the_next(both: Both) -> None:
    code = (
        "from pathlib import Path; from launcher.rundir.layout import RunDir\n"
        f"RunDir(Path({str(both.here.path)!r})).event('meanwhile')"
    )
    both.there.event("job")
    both.sync(shlex.join([sys.executable, "-c", code]))
    assert _kinds(both.here) == ["submitting", "job", "meanwhile"]
    both.sync()
    assert _kinds(both.there) == ["submitting", "job", "meanwhile"]


def test_our_state_does_not_overwrite_a_newer_one(both: Both) -> None:
    replace_json(both.here.state, {"state": "lost"})
    replace_json(both.there.state, {"state": "running"})
    both.sync()
    assert both.here.read_state().as_json() == both.there.read_state().as_json() == {"state": "running"}
    replace_json(both.here.state, {"state": "submitted"})
    both.sync()
    assert both.here.read_state().as_json() == both.there.read_state().as_json() == {"state": "submitted"}


def test_what_must_not_be_overtaken_is_refused_when_it_is(both: Both) -> None:
    both.mirror.strict = True
    replace_json(both.here.state, {"state": "submitted"})
    replace_json(both.there.state, {"state": "running"})
    with pytest.raises(ChangedThereError, match=r"the host has changed this file, too: a run/state\.json"):
        both.sync("echo ran >&2")
    assert both.there.read_state().as_json() == {"state": "running"}


def test_what_cannot_be_written_does_not_keep_us_from_reading(both: Both) -> None:
    both.here.event("ours")
    both.here.attempt(0).path.mkdir(parents=True)
    both.write("metrics.jsonl", "x\n")
    both.there.event("theirs")
    replace_json(both.here.attempt(0).snapshot_request, {})
    (both.there.path / "attempts").write_text("in the way")
    assert both.sync("echo answer").stdout == b"answer\n" and both.read("metrics.jsonl") == "x\n"
    assert _kinds(both.here) == ["submitting", "theirs", "ours"]
    (both.there.path / "attempts").unlink()
    both.sync()
    assert _kinds(both.here) == _kinds(both.there) == ["submitting", "theirs", "ours"]


def test_cancelling_and_taking_it_back_reach_the_cluster(both: Both) -> None:
    both.here.cancel.write_text("now\n")
    both.sync()
    assert both.there.cancel.read_text() == "now\n"
    both.here.cancel.unlink()
    both.sync()
    assert not both.there.cancel.exists() and not both.here.cancel.exists()


def test_another_plan_reaches_the_cluster_and_can_be_taken_back(both: Both) -> None:
    plan = both.here.plan_from(1)
    (plan / "scripts").mkdir(parents=True)
    (plan / "plan.json").write_text("{}")
    (plan / "scripts/start.sh").write_text("x")
    both.sync()
    assert (both.there.plan_from(1) / "scripts/start.sh").read_text() == "x"
    shutil.rmtree(plan)
    both.sync()
    assert not (both.there.plan_from(1) / "plan.json").exists()


def test_a_lost_answer_does_not_write_a_run_twice(both: Both) -> None:
    """The copy knows of no round trip, but the run is there and has gone on."""
    both.there.event("job")
    (both.here.path / ".mirror.json").unlink()
    both.sync()
    assert _kinds(both.here) == _kinds(both.there) == ["submitting", "job"]


def test_a_run_directory_that_was_deleted_there_is_kept_here(both: Both) -> None:
    both.write("metrics.jsonl", "x\n")
    both.sync()
    shutil.rmtree(both.there.path)
    assert both.sync("echo answer").stdout == b"answer\n"
    assert both.mirror.lost == {"a run"} and both.read("metrics.jsonl") == "x\n"
    shutil.rmtree(both.there.path.parent)
    assert both.sync("echo answer").stdout == b"answer\n"


class Cut(LocalLogin):
    """The end of its answers does not arrive."""

    def run(self, script: str, **given: object) -> subprocess.CompletedProcess[bytes]:  # type: ignore[override]
        done = super().run(script, **given)  # type: ignore[arg-type]
        return subprocess.CompletedProcess(done.args, 0, done.stdout[:-40], b"")


def test_an_answer_that_is_cut_changes_nothing(both: Both) -> None:
    both.write("metrics.jsonl", "x\n")
    both.mirror.login = Cut()
    with pytest.raises(LoginError, match="the answer is incomplete"):
        both.sync()
    assert both.read("metrics.jsonl") is None


def test_an_event_whose_arrival_was_not_told_is_written_once(both: Both) -> None:
    both.there.event("job")
    both.sync()
    both.here.event("resubmitted")
    whole, both.mirror.login = both.mirror.login, Cut()
    with pytest.raises(LoginError):
        both.sync()
    both.there.event("started")
    both.here.event("cancelled")
    both.mirror.login = whole
    both.sync()
    both.sync()
    kinds = ["submitting", "job", "resubmitted", "started", "cancelled"]
    assert _kinds(both.there) == kinds and _kinds(both.here) == kinds


def test_what_arrived_without_an_answer_is_not_taken_for_a_change_of_the_hosts(both: Both) -> None:
    """Else a submission whose job is in the queue would end as refused."""
    both.mirror.strict = True
    replace_json(both.here.state, {"state": "submitted", "time": "later"})
    whole, both.mirror.login = both.mirror.login, Cut()
    with pytest.raises(LoginError):
        both.sync()
    both.mirror.login = whole
    assert both.sync("echo answer").stdout == b"answer\n"
    replace_json(both.there.state, {"state": "running"})
    assert both.sync("echo answer").stdout == b"answer\n" and both.here.read_state().state == "running"


def test_no_cluster_decides_where_we_write(both: Both, tmp_path: Path) -> None:
    class Hostile(LocalLogin):
        def run(self, script: str, **given: object) -> subprocess.CompletedProcess[bytes]:  # type: ignore[override]
            done = super().run(script, **given)  # type: ignore[arg-type]
            mark = script.split()[0].removeprefix("m=").encode()
            evil = b"".join(
                mark + b" piece whole 1 4 1 0 4 " + path + b"\nevil"
                for path in (
                    b"a run/../../evil",
                    b"other/evil",
                    b"/evil",
                    b"a run//" + str(tmp_path).encode() + b"/evil",
                )
            )
            return subprocess.CompletedProcess(
                done.args, 0, done.stdout.replace(mark + b" end", evil + mark + b" end"), b""
            )

    both.mirror.login = Hostile()
    both.sync()
    assert not list(tmp_path.rglob("*evil*"))


def test_several_runs_and_the_answers_of_slurm_are_one_ssh_session(sshd: Sshd, tmp_path: Path) -> None:
    sshd.login_shell('echo Welcome; exec sh -c "$SSH_ORIGINAL_COMMAND"')
    both = Both(tmp_path, SshLogin(sshd.host))
    second = RunDir(both.here.path.with_name("second"))
    shutil.copytree(both.here.path, second.path)
    both.mirror.choose([both.here, second])
    both.mirror.run(":")
    both.write("attempts/000/recipe.json", json.dumps({"x": 1}))
    sessions = sshd.sessions
    assert ask(both.mirror, {"a": ["echo", "hello"]})["a"].out == "hello\n"
    assert sshd.sessions - sessions == 1 and both.read("attempts/000/recipe.json") == '{"x": 1}'
    assert (both.there.path.parent / "second/state.json").exists()


def test_a_state_that_was_replaced_while_it_was_read_is_read_again(
    both: Both, capsys: pytest.CaptureFixture[str]
) -> None:
    class Torn(LocalLogin):
        torn = False

        def run(self, script: str, **given: object) -> subprocess.CompletedProcess[bytes]:  # type: ignore[override]
            done = super().run(script, **given)  # type: ignore[arg-type]
            if not self.torn:
                self.torn, done.stdout = True, done.stdout.replace(b'"running"', b'"runn')
            return done

    both.write("state.json", '{"state": "running", "time": "2026", "failure": null}')
    both.mirror.login = Torn()
    both.sync()
    assert both.here.read_state().state == "running" and not capsys.readouterr().err


@pytest.mark.parametrize("state", ['{"state": 5, "time": []}', '{"state": ["failed"]}', '"failed"', "{"])
def test_what_is_no_state_of_a_run_is_told_and_does_not_come(
    both: Both, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    both.write("state.json", state)
    for _ in range(2):
        both.sync()
        assert both.here.read_state().as_json() == {"state": "submitted"}
    assert capsys.readouterr().err.count("a run/state.json on this host is not a valid state of a run") == 1
    both.write("state.json", '{"state": "running", "time": "2026", "failure": null}')
    both.sync()
    assert both.here.read_state().state == "running"
