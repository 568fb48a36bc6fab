"""Run commands on this host or on another one, several in one round trip."""

from __future__ import annotations

import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.schedulers.base import MaybeDoneError, SchedulerError
from launcher.spec.progress import working

NOT_FOUND = 127
"A shell's exit code for a command that does not exist."


@dataclass(frozen=True)
class Answer:
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str


class LoginError(SchedulerError):
    """The host cannot be reached, or did not answer in time."""


class CutError(LoginError, MaybeDoneError):
    """The connection was open, but the answer did not arrive."""


class Login(Protocol):
    """A host with Slurm's commands and the runs' file system."""

    name: str
    "Name in messages: `this host`, or `user@host`."

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run POSIX shell text, whose commands read `stdin`.

        Raises LoginError, never because of an exit code.
        """
        ...


def all_or_nothing(script: str) -> bytes:
    """Wrap a script in braces, so that a shell runs nothing until the closing brace has arrived.

    Otherwise the shell would run the first lines of a script if its sender dies or the connection breaks.
    """
    return f"{{ :\n{script}\n}}".encode()


def last_line(text: str | bytes) -> str:
    """Return the last line that is not blank, or "" if there is none."""
    lines = (text if isinstance(text, str) else text.decode(errors="replace")).strip().splitlines()
    return lines[-1].strip() if lines else ""


def why_failed(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the last line that a failed command printed on stderr, or else its exit code."""
    return last_line(done.stderr) or f"exit code {done.returncode}"


class LocalLogin:
    """This host. `first` is shell that runs before each script."""

    name = "this host"

    def __init__(self, first: str = "") -> None:
        self.first = first

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        try:
            text = all_or_nothing(self.first + script)  # on stdin: an argument has at most 128 KiB
            command = ["sh", "-c", f'eval "$(head -c {len(text)})"']
            with working("waiting for commands on this host"):
                return subprocess.run(command, input=text + stdin, capture_output=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CutError(f"{self.name} gave no answer within {timeout:.0f} s") from None


def ask(login: Login, questions: Mapping[str, Sequence[str]]) -> dict[str, Answer]:
    """Run commands in parallel in one round trip. Return the answers by the names in `questions`.

    Raises LoginError if the host cannot be reached or an answer is incomplete.
    """
    mark = secrets.token_hex(8)  # begins each part of the answer; no other output can contain it
    script = ["t=$(mktemp -d) || exit 70", "trap 'rm -rf \"$t\"' EXIT", "export LC_ALL=C"]
    for i, command in enumerate(questions.values()):
        script.append(
            f'{{ {shlex.join(command)}; echo $? >"$t/{i}.c"; }} >"$t/{i}.o" 2>"$t/{i}.e" </dev/null &'
        )
    parts = (f'"$t/mark" "$t/{i}.{kind}"' for i in range(len(questions)) for kind in "coe")
    script.append(f'wait; echo {mark} >"$t/mark"; cat {" ".join(parts)} "$t/mark"')
    done = login.run("\n".join(script))
    texts = [text.decode(errors="replace") for text in done.stdout.split(f"{mark}\n".encode())[1:]]
    codes, outs, errs = texts[:-1:3], texts[1:-1:3], texts[2:-1:3]
    if len(texts) != 3 * len(questions) + 1 or not all(code.strip().isdigit() for code in codes):
        message = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise LoginError(f"{login.name}: the answer is incomplete: {message}")
    answers = zip(questions, codes, outs, errs, strict=True)
    return {name: Answer(int(code), out, err) for name, code, out, err in answers}
