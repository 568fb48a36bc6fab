"""Where a secret's value comes from, and what no process could receive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from launcher.schedulers.over_ssh.secret_checks import file_check as shell_check
from launcher.spec.job import Secret
from launcher.supervise.secrets import LONGEST, SecretError, read_secrets, secrets_with_values

ROOM = LONGEST - len("TOKEN") - 2
"Bytes of the longest value."

UNUSABLE = {
    "not UTF-8": (b"abc\xff\xfe", r"is not UTF-8 text \(byte 4 cannot be read\)"),
    "NUL": (b"a\0b", "contains a NUL byte"),
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "too large": (b"x" * (ROOM + 1), "is too large: .* at most 128 KiB"),
    "huge": (b"x" * 2**24, "is too large"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_file_that_no_process_can_receive_is_named(tmp_path: Path, case: str) -> None:
    data, why = UNUSABLE[case]
    file = tmp_path / "the token"
    file.write_bytes(data)
    for read in (read_secrets, secrets_with_values):
        with pytest.raises(SecretError, match=f"^TOKEN: {file} {why}") as caught:
            read([Secret(name="TOKEN", file=str(file))])
        assert "abc" not in str(caught.value)


def test_the_longest_value_that_is_taken_can_be_received(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"x" * ROOM + b"\n")
    values = read_secrets([Secret(name="TOKEN", file=str(tmp_path / "token"))])
    done = subprocess.run(["sh", "-c", "echo ${#TOKEN}"], env={**os.environ, **values}, capture_output=True)
    assert done.stdout == f"{ROOM}\n".encode()
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true"], env={**os.environ, "TOKEN": "x" * (ROOM + 1)})


def test_what_is_no_regular_file_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file, why in {
        str(tmp_path): "is a directory",
        str(tmp_path / "fifo"): "is a pipe",
        "/dev/zero": "is a pipe, a device",
        str(tmp_path / "none"): "there is no file",
        str(tmp_path / ("n" * 300)): "cannot read .*: File name too long",
    }.items():
        with pytest.raises(SecretError, match=why):
            read_secrets([Secret(name="TOKEN", file=file)])


def test_a_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x")
    file.chmod(0)
    code = (
        "import os, sys\n"
        "from launcher.spec.job import Secret\n"
        "from launcher.supervise.secrets import SecretError, read_secrets\n"
        "secret = Secret(name='TOKEN', file=sys.argv[1])\n"
        "if os.getuid() == 0:\n"
        "    os.setuid(65534)\n"
        "try:\n"
        "    read_secrets([secret])\n"
        "except SecretError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.stdout == f"TOKEN: cannot read {file}: Permission denied\n", done.stderr


def test_the_home_directory_of_somebody_else_and_nul_are_refused_in_the_job_file() -> None:
    for file, why in {
        "~nouser/token": "only your own home directory",
        "~": "only your own home directory",
        "a\0b": "NUL byte",
        "": "at least 1",
    }.items():
        with pytest.raises(ValidationError, match=why):
            Secret(name="TOKEN", file=file)


def test_every_secret_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOD", "fine")
    monkeypatch.setenv("BAD", os.fsdecode(b"\xff"))
    secrets = [Secret(name="A", env="BAD"), Secret(name="B", env="NONE"), Secret(name="C", env="GOOD")]
    with pytest.raises(SecretError, match=r"A: .* BAD is not UTF-8.*; B: .* NONE is not set"):
        read_secrets(secrets)
    assert read_secrets(secrets[2:]) == {"C": "fine"}


@pytest.mark.parametrize("case", [*UNUSABLE, "directory", "none", "good", "longest", "umlaut"])
def test_the_check_in_shell_says_the_same(tmp_path: Path, case: str) -> None:
    """Behind a login node there may be no launcher."""
    file = tmp_path / "it's a token"
    good = {"good": b"x y\n", "longest": b"x" * ROOM, "umlaut": "ü".encode()}
    if case == "directory":
        file.mkdir()
    elif case != "none":
        file.write_bytes(good[case] if case in good else UNUSABLE[case][0])
    home = f'"$HOME"/{chr(39)}it{chr(39)}"{chr(39)}"{chr(39)}s a token{chr(39)}'
    done = subprocess.run(["sh", "-c", shell_check(home, ROOM)], env={**os.environ, "HOME": str(tmp_path)})
    try:
        read_secrets([Secret(name="TOKEN", file=str(file))])
        usable = True
    except SecretError:
        usable = False
    assert (done.returncode == 0) == (usable or case == "blank"), "white space is found when the job starts"
    assert usable == (case in good)
