"""What a program writes into a file descriptor, masked in the file."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from launcher.logs.masked_pipe import MaskedPipe
from launcher.rundir.secret_masking import masked_strings

SECRET = b"hunter2-hunter2"


def _run(path: Path, script: str) -> bytes:
    pipe = MaskedPipe(path, [SECRET])
    process = subprocess.Popen(["bash", "-c", script], stdout=pipe.end, stderr=pipe.end)
    pipe.start()
    process.wait()
    pipe.close()
    return path.read_bytes()


def test_all_that_was_written_is_in_the_file_when_it_is_closed(tmp_path: Path) -> None:
    """Also a secret that comes in pieces; also behind what was there."""
    log = tmp_path / "logs" / "torchrun.err"
    assert _run(log, "printf 'a hunter2-'; sleep 0.3; printf 'hunter2 b'") == b"a *** b"
    much = _run(log, "for i in {1..20000}; do echo hunter2-hunter2 $i; done; echo end >&2; printf hunter")
    assert much.startswith(b"a *** b*** 1\n") and much.endswith(b"*** 20000\nend\nhunter")
    assert much.count(b"\n") == 20001 and SECRET not in much


def test_a_process_that_keeps_the_pipe_holds_nobody_up(tmp_path: Path) -> None:
    """It gets SIGPIPE when it writes later."""
    script = "echo before; (read -r <$0) & echo $!"
    fifo = tmp_path / "fifo"
    subprocess.run(["mkfifo", fifo], check=True)
    log = tmp_path / "log"
    pipe = MaskedPipe(log, [SECRET])
    process = subprocess.Popen(["bash", "-c", script, fifo], stdout=pipe.end, stderr=pipe.end)
    pipe.start()
    process.wait()
    pipe.close()
    before, pid = log.read_text().split()
    assert before == "before" and Path(f"/proc/{pid}").exists()
    fifo.open("w").write("\n")


def test_a_process_that_never_stops_writing_holds_nobody_up(tmp_path: Path) -> None:
    pipe = MaskedPipe(tmp_path / "log", [SECRET])
    process = subprocess.Popen(["yes", "hunter2-hunter2 ."], stdout=pipe.end)
    pipe.start()
    pipe.close()
    assert process.wait() == -signal.SIGPIPE
    assert set((tmp_path / "log").read_bytes().split()) <= {b"***", b"."}


def test_a_full_disk_loses_text_and_ends_nobody() -> None:
    pipe = MaskedPipe(Path("/dev/full"), [SECRET])
    process = subprocess.Popen(
        ["bash", "-c", "for i in {1..20000}; do echo hunter2-hunter2 $i; done; exit 7"],
        stdout=pipe.end, stderr=pipe.end,
    )  # fmt: skip
    pipe.start()
    assert process.wait() == 7
    pipe.close()


def test_a_program_that_cannot_be_started_leaves_an_empty_file(tmp_path: Path) -> None:
    pipe = MaskedPipe(tmp_path / "log", [SECRET])
    with pytest.raises(FileNotFoundError):
        subprocess.Popen(["/no/such/program"], stdout=pipe.end)
    pipe.close()
    assert (tmp_path / "log").read_bytes() == b""


def test_every_string_of_a_record_is_masked_and_its_time_is_kept() -> None:
    environ = {"LAUNCHER_SECRETS": "PIN,TOKEN", "PIN": "17", "TOKEN": "t'k\n0"}
    record = {
        "message": {"message": repr("a t'k\n0"), "extraInfo": {"timestamp": "1700000017", "n": [17, "17"]}}
    }
    assert masked_strings(record, environ) == {
        "message": {"message": '"a ***"', "extraInfo": {"timestamp": "1700000017", "n": [17, "***"]}}
    }
