from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.rundir.files import (
    append_json,
    delete_folder,
    read_json,
    read_json_lines,
    replace_bytes,
    replace_json,
    replace_text,
)
from launcher.rundir.find import RunNotFoundError, find_run, latest_checkpoint, remember_root, runs_in
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import last_metrics, newest, progress_text
from launcher.rundir.time import STAMP_LENGTH, stamp
from launcher.schedulers.prepare import new_run_id


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("LAUNCHER_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(root: Path, name: str) -> RunDir:
    path = root / "runs" / name
    path.mkdir(parents=True)
    (path / "run.json").write_text('{"id": "x", "job": {}}')
    return RunDir(path)


@given(st.floats(0, 4e9))
def test_stamps_have_one_length_and_sort_like_time(seconds):
    assert len(stamp(seconds)) == STAMP_LENGTH
    assert stamp(seconds) < stamp(seconds + 1)


def test_a_reader_never_sees_half_a_replaced_file(tmp_path):
    """A process replaces a file thousands of times while this one reads it."""
    path = tmp_path / "state.json"
    program = (
        "import sys, json, pathlib\n"
        "from launcher.rundir.files import replace_json\n"
        "for n in range(1500): replace_json(pathlib.Path(sys.argv[1]), {'n': n, 'pad': 'x' * 5000})\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
    seen = 0
    while writer.poll() is None:
        if path.exists():
            assert len(json.loads(path.read_text())["pad"]) == 5000
            seen += 1
    assert writer.returncode == 0 and seen > 10


def test_a_deletion_that_is_interrupted_leaves_a_run_that_can_be_deleted(home, monkeypatch):
    run = make(home, "gpt-a")
    names = {f"file-{number}" for number in range(50)}
    for name in names:
        (run.path / name).touch()
    (run.path / "checkpoints").mkdir(exist_ok=True)
    (run.path / "checkpoints" / "large").touch()

    def unlink(name, **folder):
        if name == "large":
            raise KeyboardInterrupt
        return delete(name, **folder)

    delete = os.unlink
    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        delete_folder(run.path)
    assert run.run.is_file() and {path.name for path in run.path.glob("file-*")} == names


def test_several_with_one_process_id_replace_a_file_and_each_writes_its_own(tmp_path):
    """Threads stand for hosts that share a folder: theirs can be the same, too."""
    path = tmp_path / "deep" / "f"

    def write(letter):
        for _ in range(200):
            replace_bytes(path, letter * 20_000)
            assert len(set(path.read_bytes())) == 1 and path.stat().st_size == 20_000

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(write, letter) for letter in (b"a", b"b", b"c")]:
            done.result()
    assert [entry.name for entry in path.parent.iterdir()] == ["f"]


def test_a_failed_replacement_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_replacement_that_fails_names_the_file_that_was_asked_for(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, why in ((folder, IsADirectoryError), (folder / "no" / "f", FileNotFoundError)):
        with pytest.raises(why) as failed:
            replace_text(path, "new")
        assert failed.value.filename == str(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_lines_of_several_writers_do_not_mix_and_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    program = (
        "import sys, pathlib\n"
        "from launcher.rundir.files import append_json\n"
        "for n in range(300):\n"
        "    append_json(pathlib.Path(sys.argv[1]), {'who': sys.argv[2], 'pad': 'y' * 700})\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), who]) for who in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    with open(path, "ab") as file:
        file.write(b'{"torn": ')
    lines = read_json_lines(path)
    assert len(lines) == 600 and {line["who"] for line in lines} == {"a", "b"}


def test_a_missing_or_torn_json_file_reads_as_none(tmp_path):
    (tmp_path / "torn").write_text('{"a":')
    assert read_json(tmp_path / "torn") is None and read_json(tmp_path / "missing") is None


def test_a_run_is_found_by_id_prefix_path_handle_or_as_the_newest(home):
    first, second = make(home, "alpha-1"), make(home, "beta-2")
    os.utime(first.run, ns=(1, 1))
    assert find_run(None).id == "beta-2"
    assert find_run("alp").id == "alpha-1"
    assert find_run(str(first.path)).id == find_run(f"local:{first.path}").id == "alpha-1"
    assert [run.id for run in runs_in()] == ["beta-2", "alpha-1"]
    assert second.id == "beta-2"


def test_a_link_to_a_run_neither_renames_nor_hides_it(home):
    runs = [make(home, name) for name in ("gpt-a", "gpt-b", "gpt-c")]
    for run in runs:
        (home / "runs" / f"latest-{run.id}").symlink_to(run.id)
    (home / "elsewhere").symlink_to(runs[0].path)
    assert sorted(run.id for run in runs_in()) == ["gpt-a", "gpt-b", "gpt-c"]
    assert find_run("latest-gpt-b").path == runs[1].path
    assert find_run("elsewhere").path == find_run(str(home / "elsewhere")).path == runs[0].path


def test_an_unknown_or_ambiguous_name_lists_what_there_is(home):
    make(home, "gpt-1"), make(home, "gpt-2")
    with pytest.raises(RunNotFoundError, match=r"several runs: .*gpt-"):
        find_run("gpt")
    with pytest.raises(RunNotFoundError, match=r"the newest are: .*gpt-"):
        find_run("llama")
    log = home / "the output.log"
    log.touch()
    with pytest.raises(RunNotFoundError, match=f"launcher why --log '{re.escape(str(log))}'"):
        find_run(str(log))


def test_an_id_is_found_by_its_end_and_by_every_handle_that_the_run_had(home):
    run = make(home, "gpt-20261121-085401-3fa2")
    make(home, "gpt-20261121-085401-77b1")
    for handle in ("slurm:della:41", "slurm:della:42"):
        run.event("submitted", handle=handle)
    names = ("3fa2", "slurm:della:41", "slurm:della:42", f"ssh:one:{run.id}", f"slurm:della:run/{run.id}")
    assert {find_run(name).path for name in names} == {run.path}
    with pytest.raises(RunNotFoundError, match="no run 'slurm:della:4'"):
        find_run("slurm:della:4")


def test_the_name_of_a_job_means_its_newest_run_only_where_nothing_is_changed(home):
    first, second = make(home, "gpt-1"), make(home, "gpt-2")
    for run in (first, second):
        replace_json(run.run, {**run.read_about().as_json(), "job": {"name": "gpt"}})
    os.utime(first.run, ns=(1, 1))
    assert find_run("gpt", by_job=True).id == "gpt-2"
    with pytest.raises(RunNotFoundError, match="several runs"):
        find_run("gpt")


def test_without_a_name_only_a_run_of_this_project_is_meant(home, tmp_path, monkeypatch):
    run = make(home, "gpt-1")
    remember_root(home / "runs")
    elsewhere = tmp_path / "other project"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(
        RunNotFoundError, match=r"no run was started in .*other project.*: the newest are gpt-1"
    ):
        find_run(None)
    assert find_run("gpt-1").path == run.path
    replace_json(
        run.run, {**run.read_about().as_json(), "project_dir": str(elsewhere)}
    )  # its folder for runs is shared
    assert find_run(None).path == run.path


def test_only_complete_checkpoints_count(home):
    run = make(home, "r")
    for name in ("step-00000010", "step-00000020", "step-00000030.partial", "other"):
        (run.checkpoints / name).mkdir(parents=True)
    assert latest_checkpoint(run) == 20


def test_progress_is_read_from_the_end_of_a_long_file(home):
    run = make(home, "r")
    for step in range(2000):
        append_json(run.metrics, {"step": step, "loss": 1.0})
    with open(run.metrics, "a") as file:
        file.write('{"step": 20')
    assert last_metrics(run)["step"] == 1999


def test_an_evaluation_hides_neither_the_last_loss_nor_the_number_of_steps(home):
    run = make(home, "r")
    append_json(run.metrics, {"attempt": 0, "step": 2, "loss": 2.0, "steps": 9})
    append_json(run.metrics, {"attempt": 0, "step": 2, "eval_loss": 2.5})
    assert last_metrics(run) == {"attempt": 0, "step": 2, "loss": 2.0, "steps": 9, "eval_loss": 2.5}
    append_json(run.metrics, {"attempt": 1, "step": 3, "eval_loss": 2.25})
    assert last_metrics(run) == {"attempt": 1, "step": 3, "loss": 2.0, "steps": 9, "eval_loss": 2.25}
    append_json(run.metrics, {"attempt": 1, "step": 4, "loss": None})  # the newest loss is no number
    assert last_metrics(run)["loss"] is newest(run, "loss") is None
    assert (newest(run, "step"), newest(run, "steps"), newest(run, "eval_loss")) == (4, 9, 2.25)


def test_a_line_torn_on_a_full_disk_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "events.jsonl"
    append_json(path, {"n": 1})
    with open(path, "ab") as file:
        file.write(b'{"n": 2, "half')
    append_json(path, {"n": 3})
    assert [line["n"] for line in read_json_lines(path)] == [1, 3]


def test_a_damaged_record_reads_as_empty(tmp_path):
    for content in ("[1]", "{", "\xff"):
        (tmp_path / "run.json").write_bytes(content.encode("latin-1"))
        assert RunDir(tmp_path).read_about().as_json() == {}


def test_a_root_is_remembered_once(home):
    from launcher.rundir.find import known_roots, remember_root

    for _ in range(3):
        remember_root(home / "runs")
        remember_root(home / "elsewhere")
    assert (home / "state/launcher/roots").read_text().split() == [
        str(home / "runs"),
        str(home / "elsewhere"),
    ]
    assert known_roots() == [home / "runs", home / "elsewhere"]


@pytest.mark.parametrize(
    "name",
    ["a\nb", "\n/tmp", "a\rb", "a\x1eb", "a\u2028b", "a\x85b", "é ", '"quoted"', "\udcff", "\x1b[2J", " "],
)
def test_a_root_of_any_name_is_one_entry(home, name):
    from launcher.rundir.find import known_roots, remember_root, runs_in

    root = home / name / "runs"
    (root / "one").mkdir(parents=True)
    (root / "one" / "run.json").write_text("{}")
    for _ in range(2):
        remember_root(root)
        remember_root(home / "other")
    assert known_roots() == [home / "runs", root, home / "other"]
    assert [run.path for run in runs_in()] == [root / "one"]
    assert len((home / "state/launcher/roots").read_bytes().split(b"\n")) == 3


def test_damaged_lines_of_the_list_of_roots_are_left_out(home):
    from launcher.rundir.find import known_roots, remember_root, runs_in

    remember_root(home / "elsewhere")
    with open(home / "state/launcher/roots", "ab") as file:
        file.write(b'"/cut\nrelative\n/nul\0\n"\\u0000"\n[]\n\n/not\xffutf8\n')
    assert known_roots()[:2] == [home / "runs", home / "elsewhere"] and len(known_roots()) == 3
    assert runs_in() == []


def test_a_line_of_metrics_is_told_with_what_it_has() -> None:
    line = {"loss": 2.5, "samples_per_second": 66.25, "memory_peak": 3 * 2**30}
    assert progress_text(line) == "loss 2.5000  66.2 samples/s  peak 3 GiB"
    line |= {"tokens_per_second": 8470.4, "mfu": 0.4123, "eval_loss": 2.75}
    assert progress_text(line) == "loss 2.5000  held-out 2.7500  8,470 tokens/s  MFU 41.2%  peak 3 GiB"
    assert progress_text({}) == ""


def test_a_run_id_keeps_what_is_safe_in_a_path_and_a_shell_of_its_jobs_name():
    assert new_run_id("RB_ref (2)!").startswith("rb_ref-2-2")
    assert new_run_id("__").startswith("run-2")


def test_the_newest_plan_is_in_force_and_a_half_written_one_is_not(tmp_path):
    run = make(tmp_path, "replanned")
    assert (run.run, run.planned_at) == (run.submitted, 0)
    for name in ("002", "010", ".011.partial"):
        (run.path / "plans" / name).mkdir(parents=True)
        (run.path / "plans" / name / "run.json").touch()
    (run.path / "plans" / "012" / "scripts").mkdir(parents=True)  # what a plan that was taken back leaves
    assert run.planned_at == 10
    assert {run.run.parent, run.plan.parent, run.scripts.parent} == {run.plan_from(10)}


AS_ANOTHER = """
import os, sys
from pathlib import Path
from launcher.rundir.find import RunNotFoundError, find_run, runs_in
root = Path(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
print([run.id for run in runs_in(root)])
os.environ["LAUNCHER_RUNS"] = str(root)
for name in (str(root / "private"), "private"):
    try:
        find_run(name)
    except RunNotFoundError as error:
        print(error)
"""


def test_private_runs_of_others_hide_no_run_of_ours():
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        Path(root).chmod(0o755)
        for name in ("a", "private", "z"):
            run = RunDir(Path(root) / name)
            run.path.mkdir()
            run.submitted.write_text(json.dumps({"id": name, "job": {}}))
            run.path.chmod(0o755)
        (Path(root) / "private").chmod(0o700 if os.getuid() == 0 else 0)
        done = subprocess.run([sys.executable, "-c", AS_ANOTHER, root], capture_output=True, text=True)
        (Path(root) / "private").chmod(0o700)
    first, by_path, by_id = done.stdout.splitlines()
    assert sorted(first) == sorted("['a', 'z']"), done.stderr
    assert "private belongs to another user" in by_path and by_id == by_path
