"""One login, many round trips, whatever the login shell says or is. A real sshd each time."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from launcher.schedulers.login import LoginError, all_or_nothing, ask
from launcher.schedulers.over_ssh.ssh import SshLogin, login_environment
from tests.lab import wait_for
from tests.schedulers.sshd import PASSWORD, Sshd


def test_a_script_gets_its_stdin_and_gives_its_output_and_exit_code(sshd: Sshd) -> None:
    data = bytes(range(256)) * 1000
    done = SshLogin(sshd.host).run("cat; echo 'a \"quoted\" word' >&2; exit 7", stdin=data)
    assert (done.returncode, done.stdout, done.stderr) == (7, data, b'a "quoted" word\n')


def test_of_a_script_that_arrives_in_part_nothing_is_done(sshd: Sshd, tmp_path: Path) -> None:
    """Its sender was killed, or the connection broke: `rm -rf runs/one` must not become `rm -rf runs`."""
    (tmp_path / "runs/one").mkdir(parents=True)
    script = f"touch {tmp_path}/began\nrm -rf {tmp_path}/runs/one"
    arrives = len(script) - len("/one") + all_or_nothing("").index(b"\n") + 1
    sshd.login_shell(f'head -c {arrives} | sh -c "$SSH_ORIGINAL_COMMAND"')
    assert SshLogin(sshd.host).run(script).returncode != 0
    assert (tmp_path / "runs/one").exists() and not (tmp_path / "began").exists()


def test_many_round_trips_are_one_login_also_from_several_processes_at_once(sshd: Sshd) -> None:
    ssh = "launcher.schedulers.over_ssh.ssh"
    text = f"from {ssh} import SshLogin\nprint(SshLogin({sshd.host!r}).run('echo hello').stdout)"
    several = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) for _ in range(3)]
    assert [one.communicate()[0] for one in several] == [b"b'hello\\n'\n"] * 3
    assert SshLogin(sshd.host).run("true").returncode == 0
    assert (sshd.logins, sshd.sessions) == (1, 4)


def test_the_sockets_folder_is_the_users_alone(sshd: Sshd) -> None:
    SshLogin(sshd.host).run("true")
    folder = sshd.folder / "launcher-ssh"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [entry.is_socket() for entry in folder.iterdir() if entry.suffix != ".lock"] == [True]


def test_a_folder_that_others_may_enter_is_refused(sshd: Sshd) -> None:
    (sshd.folder / "launcher-ssh").mkdir(mode=0o755)
    with pytest.raises(LoginError, match="not a directory of this user alone"):
        SshLogin(sshd.host).run("true")


def test_greetings_and_start_up_noise_do_not_reach_the_answer(sshd: Sshd) -> None:
    sshd.login_shell('echo "Welcome to the cluster"; sh -c "$SSH_ORIGINAL_COMMAND"; echo Goodbye 0')
    answers = ask(SshLogin(sshd.host), {"a": ["printf", "no newline"], "b": ["false"]})
    assert (answers["a"].out, answers["b"].code) == ("no newline", 1)


@pytest.mark.parametrize("shell", ["tcsh", "fish", "bash", "zsh"])
def test_every_login_shell_will_do(sshd: Sshd, shell: str) -> None:
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    sshd.login_shell(f'exec {path} -c "$SSH_ORIGINAL_COMMAND"')
    done = SshLogin(sshd.host).run("printf '%s' \"$(echo 'it''s !$x')\"; cat", stdin=b" and more")
    assert done.stdout == b"its !$x and more"


def test_a_command_in_the_path_of_login_shells_only_is_found(sshd: Sshd) -> None:
    home = sshd.folder / "home"
    (home / "slurm/bin").mkdir(parents=True)
    (home / "slurm/bin/squeue").write_text('#!/bin/sh\necho "queue of $SLURM_CONF"\n')
    (home / "slurm/bin/squeue").chmod(0o755)
    (home / ".bash_profile").write_text(
        f'echo "noise; export X=1"\nexport PATH=$PATH:{home}/slurm/bin SLURM_CONF="/etc/it\'s here"\n'
    )
    sshd.login_shell(f'export HOME={home} PATH=/usr/bin:/bin; exec sh -c "$SSH_ORIGINAL_COMMAND"')
    if shutil.which("squeue", path="/usr/bin:/bin"):
        _without_slurm(sshd, home)
    node = SshLogin(sshd.host, login_environment(unless="squeue"))
    done = node.run("squeue; echo $X; cat", stdin=b"data")
    assert done.stdout == b"queue of /etc/it's here\n\ndata"


def _without_slurm(sshd: Sshd, home: Path) -> None:
    """A PATH with everything but Slurm, on a machine that has it."""
    tools = home / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "sed", "head", "cat"):
        (tools / name).symlink_to(f"/bin/{name}")
    profile = home / ".bash_profile"
    profile.write_text(f"PATH={tools}\n{profile.read_text()}")
    sshd.login_shell(f'export HOME={home} PATH={tools}; exec sh -c "$SSH_ORIGINAL_COMMAND"')


def test_a_missing_command_is_an_answer(sshd: Sshd) -> None:
    assert ask(SshLogin(sshd.host), {"a": ["no-such-command"]})["a"].code == 127


def test_a_login_that_is_refused_says_why_and_what_to_try(sshd: Sshd) -> None:
    (sshd.folder / "authorized").write_text("")
    with pytest.raises(
        LoginError, match=r"cannot log in to login-node: .*Permission denied.*`ssh login-node`"
    ):
        SshLogin(sshd.host).run("true")


def test_no_answer_at_the_port_says_so(sshd: Sshd) -> None:
    sshd.stop()
    with pytest.raises(LoginError, match=r"cannot log in to login-node: .*Connection refused"):
        SshLogin(sshd.host).run("true")
    sshd.start()


def test_a_host_that_runs_no_commands_is_told_from_one_that_is_away(sshd: Sshd) -> None:
    sshd.login_shell("echo This account is not available.; exit 1")
    with pytest.raises(LoginError, match=r"runs no commands: This account is not available\."):
        SshLogin(sshd.host).run("true")


def test_a_lost_connection_is_one_message_and_the_next_call_logs_in_again(sshd: Sshd, tmp_path: Path) -> None:
    node = SshLogin(sshd.host)
    node.run("true")
    begun = tmp_path / "begun"

    def stop() -> None:
        wait_for(begun.exists, "the command")
        sshd.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(LoginError, match="the connection to login-node was lost before the answer came"):
        node.run(f"echo half; touch {begun}; sleep 3600")
    stopping.join()  # its connections end first, while it still listens
    sshd.start()
    assert node.run("echo again").stdout == b"again\n"


def test_a_silent_command_is_given_up(sshd: Sshd) -> None:
    with pytest.raises(LoginError, match="login-node gave no answer within 1 s"):
        SshLogin(sshd.host).run("sleep 5", timeout=1)


def test_the_users_own_shared_connection_is_taken(sshd: Sshd) -> None:
    with open(sshd.folder / "config", "a") as config:
        config.write(f" ControlPath {sshd.folder}/mine\n ControlPersist 60\n")
    subprocess.run(["ssh", "-MNf", sshd.host], check=True, stderr=subprocess.DEVNULL)
    assert SshLogin(sshd.host).run("echo hello").stdout == b"hello\n"
    assert sshd.logins == 1 and not (sshd.folder / "launcher-ssh").exists()


def test_what_ssh_asks_on_the_terminal_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's key has a passphrase: stands for a password and for a second factor."""
    sshd = Sshd(Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp")), ask=True)
    sshd.use(monkeypatch)
    text = (
        "from launcher.schedulers.over_ssh.ssh import SshLogin\n"
        f"print([SshLogin({sshd.host!r}).run('echo answer').stdout for _ in range(2)])"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", text])
    try:
        shown = _until(terminal, b"passphrase")
        os.write(terminal, PASSWORD.encode() + b"\n")
        shown += _until(terminal, b"]")
        assert shown.count(b"passphrase") == 1 and b"[b'answer\\n', b'answer\\n']" in shown
        assert (os.waitpid(pid, 0)[1], sshd.logins, sshd.sessions) == (0, 1, 2)
    finally:
        os.close(terminal)
        sshd.close()


def _until(terminal: int, text: bytes) -> bytes:
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 4096)
    return shown
