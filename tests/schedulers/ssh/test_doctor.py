"""The doctor on two hosts that share no folder, over real ssh: orders and answers are copied between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from launcher.doctor.options import Options
from launcher.doctor.order_files import Orders
from launcher.doctor.values import Measured
from launcher.rundir.layout import RunDir
from launcher.spec.load import load_cluster
from launcher.supervise.process import processes_of
from tests.lab import wait_for
from tests.schedulers.ssh.hosts import NAMES
from tests.schedulers.ssh.test_no_shared_folder import Apart
from tests.schedulers.ssh.test_no_shared_folder import lab as lab

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_hosts_that_share_no_folder_are_examined(lab: Apart) -> None:
    done = lab.cli("doctor", "-c", "both.yaml", "-N", "2", "--json")
    told = json.loads(done.stdout)
    print(done.stderr, json.dumps(told["findings"], indent=1))
    verdicts = {one["check"]: one["verdict"] for one in told["findings"] if one["verdict"] == "good"}
    assert {"answers", "ranks", "rendezvous-port", "all-reduce", "model-fsdp"} <= set(verdicts)
    assert "same-files" not in {one["check"] for one in told["findings"]}, "they have nothing in common"
    assert {one["node"] for one in told["measured"] if one["check"] == "host"} == {0, 1}
    run = lab.newest()
    assert lab.on_disk(run, 1).read_about().apart is True
    assert not list(lab.folder.rglob(".doctor*"))
    again = lab.cli("doctor", "--show", run.id)
    assert again.returncode == done.returncode
    assert max(map(len, again.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_a_host_that_dies_is_named_before_the_run_has_ended(lab: Apart) -> None:
    command = [sys.executable, "-m", "launcher", "doctor", "-c", "both.yaml", "-N", "2", "--json"]
    process = subprocess.Popen(
        command, cwd=lab.folder, env=lab.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(
        lambda: [
            one
            for one in lab.disks[0].glob("runs/*/attempts/000/doctor/order-*.json")
            if '"tests"' in one.read_text()
        ],
        "test of ranks",
    )
    run = lab.newest()
    supervisor = json.loads((lab.on_disk(run, 1).path / "supervisor.01.lock").read_text())["pid"]
    for pid in [supervisor, *processes_of(lab.runs / run.id, 0, 1)]:
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    told = json.loads(out)
    assert [one["nodes"] for one in told["findings"] if one["check"] == "alive"] == [[1]]
    assert not told["complete"] and process.returncode == 1
    assert f"a node has died: {run.id} is cancelled" in err
    assert lab.wait(run)["state"] == "cancelled"


def test_a_profile_of_hosts_is_detected_with_what_the_doctor_found_there(lab: Apart) -> None:
    """The doctor's run is made up; the hosts are asked over real ssh."""
    run = RunDir(lab.folder / "runs/doctor-1")
    run.path.mkdir(parents=True)
    cluster = {"name": "both", "scheduler": "ssh", "ssh": {"hosts": list(NAMES)}}
    about = {"id": run.id, "job": {"command": Options().command}, "cluster": cluster}
    run.run.write_text(json.dumps({**about, "created": "2026-11-25T12:00:00.000000Z"}))
    run.plan.write_text(json.dumps({"layout": {"nodes": 2, "ranks_per_node": 1, "gpus_per_node": 0}}))
    chosen = {
        "env": {"GLOO_SOCKET_IFNAME": "eth0"},
        "explains": "",
        "before": "all-reduce hangs",
        "after": "",
    }
    Orders(run.attempt(0).path / "doctor", 0, 2).answer(
        0, {"values": [asdict(Measured("chosen", 0, chosen))]}
    )
    hosts = [text for name in NAMES for text in ("--host", name)]
    done = lab.cli("clusters", "detect", *hosts)
    assert done.returncode == 0, done.stderr
    (lab.folder / "found.yaml").write_text(done.stdout)
    found = load_cluster(lab.folder / "found.yaml")
    assert found.name == NAMES[0] and found.max_nodes == 2 and found.node.cpus == os.cpu_count()
    assert found.network.env == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert "run doctor-1: all-reduce hangs without it" in done.stdout
    alone = lab.cli("clusters", "detect", "--host", NAMES[0])
    assert "GLOO_SOCKET_IFNAME" not in alone.stdout, "that run was on both hosts"
    both = lab.cli("clusters", "detect", "--host", NAMES[0], "--login", NAMES[0])
    assert both.returncode == 2 and "without --login" in both.stderr
