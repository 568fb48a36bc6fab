"""Login to a host by plain OpenSSH, with the user's own configuration. Round trips share one connection."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

from launcher.rundir.files import locked
from launcher.rundir.shared_memory_folders import private_folder
from launcher.schedulers.login import CutError, LoginError, all_or_nothing, last_line
from launcher.spec.progress import working

STAYS_OPEN = "1h"
"An unused connection stays open this long (ControlPersist), unless the user's ssh config says otherwise."
SILENCE = ("15", "3")
"(seconds between two keep-alive messages, number of unanswered ones after which a connection is given up)."
CONNECT_SECONDS = 20
LONGEST_SOCKET = 104 - 18
"Bytes: macOS's limit for a socket's path, less the suffix that ssh adds while it creates the socket."


def login_environment(unless: str | None = None) -> str:
    """Return shell that adopts the environment of a login shell, unless the command `unless` exists already.

    The variables follow a mark that no greeting contains. `unless` saves the time of running start-up files.
    """
    mark = secrets.token_hex(8)
    guard = f"command -v {shlex.quote(unless)} >/dev/null 2>&1 || " if unless is not None else ""
    return (
        f'{guard}eval "$(bash -lc \'exec sh -c "echo; echo {mark}; export -p"\' '
        f"</dev/null 2>/dev/null | sed '1,/^{mark}$/d')\"\n"
    )


class SshLogin:
    """A connection to `host`, which is named as for `ssh`.

    The first round trip logs in, and may ask for a password or a second factor on the terminal. Later ones,
    also of other processes, reuse the connection. `first` is shell that runs before each script, such as
    `login_environment`.
    """

    may_ask: ClassVar[bool] = True
    "Whether ssh may ask for a password on the terminal."

    def __init__(self, host: str, first: str = "") -> None:
        self.name, self._first = host, first
        self._options: list[str] = []

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a script. It is sent on stdin, so no login shell parses it and no process list shows it.

        What start-up files print on stdout is dropped. Raises LoginError.
        """
        mark = secrets.token_hex(8)
        text = all_or_nothing(self._first + script)
        # This form works in sh, csh and fish. `head` reads exactly the script and leaves the rest to it.
        command = f"sh -c 'echo {mark}; (eval \"$(head -c {len(text)})\"); echo {mark} $?'"
        argv = [*self.command(), command]  # this may ask for a password
        try:
            with working(f"waiting for {self.name}"):
                done = subprocess.run(argv, input=text + stdin, capture_output=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CutError(f"{self.name} gave no answer within {timeout:.0f} s") from None
        _, began, rest = done.stdout.partition(f"{mark}\n".encode())
        out, ended, code = rest.rpartition(f"{mark} ".encode())
        if not ended:
            raise _broken(self.name, done, bool(began))
        return subprocess.CompletedProcess(self.name, int(code.split()[0]), out, done.stderr)

    def command(self) -> list[str]:
        """Return `ssh ... HOST` through the open connection. Append a remote command to it."""
        self._connect()
        return [*self._ssh(), "-o", "BatchMode=yes", "-o", "ControlMaster=no", self.name]

    def _ssh(self) -> list[str]:
        return ["ssh", "-T", *self._options]

    def _connect(self) -> None:
        """Log in unless a connection is open. Raises LoginError."""
        self._options = self._options or _connection_options(self.name)
        if self._is_open():
            return
        # Two commands at once ask for one second factor, not two.
        with locked(_sockets() / f"{self.name[:100]}.lock"):
            if not self._is_open():
                self._log_in()

    def _is_open(self) -> bool:
        return subprocess.run([*self._ssh(), "-O", "check", self.name], capture_output=True).returncode == 0

    def _log_in(self) -> None:
        terminal = self.may_ask and _has_terminal()
        never_ask = [] if self.may_ask else ["-o", "BatchMode=yes"]
        patience = None if terminal else CONNECT_SECONDS + 40
        stderr_lines: list[bytes] = []
        process = subprocess.Popen(
            # Goes to the background after login. ssh itself asks on the terminal.
            [*self._ssh(), *never_ask, "-M", "-N", "-f", self.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        reader = threading.Thread(target=_pass_on, args=(process, stderr_lines, terminal), daemon=True)
        reader.start()
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            raise LoginError(f"{self.name} gave no answer within {patience} s") from None
        except BaseException:
            process.kill()
            raise
        reader.join(1.0)  # the background process may keep the pipe open
        if code != 0 or not self._is_open():
            why = last_line(b"".join(stderr_lines)) or f"ssh ended with exit code {code}"
            hint = "" if terminal else " (there is no terminal on which ssh could ask for a password)"
            raise LoginError(f"cannot log in to {self.name}: {why}{hint}; try `ssh {self.name}` by hand")


def _connection_options(host: str) -> list[str]:
    """Options of the shared connection. The user's own ssh config takes precedence."""
    try:
        answer = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        raise LoginError(
            f"cannot log in to {host}: there is no `ssh` here; install OpenSSH's client"
        ) from None
    if answer.returncode:
        raise LoginError(f"cannot log in to {host}: {last_line(answer.stderr)}")
    config = dict(line.partition(" ")[::2] for line in answer.stdout.splitlines())
    options = []
    if config.get("controlpath", "none") == "none":
        options.append(f"ControlPath={_sockets()}/%C")
    if config.get("controlpersist", "no") == "no":
        options.append(f"ControlPersist={STAYS_OPEN}")
    if config.get("serveraliveinterval", "0") == "0":
        options += [f"ServerAliveInterval={SILENCE[0]}", f"ServerAliveCountMax={SILENCE[1]}"]
    if config.get("connecttimeout", "none") == "none":
        options.append(f"ConnectTimeout={CONNECT_SECONDS}")
    return [part for option in options for part in ("-o", option)]


def _sockets() -> Path:
    """Return a private folder of this user with a path short enough for a socket's name of 40 bytes."""
    candidates = [Path(f"/tmp/launcher-ssh-{os.getuid()}")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.insert(0, Path(runtime) / "launcher-ssh")
    for folder in candidates:
        if len(os.fsencode(folder)) + 41 <= LONGEST_SOCKET:
            try:
                return private_folder(folder)
            except FileNotFoundError:
                continue
            except PermissionError as error:
                raise LoginError(f"the folder for ssh's shared connections: {error}") from None
    raise AssertionError("/tmp exists and is short")


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _pass_on(process: subprocess.Popen[bytes], lines: list[bytes], show: bool) -> None:
    """Print each line of ssh during the login at once, because it may be part of a dialogue."""
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if show:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def _broken(host: str, done: subprocess.CompletedProcess[bytes], began: bool) -> LoginError:
    message = last_line(done.stderr)
    if began or done.returncode == 255:
        why = f" ({message})" if message else ""
        return CutError(f"the connection to {host} was lost before the answer came{why}")
    message = message or last_line(done.stdout) or f"exit code {done.returncode}"
    return LoginError(f"{host} accepts the login but runs no commands: {message}")
