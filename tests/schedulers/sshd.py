"""A real sshd of the tests' own: loopback, unprivileged port, own host key, user key and ssh config."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab import PATIENCE

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
REAL_SSH = shutil.which("ssh")
PASSWORD = "open-sesame"
"Of the user's key where `ask` is set: what a person types at the first connection."


def absent() -> str | None:
    """Why there can be no sshd here."""
    if SSHD is None or REAL_SSH is None:
        return "OpenSSH's sshd and ssh are not installed"
    if os.getuid() == 0 and not Path("/run/sshd").is_dir():
        Path("/run/sshd").mkdir(mode=0o755)  # sshd, started as root, wants its service's folder
    return None


class Sshd:
    """`host` is a name that `ssh` knows it by."""

    host, docs_host = "login-node", "della"
    "The second is what the documentation calls it."

    def __init__(self, folder: Path, ask: bool = False, host: str = host, address: str = "127.0.0.1") -> None:
        if why := absent():
            pytest.skip(why)
        self.folder, self.host, self.address = folder, host, address
        self.log = folder / "sshd.log"
        self.shell = folder / "shell"
        for name, word in (("host_key", ""), ("user_key", PASSWORD if ask else "")):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", word, "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(folder / "user_key.pub", folder / "authorized")
        self.port = _free_port()
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress {address}\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {folder}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
            f"PasswordAuthentication no\nLogLevel VERBOSE\nForceCommand {self.shell}\n"
            "SetEnv SHLVL=2\n"  # bash then leaves the start-up files of whoever runs the tests alone
        )
        (folder / "config").write_text(
            f"Host {' '.join(self.names)}\n"
            f" HostName {address}\n Port {self.port}\n User {getpass.getuser()}\n"
            f" IdentityFile {folder}/user_key\n IdentitiesOnly yes\n IdentityAgent none\n"
            f" UserKnownHostsFile {folder}/known_hosts\n StrictHostKeyChecking accept-new\n"
        )
        self.login_shell('exec sh -c "$SSH_ORIGINAL_COMMAND"')
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def names(self) -> list[str]:
        return [self.host, self.docs_host] if self.host == Sshd.host else [self.host]

    def login_shell(self, text: str) -> None:
        """What the user's login shell does with `$SSH_ORIGINAL_COMMAND`."""
        self.shell.write_text(f"#!/bin/sh\n{text}\n")
        self.shell.chmod(self.shell.stat().st_mode | stat.S_IXUSR)

    def start(self) -> None:
        assert SSHD is not None
        command = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex((self.address, self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        """With every connection."""
        assert self.process is not None
        for child in _children(self.process.pid):
            with contextlib.suppress(ProcessLookupError):  # a connection that has just ended
                os.kill(child, 9)
        self.process.kill()
        self.process.wait()

    @property
    def logins(self) -> int:
        return self.log.read_text(errors="replace").count("Accepted publickey")

    @property
    def sessions(self) -> int:
        """Round trips so far."""
        return self.log.read_text(errors="replace").count("Starting session:")

    def environ(self) -> dict[str, str]:
        """With it `ssh` reads the tests' configuration, and shares its connections in their folder."""
        programs = self.folder / "bin"
        programs.mkdir(exist_ok=True)
        wrapper = programs / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {REAL_SSH} -F {self.folder}/config "$@"\n')
        wrapper.chmod(0o755)
        return {"PATH": f"{programs}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(self.folder)}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self.environ().items():
            monkeypatch.setenv(name, value)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
