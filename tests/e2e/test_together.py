"""Several runs, and several nodes, on one machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from launcher.rundir.layout import RunDir
from tests.lab import Lab, verdicts, wait_for

pytestmark = pytest.mark.e2e

# A node that is silent for five seconds is lost: nobody waits a minute here.
SUPERVISE = """\
import sys
from launcher.supervise import nodes
nodes.LOST_SECONDS = 5.0
from launcher.supervise.__main__ import main
sys.exit(main())
"""

MEET = """\
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
total = torch.ones(1)
dist.all_reduce(total)
print("met", int(total), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(lab: Lab) -> None:
    lab.script(MEET)
    job = lab.job(command="python train.py")
    first, second = lab.submit(str(job)), None
    second = lab.submit(str(job))
    assert first.path != second.path
    for run in (first, second):
        assert lab.wait(run)["state"] == "succeeded", lab.all_logs(run)
        assert "met 2" in lab.cli("logs", run.id).stdout


@pytest.mark.thorough
def test_twenty_concurrent_starts_all_succeed(lab: Lab) -> None:
    lab.script("import os\nprint('rank', os.environ['RANK'])\n")
    job = lab.job(command="python train.py")
    with ThreadPoolExecutor(20) as pool:
        submitted = list(pool.map(lambda _: lab.cli("submit", str(job), timeout=280), range(20)))
    assert [done.returncode for done in submitted] == [0] * 20, [d.stderr for d in submitted if d.returncode]
    runs = [RunDir(path) for path in (lab.folder / "runs").iterdir()]
    assert len(runs) == 20
    deadline = time.monotonic() + 280
    while any(run.read_state().state in ("submitted", "running") for run in runs):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    for run in runs:
        assert [verdict["failure"] for verdict in verdicts(run)] == ["succeeded"], lab.all_logs(run)


def own_address() -> str:
    """An address of this machine that another one could use: loopback is refused for several nodes."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no network address but loopback")


@pytest.fixture
def two_nodes(lab: Lab):
    """A rendered two-node run whose supervisors are started by hand, both on this machine. Started once more,
    it is another submission of the same run."""

    def start(
        script: str, *, cancelled: bool = False, submission: int = 1, **fields
    ) -> tuple[RunDir, list[subprocess.Popen[str]]]:
        lab.script(script)
        run = RunDir(lab.folder / "runs" / "pair")
        if run.path.exists():
            return run, supervisors(run, submission)
        (lab.folder / "clusters").mkdir()
        (lab.folder / "clusters/pair.yaml").write_text(
            f"name: pair\nscheduler: slurm\nmax_nodes: 2\npaths: {{python: {json.dumps(sys.executable)}}}\n"
            "slurm: {gpu_request: none}\n"
        )
        resources = {"nodes": 2, "gpus_per_node": 0, "ranks_per_node": 1}
        job = lab.job(resources=resources, **fields)
        rendered = lab.cli("render", str(job), "-c", "pair", "--out", "runs/pair")
        assert rendered.returncode == 0, rendered.stderr
        if cancelled:
            run.cancel.write_text("before it began")
        return run, supervisors(run, 0)

    def supervisors(run: RunDir, submission: int) -> list[subprocess.Popen[str]]:
        base = str(61000 + (os.getpid() + 100 * submission) % 4000)
        command = [sys.executable, "-c", SUPERVISE, str(run.path), "--nodes", "2"]
        command += ["--rendezvous", own_address(), "--port-base", base]
        return [
            subprocess.Popen([*command, "--node-rank", str(node)], env=lab.environ, text=True)
            for node in (0, 1)
        ]

    return start


@pytest.mark.slow
def test_two_nodes_meet_and_agree_on_success(lab: Lab, two_nodes) -> None:
    run, supervisors = two_nodes(MEET, command="python train.py")
    assert [s.wait(240) for s in supervisors] == [0, 0], lab.all_logs(run)
    logs = lab.cli("logs", str(run.path)).stdout
    assert logs.count("met 2") >= 1
    assert sorted(path.name for path in run.attempt(0).logs.iterdir()) == ["node-00", "node-01"]


@pytest.mark.slow
def test_no_attempt_is_opened_after_a_request_to_stop_and_every_node_hears_of_it(lab: Lab, two_nodes) -> None:
    """Here only node 0 sees the request."""
    run, supervisors = two_nodes(MEET, cancelled=True, command="python train.py")
    assert [s.wait(240) for s in supervisors] == [18, 18], lab.all_logs(run)
    assert run.attempts() == [] and lab.status(run)["state"] == "cancelled"


@pytest.mark.slow
def test_memory_running_out_on_one_node_lowers_the_recipe_of_both(lab: Lab, two_nodes) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1' and int(sys.argv[1]) > 2:\n"
        "    raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
        "if int(sys.argv[1]) > 2:\n"
        "    time.sleep(300)\n"
        "print('fits', sys.argv[1])\n"
    )
    run, supervisors = two_nodes(script, command="python train.py {micro_batch_size}")
    assert [s.wait(240) for s in supervisors] == [0, 0], lab.all_logs(run)
    first, last = verdicts(run)
    assert (first["failure"], first["rank"], first["node"]) == ("gpu-oom", 1, 1)
    assert last["failure"] == "succeeded"
    for node in (0, 1):
        assert "fits 2" in Path(run.attempt(1).rank_log(node, node, "out")).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_whose_supervisor_is_killed_and_started_again_takes_part_in_the_next_attempt(
    lab: Lab, two_nodes, killed: int
) -> None:
    """As a pod of a cluster, whose container starts again by itself while the others go on."""
    script = "import os, time\n" + MEET.replace(
        "print(",
        "open('up' + os.environ['RANK'], 'w')\n"
        "time.sleep(300 if os.environ['LAUNCHER_ATTEMPT'] == '0' else 0)\nprint(",
    )
    run, supervisors = two_nodes(script, command="python train.py")
    wait_for(lambda: all((lab.folder / f"up{rank}").exists() for rank in (0, 1)), "both ranks")
    supervisors[killed].kill()
    supervisors[killed].wait(240)
    again = two_nodes(script, submission=0)[1]
    again[1 - killed].kill()  # the first one has the lock
    supervisors[killed] = again[killed]
    assert [s.wait(240) for s in supervisors] == [0, 0], lab.all_logs(run)
    reasons = [
        "the supervisor was killed, or",
        "the process that starts the ranks on node 1 was ended by SIGKILL",
    ]
    first, _ = verdicts(run)
    assert first["node"] == killed and first["reason"].startswith(reasons[killed])
