"""What cannot run is refused before anything is written, in words that name the host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from launcher.cli.main import _exit_code
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import UnclearError
from launcher.schedulers.login import CutError
from launcher.schedulers.over_ssh.remote_store import RemoteStore
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.ssh import on_host
from launcher.schedulers.ssh.checks import Need, problems, rendezvous_address, separate_folders
from launcher.schedulers.ssh.choose import Chosen
from launcher.schedulers.ssh.hosts import HostError, ask_host
from launcher.schedulers.ssh.scheduler import SshHosts
from launcher.supervise.secrets import LONGEST
from tests.lab import wait_for
from tests.schedulers.ssh.hosts import NAMES, ROOT, Laptop

GOOD = {
    "launcher": "",
    "torch": True,
    "runs": "",
    "tools": [],
    "gpus": [],
    "gpus_trouble": "",
    "secrets": [],
    "addresses": ["10.0.0.1", "192.168.0.1"],
    "port": 61007,
    "ends_at_logout": False,
}
NEED = Need("/env/bin/python", "/data/runs", gpus=0)


def submit(laptop: Laptop, profile: str = "one.yaml", nodes: int = 1, code: int = 4, **fields: object) -> str:
    resources = {"gpus_per_node": 0, "ranks_per_node": 1, "nodes": nodes}
    job = laptop.job(command="true", resources=resources, **fields)
    return laptop.said("submit", str(job), "-c", profile, code=code)


def nothing_is_left(laptop: Laptop) -> bool:
    return laptop.said("list", "--json") == "[]\n" and not list(laptop.runs.glob("[!.]*"))


@pytest.mark.slow
def test_a_host_that_is_away_or_not_ours_is_named_with_sshs_own_words(laptop: Laptop) -> None:
    (laptop.hosts[0].folder / "authorized").write_text("")
    assert "cannot log in to tensor01: " in (said := submit(laptop)) and "Permission denied" in said
    laptop.hosts[1].sshd.stop()
    said = submit(laptop, "both.yaml", nodes=2)
    assert (
        "Permission denied" in said and "cannot log in to tensor02: " in said and "Connection refused" in said
    )
    laptop.hosts[1].sshd.start()
    assert nothing_is_left(laptop)


def test_a_host_with_another_key_than_before_is_not_trusted(laptop: Laptop) -> None:
    host = laptop.hosts[0]
    subprocess.run(["ssh", "tensor01", "true"], env=laptop.environ, check=True, capture_output=True)
    host.sshd.stop()
    (host.folder / "host_key").unlink()
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.folder / "host_key")]
    subprocess.run(command, check=True)
    host.sshd.start()
    said = submit(laptop)
    assert "cannot log in to tensor01: Host key verification failed" in said and "`ssh tensor01`" in said


@pytest.mark.slow
def test_an_interpreter_that_is_not_there_or_has_nothing_is_named(laptop: Laptop) -> None:
    laptop.profile("wrong.yaml", NAMES[:1], paths={"python": "/no/python", "runs": str(laptop.runs)})
    assert "tensor01: there is no interpreter /no/python" in submit(laptop, "wrong.yaml")
    bare = laptop.folder / "bare"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    laptop.profile("bare.yaml", NAMES[:1], paths={"python": str(bare), "runs": str(laptop.runs)})
    said = submit(laptop, "bare.yaml")
    assert (
        f"tensor01: {bare} on the host has no launcher" in said and f"{bare} on the host has no torch" in said
    )
    assert nothing_is_left(laptop)


def commands_of_the_page() -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "docs/ssh-hosts.md").read_text(), flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.split()[2:] for line in lines if line.startswith("$ launcher")]


@pytest.mark.slow
@pytest.mark.e2e
def test_the_commands_of_the_page_run_with_a_secret_that_is_there_only(laptop: Laptop) -> None:
    assert "tensor01: secrets: TOKEN has no value" in submit(laptop, secrets=["TOKEN"])
    with open(laptop.hosts[0].home / ".bash_profile", "a") as profile:
        profile.write("export TOKEN=there-only\n")
    laptop.profile("lab.yaml", NAMES)
    (laptop.folder / "clusters").mkdir()
    (laptop.folder / "lab.yaml").rename(laptop.folder / "clusters/lab.yaml")
    laptop.script("import os; print('token of', len(os.environ['TOKEN']))")
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    laptop.job(command="python train.py", resources=resources, secrets=["TOKEN"])
    said = {line[0]: laptop.said(*line) for line in commands_of_the_page()}
    assert "token of 10" in said["logs"] and "succeeded" in said["status"] and "succeeded" in said["list"]
    on_the_host = laptop.on_disk(laptop.newest()).path
    assert on_the_host.stat().st_mode & 0o777 == 0o700
    before = laptop.hosts[0].sshd.sessions
    assert f" {on_the_host}" in laptop.said("status", str(on_the_host)), "and is no copy"
    assert laptop.hosts[0].sshd.sessions == before


@pytest.mark.slow
def test_a_secrets_file_that_no_process_can_receive_is_named_here_or_there(laptop: Laptop) -> None:
    there = laptop.hosts[0].home / "token"
    there.write_bytes(b"a\0b")
    said = submit(laptop, secrets=[{"name": "TOKEN", "file": "~/token"}])
    assert "tensor01: secrets: TOKEN has no value here nor on the host (~/token contains a NUL byte" in said
    there.unlink()
    os.mkfifo(there)
    said = submit(laptop, secrets=[{"name": "TOKEN", "file": "~/token"}])
    assert "tensor01: secrets: TOKEN has no value here nor on the host (~/token is a pipe" in said
    (laptop.folder / "latin1").write_bytes(b"\xe9")
    said = submit(laptop, secrets=[{"name": "TOKEN", "file": "latin1"}])
    assert f"secrets: TOKEN: {laptop.folder}/latin1 is not UTF-8 text" in " ".join(said.split())
    assert nothing_is_left(laptop)


def test_a_folder_that_cannot_be_written_to_is_named(laptop: Laptop) -> None:
    (laptop.folder / "file").write_text("")
    paths = {"python": sys.executable, "runs": f"{laptop.folder}/file/runs"}
    laptop.profile("wrong.yaml", NAMES[:1], paths=paths)
    said = " ".join(submit(laptop, "wrong.yaml").split())
    assert f"paths.runs: {paths['runs']} is not writable (cannot create a file in " in said
    laptop.profile("wrong.yaml", NAMES[:1], paths={"python": sys.executable})
    assert "name the folder for the runs in the profile" in submit(laptop, "wrong.yaml")


def test_all_hosts_share_the_folder_or_none_does() -> None:
    visits = [{"shared": True}, {"shared": False}]
    with pytest.raises(
        HostError, match=r"^c: files that a writes into paths.runs \(/data/runs\) .* a, b share the folder"
    ):
        separate_folders(["a", "b", "c"], visits, "/data/runs")
    assert not separate_folders(["a", "b"], visits[:1], "/data/runs") and separate_folders(
        ["a", "c"], visits[1:], "/data/runs"
    )


def test_the_address_that_every_host_reaches_is_the_rendezvous() -> None:
    visits = [{"shared": True, "reached": GOOD["addresses"]}, {"shared": True, "reached": ["192.168.0.1"]}]
    assert rendezvous_address(["a", "b", "c"], GOOD, visits) == "192.168.0.1"
    with pytest.raises(HostError, match=r"b cannot reach a at port 61007 .*10.0.0.1, 192.168.0.1.*open the"):
        rendezvous_address(["a", "b"], GOOD, [{"shared": True, "reached": []}])


@pytest.fixture
def here(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> Laptop:
    """This process is on the laptop."""
    for name, value in laptop.environ.items():
        monkeypatch.setenv(name, value)
    return laptop


def test_two_hosts_meet_by_a_real_port_and_a_real_folder(here: Laptop) -> None:
    first, second = map(SshLogin, NAMES)
    look = {"do": "look", "runs": str(here.runs), "gpus": 0, "secrets": []}
    seen = ask_host(first, sys.executable, look)
    addresses = ["127.0.0.9", "192.0.2.77"]  # the loopback device listens everywhere; nobody is at the other
    told = {"do": "meet", "token": "t" * 32, "runs": str(here.runs), "port": seen["port"], "others": 1}
    told["addresses"] = addresses
    receiver = threading.Thread(target=ask_host, args=(first, sys.executable, {**told, "rank": 0}))
    receiver.start()
    visit = ask_host(second, sys.executable, {**told, "rank": 1})
    receiver.join()
    assert visit == {"reached": ["127.0.0.9"], "shared": True}
    assert list(here.runs.iterdir()) == []


def test_findings_name_the_host_and_say_what_to_do() -> None:
    assert problems("a", GOOD, NEED).refusals == problems("a", GOOD, NEED).warnings == ()
    wrong = {**GOOD, "tools": ["rsync"], "launcher": "0.0.1", "ends_at_logout": True}
    found = problems("a", wrong, NEED)
    assert found.refusals == ("a: these programs are missing: rsync",)
    assert [warning.partition(",")[0] for warning in found.warnings] == [
        "a: launcher 0.0.1 there",
        "a: systemd-logind kills your processes when your last session closes",
    ]
    gpus = Need("/env/bin/python", "/data/runs", gpus=2)
    gpu = {"index": 0, "uuid": "GPU-0", "name": "A6000", "total": 49140, "used": 4, "busy": ""}
    assert problems("a", {**GOOD, "gpus": [gpu]}, NEED) == problems("a", GOOD, NEED)
    trouble = problems("a", {**GOOD, "gpus_trouble": "nvidia-smi gave no answer"}, gpus)
    assert trouble.refusals == ("a: nvidia-smi gave no answer",)


@pytest.mark.slow
def test_a_connection_that_breaks_while_a_run_is_started_leaves_it_to_status_to_tell(laptop: Laptop) -> None:
    """The host has started it; the answer does not come."""
    slow = laptop.folder / "slow"
    wait = f'if [ "$1" = -c ] && ls {laptop.runs}/*/supervisor.lock; then sleep 9; fi'
    slow.write_text(f'#!/bin/sh\n{sys.executable} "$@"\ncode=$?\n{wait}\nexit $code\n')
    slow.chmod(0o755)
    laptop.profile("slow.yaml", NAMES[:1], paths={"python": str(slow), "runs": str(laptop.runs)})
    job = laptop.job(command="true", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    command = [sys.executable, "-m", "launcher", "submit", str(job), "-c", "slow.yaml"]
    submitting = subprocess.Popen(
        command, cwd=laptop.folder, env=laptop.environ, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (file,) = wait_for(lambda: list(laptop.runs.glob("*/supervisor.lock")), "supervisor")
    known = laptop.folder / "state" / "launcher" / "roots"
    assert "mirrors/tensor01-" in known.read_text(), "also where the submission is killed now"
    supervisor = psutil.Process(wait_for(lambda: json.loads(file.read_text()), "its record")["pid"])
    sshd = laptop.hosts[0].sshd
    assert sshd.process is not None
    daemon = psutil.Process(sshd.process.pid)
    wait_for(lambda: supervisor not in daemon.children(recursive=True), "end of what has started it")
    sshd.stop()
    _, said = submitting.communicate(timeout=240)
    assert submitting.returncode == 5 and "the run may or may not have started: run `launcher status" in said
    sshd.start()
    run = laptop.newest()
    assert laptop.wait(run)["state"] == "succeeded"
    assert [event.kind for event in run.read_events()][:2] == ["submitting", "submitted"]


def test_a_start_without_an_answer_is_unclear_and_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that takes it for a refusal submits the job a second time."""

    def cut(*_: object) -> None:
        raise CutError("the connection to tensor01 was lost before the answer came")

    monkeypatch.setattr(RemoteStore, "deliver", cut)
    run = RunDir(tmp_path / "tiny-1")
    run.path.mkdir()
    run.run.write_text(json.dumps({"hosts": ["tensor01"]}))
    chosen = Chosen((SshLogin("tensor01"),))
    with pytest.raises(UnclearError, match=r"was lost .*; the run may or may not have started") as caught:
        SshHosts(("tensor01",), "/data/runs")._start(run, chosen, "submitted")
    assert _exit_code(caught.value) == 5


def test_a_refusal_of_the_host_is_one_message(here: Laptop) -> None:
    run = here.runs / "x"
    request = {"do": "start", "run_dir": str(run), "rank": 0, "gpus": 0, "place": []}
    request |= {"secrets": {}, "token": ""}
    run.mkdir(parents=True)
    (run / "run.json").write_text("not json")
    with pytest.raises(
        HostError, match=r"tensor01: the supervisor did not start: .*it is not a run directory"
    ):
        ask_host(SshLogin("tensor01"), sys.executable, request)


@pytest.mark.e2e
def test_where_one_host_cannot_start_the_other_is_not_left_waiting(laptop: Laptop) -> None:
    """The first host's GPU is taken between the look and the start."""
    gpu = {"type": "NVIDIA RTX A6000", "count": 1, "memory": "47.4GiB"}
    laptop.profile("gpus.yaml", NAMES, node={"gpu": gpu})
    for host in laptop.hosts:
        host.gpus(1)
    smi = laptop.hosts[0].programs / "nvidia-smi"
    once = laptop.folder / "disk" / "looked"
    once.parent.mkdir()
    busy = f"echo '{laptop.hosts[0].uuid(0)}, 1, /usr/bin/python3, 9000'"
    smi.write_text(
        smi.read_text().replace('cat "$here/apps" ;;', f"[ ! -e {once} ] || {busy}; touch {once} ;;")
    )
    job = laptop.job(command="true", resources={"gpus_per_node": 1, "nodes": 2})
    said = laptop.said("submit", str(job), "-c", "gpus.yaml", code=4)
    assert "tensor01: 0 of 1 GPUs are free, the job needs 1 (GPU 0: python3 (process 1" in said
    assert nothing_is_left(laptop)
    processes = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert not any(str(laptop.runs).encode() in _read(file) for file in processes)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_a_secret_in_a_hosts_environment_that_no_process_can_receive_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "x" * LONGEST)
    secrets = [{"name": "TOKEN"}, {"name": "OTHER", "env": "NO_SUCH_VARIABLE"}, {"name": "HOME"}]
    found = on_host.look({"gpus": 0, "runs": str(tmp_path), "secrets": secrets})["secrets"]
    assert [why.partition(" (")[0].partition(": a variable")[0] for why in found] == [
        "TOKEN: the environment variable TOKEN is too large",
        "OTHER: the environment variable NO_SUCH_VARIABLE is not set",
    ]
