"""The code that a run is started from: the working directory as it is, sent once."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launcher.schedulers.over_ssh import snapshot
from launcher.schedulers.over_ssh.snapshot import SnapshotError, adopt, place, send, take
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.runpod.request import pack
from tests.schedulers.sshd import Sshd

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


def _repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def _commit(folder: Path) -> None:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), "add", "."], check=True)
    subprocess.run(["git", "-C", str(folder), *name, "commit", "-qm", "x"], check=True)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = _repository(tmp_path / "my work")
    (folder / ".gitignore").write_text("*.bin\nruns/\n")
    (folder / "train.py").write_text("committed\n")
    (folder / "gone.py").write_text("deleted later\n")
    (folder / "pkg").mkdir()
    (folder / "pkg/$HOME 'n' \"q\"\n.py").write_text("odd\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link.py").symlink_to("pkg/../train.py")
    _commit(folder)
    (folder / "train.py").write_text("not committed\n")
    (folder / "gone.py").unlink()
    (folder / "new.py").write_text("never added\n")
    (folder / "big.bin").write_text("ignored\n")
    return folder


def _sent(shot: snapshot.Snapshot, sshd: Sshd, runs: Path, before: str | None = None) -> Path:
    node = SshLogin(sshd.host)
    send(shot, node, str(runs), before)
    assert not Path(place(str(runs), shot.digest)).exists(), "it appears whole, when it is adopted"
    assert node.run(adopt(str(runs), shot.digest)).returncode == 0
    return Path(place(str(runs), shot.digest))


@needs_rsync
def test_uncommitted_work_arrives_and_ignored_files_do_not(sshd: Sshd, work: Path, tmp_path: Path) -> None:
    there = _sent(take(work), sshd, tmp_path / "it's a disk")
    names = sorted(str(path.relative_to(there)) for path in there.rglob("*") if not path.is_dir())
    assert names == sorted(
        [".gitignore", "link.py", "new.py", "pkg/$HOME 'n' \"q\"\n.py", "run.sh", "train.py"]
    )
    assert (there / "link.py").read_text() == "not committed\n" and (there / "link.py").is_symlink()
    assert os.access(there / "run.sh", os.X_OK) and not os.access(there / "new.py", os.X_OK)
    assert there.parent.stat().st_mode & 0o777 == 0o700


@needs_rsync
def test_an_equal_file_is_linked_and_a_changed_one_is_new(sshd: Sshd, work: Path, tmp_path: Path) -> None:
    first = take(work)
    old = _sent(first, sshd, tmp_path / "disk")
    (work / "train.py").write_text("yet another\n")
    new = _sent(take(work), sshd, tmp_path / "disk", before=first.digest)
    assert (old / "train.py").read_text() == "not committed\n"
    assert (new / "train.py").read_text() == "yet another\n"
    assert (old / "new.py").samefile(new / "new.py")
    assert sshd.logins == 1 and sshd.sessions == 4, "one session to send, one to adopt"


def test_the_name_is_the_content(work: Path) -> None:
    digest = take(work).digest
    os.utime(work / "train.py")
    assert take(work).digest == digest
    (work / "train.py").chmod(0o755)
    executable = take(work).digest
    (work / "link.py").unlink()
    (work / "link.py").symlink_to("new.py")
    assert len({digest, executable, take(work).digest}) == 3


@needs_rsync
def test_permissions_arrive_but_for_writing_and_count(sshd: Sshd, work: Path, tmp_path: Path) -> None:
    before = take(work).digest
    modes = {"new.py": 0o600, "train.py": 0o640, "run.sh": 0o750}
    for name, mode in modes.items():
        (work / name).chmod(mode)
    shot = take(work)
    there = _sent(shot, sshd, tmp_path / "disk")
    assert shot.digest != before
    for name, mode in modes.items():
        assert (there / name).stat().st_mode & 0o777 == mode & ~0o200
    with tarfile.open(fileobj=io.BytesIO(pack(shot))) as archive:
        assert {name: archive.getmember(name).mode for name in modes} == modes


@needs_rsync
def test_what_looks_secret_does_not_arrive_and_is_named_before(
    sshd: Sshd, work: Path, tmp_path: Path
) -> None:
    for name in (".env", "id_rsa", "server.pem", ".aws/credentials", "pkg/token.json", "z.key"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text("s3cret")
    shot = take(work, send=["z.key"])
    (told,) = shot.notes
    assert ".aws/credentials, .env, id_rsa, pkg/token.json, server.pem; " in told and "`send:`" in told
    there = _sent(shot, sshd, tmp_path / "disk")
    assert [path.name for path in there.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()] == [
        "z.key"
    ]


@needs_rsync
def test_greetings_and_other_shells_do_not_disturb_rsync(sshd: Sshd, work: Path, tmp_path: Path) -> None:
    shell = shutil.which("tcsh") or "sh"
    sshd.login_shell(f'echo "Welcome"; printf "no newline"; exec {shell} -c "$SSH_ORIGINAL_COMMAND"')
    assert (_sent(take(work), sshd, tmp_path / "disk") / "new.py").read_text() == "never added\n"


@needs_rsync
def test_a_transfer_that_was_cut_is_no_snapshot_and_is_gone_on_with(
    sshd: Sshd, work: Path, tmp_path: Path
) -> None:
    shot, runs = take(work), tmp_path / "disk"
    partial = runs / snapshot.FOLDER / f".{shot.digest}.partial"
    partial.mkdir(parents=True)
    (partial / "train.py").write_text("not comm")
    assert (_sent(shot, sshd, runs) / "train.py").read_text() == "not committed\n"
    assert not partial.exists()


def test_what_was_not_sent_cannot_be_adopted(sshd: Sshd, tmp_path: Path) -> None:
    assert SshLogin(sshd.host).run(adopt(str(tmp_path), "0" * 20)).returncode != 0


@needs_rsync
def test_a_file_that_changes_while_it_is_sent_is_named(sshd: Sshd, work: Path, tmp_path: Path) -> None:
    shot = take(work)
    (work / "train.py").write_text("changed meanwhile\n")
    with pytest.raises(SnapshotError, match=r"train\.py changed while being sent; .*\.gitignore"):
        send(shot, SshLogin(sshd.host), str(tmp_path / "disk"))


@needs_rsync
def test_a_folder_that_cannot_be_made_is_one_message(sshd: Sshd, work: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"not sent to login-node: mkdir: .*/file.*Not a directory"):
        send(take(work), SshLogin(sshd.host), f"{tmp_path}/file/runs")


def test_too_much_is_refused_with_the_largest_files(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LIMIT", 1000)
    (work / "weights.pt").write_bytes(bytes(3000))
    with pytest.raises(SnapshotError, match=r"more than the limit .*largest: weights\.pt \(.*\.gitignore"):
        take(work)


def test_links_out_of_the_folder_are_named(work: Path) -> None:
    (work / "pkg/data").symlink_to("../../elsewhere")
    (work / "scratch").symlink_to("/scratch")
    with pytest.raises(
        SnapshotError, match=r"pkg/data -> \.\./\.\./elsewhere, scratch -> /scratch; name them"
    ):
        take(work)
    with open(work / ".gitignore", "a") as ignore:
        ignore.write("pkg/data\nscratch\n")
    assert "scratch" not in [entry.path for entry in take(work).entries]


def test_repositories_within_the_repository_come_along(work: Path) -> None:
    inner = _repository(work / "third party")
    (inner / "lib.py").write_text("x\n")
    (inner / "lib.bin").write_text("x\n")
    (inner / ".gitignore").write_text("*.bin\n")
    _commit(inner)
    names = {entry.path for entry in take(work).entries}
    assert "third party/lib.py" in names and "third party/lib.bin" not in names


def test_without_git_everything_goes_but_what_python_makes(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "__pycache__/a.pyc",
        "venv/pyvenv.cfg",
        "venv/lib.py",
        "sub/b.py",
        "runs/x/run.json",
        "cache/.gitignore",
        "cache/big",
    ):
        (tmp_path / "w" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "w" / name).write_text("x")
    (tmp_path / "w/cache/.gitignore").write_text("# made by a tool\n*\n")
    shot = take(tmp_path / "w", leave_out=[tmp_path / "w" / "runs"])
    assert [entry.path for entry in shot.entries] == ["a.py", "sub/b.py"]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="there is no file to send"):
        take(tmp_path)


def test_what_this_process_prints_into_is_not_sent(work: Path) -> None:
    (work / "old.log").write_text("of another command\n")
    shown = "print([entry.path for entry in take(Path()).entries if 'log' in entry.path])"
    script = f"from pathlib import Path; from launcher.schedulers.over_ssh.snapshot import take; {shown}"
    with open(work / "out.log", "wb") as out, open(work / "err.log", "wb") as err:
        subprocess.run([sys.executable, "-c", script], cwd=work, stdout=out, stderr=err, check=True)
    assert (work / "out.log").read_text() == "['old.log']\n"
