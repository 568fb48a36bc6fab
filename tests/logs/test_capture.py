"""Real child processes, real pipes, real full disks."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.logs.capture import RankCapture, StampedFile
from launcher.rundir.layout import RunDir
from tests.logs.helpers import texts


def run(
    tmp_path: Path, program: str, secrets: tuple[bytes, ...] = (), grace: float = 2.0
) -> tuple[int, RankCapture]:
    capture = RankCapture(tmp_path / "logs" / "rank-000.out", tmp_path / "logs" / "rank-000.err", secrets)
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    code = capture.pump(child, grace)
    capture.close()
    return code, capture


def out(tmp_path: Path) -> list[bytes]:
    return texts(tmp_path / "logs" / "rank-000.out")


def err(tmp_path: Path) -> list[bytes]:
    return texts(tmp_path / "logs" / "rank-000.err")


def test_both_streams_are_stamped_and_the_exit_code_survives(tmp_path: Path) -> None:
    code, capture = run(tmp_path, "import sys; print('hello'); print('oh no', file=sys.stderr); sys.exit(7)")
    assert code == 7
    assert (out(tmp_path), err(tmp_path)) == ([b"hello"], [b"oh no"])
    assert capture.last_lines == ["hello", "oh no"]


def test_a_signal_is_a_negative_code(tmp_path: Path) -> None:
    code, _ = run(tmp_path, f"import os; os.kill(os.getpid(), {signal.SIGKILL})")
    assert code == -signal.SIGKILL


def test_binary_garbage_and_empty_lines_come_through_byte_for_byte(tmp_path: Path) -> None:
    run(tmp_path, r"import os; os.write(1, b'\x00\xff\xfe\x1b[\n\n\nlast without newline')")
    assert out(tmp_path) == [b"\x00\xff\xfe\x1b[", b"", b"", b"last without newline"]


def test_a_prompt_is_in_the_file_while_the_program_waits(tmp_path: Path) -> None:
    path = str(tmp_path / "logs" / "rank-000.out")
    program = (
        "import os, time, pathlib; os.write(1, b'Continue? '); time.sleep(1.7);"
        f"os.write(1, pathlib.Path({path!r}).read_bytes()[28:-1] + b'!\\n')"
    )
    run(tmp_path, program)
    assert out(tmp_path) == [b"Continue? ", b"Continue? !"]


def test_a_progress_bar_does_not_fill_the_disk(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "for i in range(2001):\n"
        "    sys.stderr.write(f'\\r{i/20:5.1f}%|' + '#' * (i // 100))\n"
        "    time.sleep(0.001)\n"
        "sys.stderr.write('\\n')"
    )
    run(tmp_path, program)
    assert 2 <= len(err(tmp_path)) <= 12
    assert err(tmp_path)[-1] == b"100.0%|" + b"#" * 20


def test_secrets_are_masked_across_writes_and_in_the_last_lines(tmp_path: Path) -> None:
    program = "import os, time; os.write(2, b'token=hun'); time.sleep(0.05); os.write(2, b'ter2!\\n')"
    _, capture = run(tmp_path, program, (b"hunter2",))
    assert err(tmp_path) == [b"token=***!"]
    assert capture.last_lines == ["token=***!"]


def test_the_last_lines_end_with_the_traceback_although_stdout_is_flushed_after_it(tmp_path: Path) -> None:
    program = (
        "import os\nfor i in range(30): print('out', i)\nfor i in range(5): os.write(2, b'err %d\\n' % i)"
    )
    _, capture = run(tmp_path, program)
    assert capture.last_lines == [f"out {i}" for i in range(15, 30)] + [f"err {i}" for i in range(5)]
    assert len(capture.tail("out")) == 20


def test_a_note_of_ours_is_stamped_into_the_err_file(tmp_path: Path) -> None:
    capture = RankCapture(tmp_path / "o", tmp_path / "e", [b"s3cret"])
    capture.note("the parent died; key s3cret\nends here")
    capture.close()
    assert texts(tmp_path / "e") == [b"[launcher] the parent died; key *** ends here"]


def test_a_grandchild_that_keeps_the_pipe_open_does_not_keep_us(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid)"
    code, _ = run(tmp_path, program, grace=0.3)
    os.kill(int(out(tmp_path)[0]), signal.SIGKILL)  # it is still there
    assert code == 0


def test_a_daemon_that_keeps_the_pipe_open_is_not_waited_for(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['setsid', 'sleep', '3600']).pid)"
    code, _ = run(tmp_path, program, grace=3600)
    os.kill(int(out(tmp_path)[0]), signal.SIGKILL)
    assert code == 0


def test_what_a_process_of_the_childs_group_prints_after_its_end_is_kept(tmp_path: Path) -> None:
    """As of `exec > >(tee log)`."""
    program = "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 1; echo last'])"
    run(tmp_path, program, grace=60)
    assert out(tmp_path) == [b"last"]


def test_a_line_that_a_dead_writer_left_unfinished_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "rank-000.out"
    path.write_bytes(b"2026-11-21T08:00:00.000000Z half a li")
    file = StampedFile(path)
    file.write(b"next\n", 0.0)
    file.close(0.0)
    assert texts(path) == [b"half a li", b"next"]


def test_a_file_that_is_moved_away_is_begun_anew_and_a_deleted_folder_is_not(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-000.out"
    file = StampedFile(path)
    file.write(b"first\n", 0.0)
    path.rename(tmp_path / "old")
    file.write(b"second\n", 0.0)
    assert (texts(tmp_path / "old"), texts(path), file.lines) == ([b"first"], [b"second"], 1)
    shutil.rmtree(path.parent)
    file.write(b"third\n", 0.0)
    file.close(0.0)
    assert not path.parent.exists()


def test_100_000_lines_a_second_are_kept_up_with(tmp_path: Path) -> None:
    program = (
        "import os\nfor i in range(400): os.write(1, b'step 12345 loss 2.3456 tokens/s 123456\\n' * 500)"
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, capture = run(tmp_path, program)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    assert len(out(tmp_path)) == 200_000
    assert capture.lost == 0
    assert cpu < 1.0, "less than half a core at 100,000 lines/s"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_lines_and_says_so_when_there_is_space_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200 * 1024)
    program = (
        "import os, time\n"
        "for i in range(2000): os.write(1, b'line %06d ' % i + b'x' * 80 + b'\\n')\n"
        f"os.unlink({str(ballast)!r})\n"
        "time.sleep(2.2)\n"
        "os.write(1, b'after\\n')\n"
    )
    code, capture = run(small_disk, program)
    assert code == 0
    assert capture.lost > 0
    lines = out(small_disk)  # also: no torn line
    notices = [line for line in lines if line.startswith(b"[launcher]")]
    assert notices == [b"[launcher] %d lines lost: No space left on device" % capture.lost]
    assert lines[-1] == b"after"
    kept = [line for line in lines if line.startswith(b"line ")]
    assert all(len(line) == 12 + 80 for line in kept)
    assert len(kept) + capture.lost == 2000


def test_a_disk_that_stays_full_never_stops_the_program(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 240 * 1024)
    code, capture = run(small_disk, "import os\nfor i in range(3000): os.write(1, b'y' * 99 + b'\\n')")
    assert code == 0
    assert capture.lost > 2500
    assert len(capture.tail("out")) == 20


def test_a_folder_that_cannot_be_made_loses_lines_but_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    code, capture = run(tmp_path, "print('hello')")
    assert code == 0
    assert capture.lost == 1
    assert capture.last_lines == ["hello"]


def test_importing_the_capture_is_light() -> None:
    program = "import launcher.logs.capture, sys; print(*sys.modules)"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(listed.stdout.split())
    assert "launcher.logs.capture" in loaded
    assert not loaded & {"pydantic", "torch", "asyncio", "typing_extensions"}


def test_the_files_are_where_the_run_directory_says(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(2)
    RankCapture(attempt.rank_log(1, 12, "out"), attempt.rank_log(1, 12, "err")).close()
    assert (tmp_path / "attempts/002/logs/node-01/rank-012.err").is_file()
