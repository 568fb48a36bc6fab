"""Where Slurm's commands run: on this host, or on a login node. Several questions, one round trip."""

from __future__ import annotations

import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.schedulers.base import MaybeDoneError, SchedulerError

NOT_FOUND = 127
"A shell's exit code for a command that is not there."


@dataclass(frozen=True)
class Answer:
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str


class LoginError(SchedulerError):
    """The host cannot be reached, or did not answer in time."""


class CutError(LoginError, MaybeDoneError):
    """The connection was there; the answer did not come."""


class Login(Protocol):
    """A host with Slurm's commands and the file system of the runs."""

    name: str
    "For messages: `this host`, or `user@host`."

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """POSIX shell text, with `stdin` for its commands. Raises LoginError, never on an exit code."""
        ...


class Here:
    """This host."""

    name = "this host"

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(["sh", "-c", script], input=stdin, capture_output=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CutError(f"{self.name} gave no answer within {timeout:.0f} s") from None


def ask(login: Login, questions: Mapping[str, Sequence[str]], timeout: float = 60.0) -> dict[str, Answer]:
    """Run commands side by side in one round trip; the answers bear the names of the questions.

    Raises LoginError when the host cannot be reached or an answer is not whole.
    """
    mark = secrets.token_hex(8)  # what a login shell prints by itself cannot contain it
    asked = list(questions.items())
    lines = ["t=$(mktemp -d) || exit 70", "trap 'rm -rf \"$t\"' EXIT", "export LC_ALL=C"]
    for i, (_, command) in enumerate(asked):
        lines.append(
            f'{{ {shlex.join(command)}; echo $? >"$t/{i}.c"; }} >"$t/{i}.o" 2>"$t/{i}.e" </dev/null &'
        )
    lines.append("wait")
    for i in range(len(asked)):
        sizes = f'"$(cat "$t/{i}.c")" "$(wc -c <"$t/{i}.o")" "$(wc -c <"$t/{i}.e")"'
        lines.append(f'printf \'%s %d %d %d\\n\' {mark} {sizes}; cat "$t/{i}.o" "$t/{i}.e"')
    done = login.run("\n".join(lines), timeout=timeout)
    answers, rest = {}, done.stdout
    for name, _ in asked:
        _, found, rest = rest.partition(f"{mark} ".encode())
        head, _, rest = rest.partition(b"\n")
        if not found:
            said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise LoginError(f"{login.name}: {said}")
        code, out, err = map(int, head.split())
        said_out, said_err, rest = rest[:out], rest[out : out + err], rest[out + err :]
        answers[name] = Answer(code, said_out.decode(errors="replace"), said_err.decode(errors="replace"))
    return answers
