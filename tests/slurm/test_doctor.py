"""The doctor on a real Slurm cluster, one of whose nodes is sick."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.lab import SlurmLab, job_id
from tests.slurm.test_before_the_queue import pyxis as pyxis

PARTITION = "fragile-too"
"Its nodes are n10 and n11."


@contextmanager
def tiny_shm(cluster: Cluster, node: str) -> Iterator[None]:
    """A /dev/shm of 1 MiB on a node."""
    if os.geteuid() != 0:
        pytest.skip("mounting on a node needs root")
    inside = ["nsenter", f"--mount=/proc/{cluster._pid(f'node-{node}')}/ns/mnt"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", "/dev/shm"], check=True)


@pytest.mark.slow
def test_the_sick_node_of_two_is_named(slurm_lab: SlurmLab, cluster: Cluster) -> None:
    partition = f"cluster.slurm.partition={PARTITION}"
    with tiny_shm(cluster, "n11"):
        told = slurm_lab.json("doctor", "-c", "lab.yaml", "-N", "2", "--quick", "-s", partition, code=1)
    hosts = {one["node"]: one["value"] for one in told["measured"] if one["check"] == "host"}
    assert sorted(hosts.values()) == ["n10", "n11"]
    [shm] = [one for one in told["findings"] if one["check"] == "shm" and one["verdict"] == "broken"]
    assert [hosts[node] for node in shm["nodes"]] == ["n11"] and shm["measured"] == "1 MiB"
    good = {one["check"] for one in told["findings"] if one["verdict"] == "good"}
    assert {"answers", "ranks", "rendezvous-port", "clocks"} <= good


@pytest.mark.slow
def test_a_run_leaves_a_sick_node_before_or_after_its_first_attempt(
    slurm_lab: SlurmLab, cluster: Cluster
) -> None:
    """`checks: doctor` examines it before; the supervisor has it examined after an end of this kind."""
    slurm_lab.script(
        "import socket, sys\nnode = socket.gethostname()\nprint('began on', node, flush=True)\n"
        "if node == 'n10': sys.exit('DistBackendError: NCCL error: unhandled system error')\n"
    )
    job = slurm_lab.job(command="python train.py", resources={"nodes": 1, "ranks_per_node": 1})
    sets = ["-s", f"cluster.slurm.partition={PARTITION}"]
    runs = []
    idle = ["sinfo", "-h", "-N", "-t", "idle", "-p", PARTITION, "-o", "%N"]
    with tiny_shm(cluster, "n10"):
        for checks in (["-s", "cluster.checks=doctor"], []):
            # Slurm takes n10 first, if no other job still has it.
            wait_for(lambda: slurm_lab.slurm(*idle).split() == ["n10", "n11"], "idle nodes")
            runs.append(run := slurm_lab.submit(str(job), *sets, *checks))
            assert slurm_lab.wait(run)["state"] == "succeeded"
            assert (run.path / "slurm-excluded").read_text().split() == ["n10"]
            assert "began on n11" in slurm_lab.all_logs(run)
    before, after = runs
    assert any("the doctor: /dev/shm 1 MiB" in file.read_text() for file in before.path.glob("slurm-*.out"))
    assert "began on n10" not in slurm_lab.all_logs(before)
    judged = after.attempt(0).read_verdict()
    assert judged is not None and "began on n10" in slurm_lab.all_logs(after)
    assert "fails the doctor's checks: /dev/shm 1 MiB" in judged.then
    assert judged.then.endswith(": going on without it")


@pytest.mark.slow
def test_a_run_on_two_nodes_leaves_the_sick_one(slurm_lab: SlurmLab, cluster: Cluster) -> None:
    """The supervisors of both nodes have them examined; node 0 decides."""
    slurm_lab.script(
        "import os, socket, sys\nnode = socket.gethostname()\nprint('began on', node, flush=True)\n"
        "if node == 'n2': sys.exit('DistBackendError: NCCL error: unhandled system error')\n"
    )
    job = slurm_lab.job(command="python train.py", resources={"nodes": 2, "ranks_per_node": 1})
    with tiny_shm(cluster, "n2"):
        run = slurm_lab.submit(str(job), "-c", "lab.yaml")
        ended = slurm_lab.wait(run)
    assert ended["state"] == "succeeded", slurm_lab.all_logs(run)
    assert (run.path / "slurm-excluded").read_text().split() == ["n2"]
    assert (run.path / "attempts/000/nodes/node-01.checked.json").exists()
    judged = run.attempt(0).read_verdict()
    assert judged is not None and "/dev/shm 1 MiB" in judged.then


@pytest.mark.slow
def test_the_doctor_answers_for_a_job(slurm_lab: SlurmLab) -> None:
    slurm_lab.script("import nosuchmodule\n")
    job = slurm_lab.job(command="python train.py", resources={"nodes": 2, "ranks_per_node": 1})
    told = slurm_lab.json("doctor", "-c", "lab.yaml", "--quick", "--job", str(job), code=1)
    assert (told["nodes"], told["ranks"]) == (2, 2)
    lacks = [one for one in told["findings"] if one["part"] == "job" and one["verdict"] == "broken"]
    assert [(one["check"], one["nodes"]) for one in lacks] == [("job-imports", [0, 1])]
    seen = {one["check"]: one["measured"] for one in told["findings"] if one["verdict"] == "good"}
    assert (seen["same-files"], seen["shared-locks"]) == ("seen", "excludes")
    assert seen["workdir"].startswith("1 files, ")


@pytest.mark.slow
def test_the_image_of_a_job_is_there_or_not(pyxis: None, slurm_lab: SlurmLab, tmp_path: Path) -> None:
    """pyxis itself is a stub: the step runs outside of the image, whose file must exist all the same."""
    slurm_lab.script("print('trained')\n")
    job = slurm_lab.job(
        command="python train.py", image="my.sqsh", resources={"nodes": 1, "ranks_per_node": 1}
    )
    command = (
        "doctor",
        "-c",
        "lab.yaml",
        "--quick",
        "--job",
        str(job),
        "-s",
        "cluster.container.runtime=pyxis",
    )
    told = slurm_lab.json(*command, code=1)
    assert not told["complete"] and f"there is no {slurm_lab.folder}/my.sqsh" in told["unfinished"]
    (slurm_lab.folder / "my.sqsh").touch()
    slurm_lab.cli(*command)
    told = json.loads(slurm_lab.cli("doctor", "--show", slurm_lab.newest().id, "--json").stdout)
    [image] = [one for one in told["findings"] if one["check"] == "job-image"]
    assert (image["verdict"], image["measured"]) == ("good", "my.sqsh")


@pytest.mark.slow
def test_a_run_stays_where_there_are_too_few_other_nodes(slurm_lab: SlurmLab, cluster: Cluster) -> None:
    """Its job goes on with another step: nothing goes back into the queue."""
    slurm_lab.script(
        "import os, socket, sys\n"
        "if os.environ['LAUNCHER_ATTEMPT'] == '0' and socket.gethostname() == 'n11':\n"
        "    sys.exit('DistBackendError: NCCL error: unhandled system error')\n"
    )
    job = slurm_lab.job(command="python train.py", resources={"nodes": 2, "ranks_per_node": 1})
    with tiny_shm(cluster, "n11"):
        run = slurm_lab.submit(str(job), "-c", "lab.yaml", "-s", f"cluster.slurm.partition={PARTITION}")
        ended = slurm_lab.wait(run)
    assert ended["state"] == "succeeded", slurm_lab.all_logs(run)
    judged = run.attempt(0).read_verdict()
    assert judged is not None and "/dev/shm 1 MiB" in judged.then
    output = (run.path / f"slurm-{job_id(run)}.out").read_text()
    assert "the run goes on in this job" in output and "back in the queue" not in output
    assert [event.kind for event in run.read_events()].count("attempt") == 2


@pytest.mark.slow
def test_what_the_doctor_wrote_is_part_of_the_detected_profile(slurm_lab: SlurmLab) -> None:
    """The profile names an interface that no node has. `--write` corrects it, and `detect` knows it."""
    slurm_lab.profile(partition=PARTITION)
    with (slurm_lab.folder / "lab.yaml").open("a") as file:
        file.write("network:\n  env:\n    GLOO_SOCKET_IFNAME: nosuch0\n")
    done = slurm_lab.cli("doctor", "-c", "lab.yaml", "-N", "2", "--write")
    assert "GLOO_SOCKET_IFNAME" in done.stdout, done.stdout + done.stderr
    written = (slurm_lab.folder / "lab.yaml").read_text()
    assert "nosuch0" not in written and "# launcher doctor, " in written
    detected = slurm_lab.cli("clusters", "detect", "--partition", PARTITION).stdout
    line = next(line for line in written.splitlines() if "GLOO_SOCKET_IFNAME" in line)
    assert line.strip() in detected and f"run {slurm_lab.newest().id}" in detected
