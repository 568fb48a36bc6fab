"""Runs over one or many jobs of a real Slurm cluster, through the real CLI. They run side by side."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from launcher.rundir.stop import read_stop_request
from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.nodes import LOST_SECONDS
from tests.lab import HELD, HELD_JOB, events, metrics, verdicts, wait_for
from tests.slurm.lab import GPT, SlurmLab, exported, handles, job_id
from tests.slurm.shape import CLUSTER

pytestmark = pytest.mark.e2e

# In its first start the job is slow, so that something can happen to it.
SLOW = """
import os, time
from launcher.tasks.gpt import PydocGPT

class Slow(PydocGPT):
    def loss(self, model, batch):
        if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and "LINKED" not in os.environ:
            time.sleep(float(os.environ.get("PACE", "0")))
        return super().loss(model, batch)
"""
ONE_NODE = {"nodes": 1, "ranks_per_node": 2}
ONE_RANK = {"nodes": 1, "ranks_per_node": 1}


@dataclass
class Told:
    lab: SlurmLab
    run: RunDir
    status: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in metrics(self.run) if "loss" in line}


def slow(lab: SlurmLab, pace: float, **fields: Any) -> str:
    lab.script(SLOW, "slow.py")
    base = {**GPT, "task": "slow:Slow", "steps": 80, "env": {"PACE": str(pace)}, "resources": ONE_RANK}
    return str(lab.job(**{**base, **fields}))


def tells(*stories: Callable[[SlurmLab], Told]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("it", stories, indirect=True, ids=lambda story: story.__name__)


def seconds_told(run: RunDir) -> float:
    """From the batch script's request to stop to the time at which Slurm will kill, as that request tells it.

    The supervisor may have heard of the stop a little earlier."""
    (told,) = run.path.glob("slurm-*-0.stop")
    left = read_stop_request(told).left
    assert left is not None
    return left


def steps(run: RunDir) -> int:
    return len(metrics(run)) if run.metrics.exists() else 0


# -- to the end


def to_the_end(lab: SlurmLab) -> Told:
    run = lab.submit(str(lab.job(**GPT, recipe={"sharding": "fsdp", "precision": "fp32"})))
    return Told(lab, run, lab.wait(run))


@pytest.mark.slow
@tells(to_the_end)
def test_two_nodes_with_two_ranks_each_train_to_the_end(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert (it.status["step"], it.status["checkpoint_step"]) == (12, 12)
    assert len(it.losses) == 12
    logs = sorted(path.relative_to(it.run.attempts()[0].logs) for path in it.run.path.rglob("rank-*.err"))
    assert [str(path) for path in logs] == [
        *["node-00/rank-000.err", "node-00/rank-001.err", "node-01/rank-002.err", "node-01/rank-003.err"]
    ]
    ((state, code, nodes, comment),) = it.lab.accounted(
        job_id(it.run), "ExitCode", "NNodes", "Comment"
    )  # fmt: skip
    assert (state, code, nodes) == ("COMPLETED", "0:0", "2")
    assert it.run.id in comment
    assert it.lab.cli("status", it.run.id).returncode == 0


# The page of the first end is written late: until the file `page` is there.
LATE_PAGE = """
import os, sys, time
if "launcher.report.at_end" in sys.orig_argv:
    while not os.path.exists({page!r}):
        time.sleep(0.05)
"""


def resumed_before_its_job_has_ended(lab: SlurmLab) -> Told:
    page, go, tried = lab.folder / "page", lab.folder / "go", lab.folder / "tried"
    lab.script(LATE_PAGE.format(page=str(page)), "sitecustomize.py")
    lab.environ["PYTHONPATH"] = f"{lab.folder}:{lab.environ['PYTHONPATH']}"
    text = f"[ -e {tried} ] || {{ touch {tried}; exit 7; }}; until [ -e {go} ]; do sleep 0.1; done"
    job = {"name": "twice", "command": ["bash", "-c", text], "batch": {"global": 1}, "retries": {"same": 0}}
    run = lab.submit(str(lab.job(**job, resources=ONE_RANK)))
    first = job_id(run)
    lab.wait(run, "failed")
    assert lab.cli("resume", run.id).returncode == 0
    wait_for(lambda: len(run.attempts()) == 2, "second attempt")
    standing = lab.slurm("squeue", "-h", "-j", first, "-o", "%T")
    page.touch()
    wait_for(lambda: not lab.slurm("squeue", "-h", "-o", "%A").split().count(first), "end of the first job")
    meanwhile = lab.status(run)["state"]
    go.touch()
    return Told(lab, run, lab.wait(run), {"standing": standing, "meanwhile": meanwhile})


@tells(resumed_before_its_job_has_ended)
def test_a_run_resumed_before_its_last_job_has_ended_belongs_to_the_next_job(it: Told) -> None:
    assert (it.more["standing"], it.more["meanwhile"]) == ("RUNNING", "running")
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert [event["state"] for event in events(it.run, "finished")] == ["failed", "succeeded"]
    wait_for(it.run.report.is_file, "page")


# -- memory


def as_a_site_wants(lab: SlurmLab) -> Told:
    lab.profile(clusters=CLUSTER, comment=False, srun_options=["--cpu-bind=none"], extra={"comment": "ours"})
    job = {"name": "alone", "command": ["bash", "-c", "ulimit -Sn; ulimit -Hn"], "batch": {"global": 1}}
    file = lab.job(**job, resources={**ONE_RANK, "time": "5m"})
    run = lab.submit(str(file), "--partition", "short", "--dependency", "singleton")
    return Told(lab, run, lab.wait(run))


@pytest.mark.slow
@tells(as_a_site_wants)
def test_a_run_in_a_named_cluster_without_our_comment_is_followed_to_its_end(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    asked = it.lab.accounted(job_id(it.run), "Cluster", "Comment")
    assert asked == [["COMPLETED", CLUSTER, "ours"]]
    (out,) = it.run.path.glob("attempts/000/logs/node-*/rank-000.out")
    soft, hard = (int(line.split()[-1]) for line in out.read_text().splitlines())
    assert soft == min(hard, 1048576)


def memory_on_one_node(lab: SlurmLab) -> Told:
    drill = {"TRAIN_MEMORY_FAIL": "rank=last,step=3,phase=backward,micro_batch=2"}
    job = {**GPT, "batch": {"global": 4}, "resources": {"ranks_per_node": 1}}
    run = lab.submit(str(lab.job(**job, env=drill, recipe={"sharding": "ddp", "precision": "fp32"})))
    return Told(lab, run, lab.wait(run))


@tells(memory_on_one_node)
def test_memory_that_runs_out_on_one_node_costs_a_rung_in_the_same_job(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    found = verdicts(it.run)
    assert [verdict["failure"] for verdict in found] == ["gpu-oom", "succeeded"]
    assert (found[0]["rank"], found[0]["node"]) == (1, 1)
    recipes = [json.loads(attempt.recipe.read_text()) for attempt in it.run.attempts()]
    assert [(recipe["micro_batch_size"], recipe["grad_accum"]) for recipe in recipes] == [(2, 1), (1, 2)]
    assert len(it.losses) == 12
    (row,) = it.lab.accounted(job_id(it.run), "ExitCode")
    assert row == ["COMPLETED", "0:0"] and len(handles(it.run)) == 1


HUNGRY = """
import os, time
held = []
while os.environ["RANK"] == "1" and len(held) < 200:
    held.append(bytearray(os.urandom(1 << 20)) * 16)
    time.sleep(0.01)
time.sleep(60)
"""


def host_memory(lab: SlurmLab) -> Told:
    lab.script(HUNGRY)
    resources = {**ONE_NODE, "memory_per_node": "1500MiB"}
    run = lab.submit(
        str(lab.job(command="python train.py", resources=resources, retries={"lower": 0, "same": 0}))
    )
    return Told(lab, run, lab.wait(run))


@tells(host_memory)
def test_a_kill_for_host_memory_is_the_verdict_and_the_exit_code(it: Told) -> None:
    assert (it.status["state"], it.status["failure"]) == ("failed", "host-oom"), it.lab.all_logs(it.run)
    assert it.lab.cli("status", it.run.id).returncode == EXIT_CODES["host-oom"]
    assert "host-oom" in it.lab.cli("why", it.run.id).stdout


# -- time limit


def time_limit(lab: SlurmLab) -> Told:
    lab.profile(signal_seconds=60)
    run = lab.submit(slow(lab, 1, resources={**ONE_NODE, "time": "2m"}))
    status = lab.wait(run, "succeeded", "failed")
    reference = lab.submit(slow(lab, 0, resources=ONE_NODE))
    lab.wait(reference)
    return Told(lab, run, status, {"reference": reference})


@pytest.mark.slow
@tells(time_limit)
def test_a_time_limit_costs_a_requeue_and_no_bit_of_the_result(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    reasons = [event["reason"] for event in events(it.run, "requeued")]
    assert reasons and set(reasons) == {"time-limit"}
    assert len(handles(it.run)) == 1, "under the same job id"
    resumed = events(it.run, "resumed")[0]
    assert 0 < resumed["step"] < 80
    assert sorted(it.losses) == sorted(Told(it.lab, it.more["reference"], {}).losses)
    assert it.losses == Told(it.lab, it.more["reference"], {}).losses
    assert exported(it.lab, it.run) == exported(it.lab, it.more["reference"])


def spent(lab: SlurmLab) -> Told:
    lab.profile(signal_seconds=60)
    run = lab.submit(slow(lab, 1, resources={**ONE_RANK, "time": "2m"}, retries={"time_limits": 0}))
    return Told(lab, run, lab.wait(run))


@pytest.mark.slow
@tells(spent)
def test_a_spent_budget_ends_the_chain_and_the_exit_code_says_why(it: Told) -> None:
    assert it.status["failure"] == "time-limit" and it.status["checkpoint_step"] > 0
    assert "retries.time_limits" in it.lab.cli("why", it.run.id).stdout
    ((state, code),) = it.lab.accounted(job_id(it.run), "ExitCode")
    assert (state, code) == ("FAILED", f"{EXIT_CODES['time-limit']}:0")
    assert not events(it.run, "requeued")


def refused(lab: SlurmLab) -> Told:
    lab.script(
        "import pathlib, time\n"
        "first = not pathlib.Path('second').exists()\n"
        "pathlib.Path('second').touch()\n"
        "time.sleep(100 if first else 0)\n"
    )
    lab.profile(extra={"begin": "now+20"})  # its warning may come as soon as it runs, before the update below
    run = lab.submit(str(lab.job(command="python train.py", resources={**ONE_RANK, "time": "60s"})))
    lab.slurm("scontrol", "update", f"JobId={job_id(run)}", "Requeue=0")
    return Told(lab, run, lab.wait(run, "succeeded", "failed"))


@pytest.mark.thorough  # it waits for most of a minute
@tells(refused)
def test_where_requeue_is_refused_a_linked_job_goes_on_with_the_run(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    first, second = events(it.run, "submitted")[0]["handle"], events(it.run, "requeued")[0]
    assert (second["reason"], second["linked"]) == ("time-limit", True)
    # On a slow machine the second job meets its limit, too, and may be requeued.
    assert first != second["handle"] and handles(it.run)[:2] == [first, second["handle"]]
    assert [state for (state,) in it.lab.accounted(job_id(it.run))] == ["COMPLETED"]


# -- preemption


def preempted(lab: SlurmLab, partition: str = "scavenge", node: str = "n5") -> Told:
    lab.profile(partition=partition)
    run = lab.submit(slow(lab, 0.5, resources={**ONE_RANK, "time": "10m"}))
    wait_for(lambda: steps(run) > 3, "some steps")
    lab.sbatch("sleep 3", "-p", "urgent", "-w", node, "--exclusive", "-t", "1")
    return Told(lab, run, lab.wait(run, "succeeded", "failed"))


def preempted_for_good(lab: SlurmLab) -> Told:
    return preempted(lab, "scavenge-cancel", "n6")


@tells(preempted)
def test_a_job_that_a_higher_partition_preempts_goes_on_from_a_checkpoint(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert [event["reason"] for event in events(it.run, "requeued")] == ["preempted"]
    assert len(handles(it.run)) == 1 and events(it.run, "resumed")[0]["step"] >= 3
    assert 10 < seconds_told(it.run) <= 10 + 20, "GraceTime of its partition, and KillWait of the cluster"
    states = [state for (state,) in it.lab.accounted(job_id(it.run))]
    assert states[0] in ("PREEMPTED", "REQUEUED") and states[-1] == "COMPLETED"
    assert len(it.losses) == 80


@pytest.mark.slow
@tells(preempted_for_good)
def test_where_preemption_cancels_the_run_goes_on_all_the_same(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert [event["reason"] for event in events(it.run, "requeued")] == ["preempted"]
    assert len(it.losses) == 80


def requeued(lab: SlurmLab) -> Told:
    """By an administrator: SIGTERM comes without a warning, and SIGKILL after KillWait."""
    run = lab.submit(slow(lab, 0.5, resources={"nodes": 2, "ranks_per_node": 2, "time": "10m"}))
    wait_for(lambda: steps(run) > 2, "some steps")
    lab.slurm("scontrol", "requeue", job_id(run))
    return Told(lab, run, lab.wait(run, "succeeded", "failed"))


@pytest.mark.slow
@tells(requeued)
def test_a_job_that_is_requeued_by_others_saves_the_step_it_is_in(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert [event["reason"] for event in events(it.run, "requeued")] == ["preempted"]
    assert verdicts(it.run)[0]["reason"].endswith("a checkpoint was written"), it.lab.all_logs(it.run)
    assert len(it.losses) == len(metrics(it.run)) == 80, "no step was done twice"
    assert 15 < seconds_told(it.run) <= 20, "KillWait"


def suspended(lab: SlurmLab) -> Told:
    run = lab.submit(slow(lab, 0.5, resources={"nodes": 2, "ranks_per_node": 1, "time": "10m"}))
    wait_for(lambda: steps(run) > 2, "some steps")
    lab.slurm("scontrol", "suspend", job_id(run))
    said = wait_for(lambda: lab.status(run)["reason"], "word of it")
    time.sleep(1.2 * LOST_SECONDS)  # what one node takes for the loss of another
    lab.slurm("scontrol", "resume", job_id(run))
    return Told(lab, run, lab.wait(run, "succeeded", "failed"), {"said": said})


@pytest.mark.thorough  # it waits for a minute
@tells(suspended)
def test_a_job_that_is_suspended_says_so_and_goes_on_as_if_nothing_had_been(it: Told) -> None:
    assert "is suspended" in it.more["said"]
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert len(it.run.attempts()) == 1 and len(it.losses) == len(metrics(it.run)) == 80


# -- a node


def crash(lab: SlurmLab, partition: str, nodes: int, is_back: bool) -> Told:
    lab.profile(partition=partition)
    run = lab.submit(slow(lab, 0.5, resources={"nodes": nodes, "ranks_per_node": 1, "time": "10m"}))
    wait_for(lambda: events(run, "checkpoint"), "a checkpoint")
    first = lab.slurm("squeue", "-h", "-j", job_id(run), "-o", "%N")
    victim = lab.slurm("scontrol", "show", "hostnames", first).split()[-1]
    lab.cluster.crash_node(victim)
    wait_for(lambda: "down" in lab.slurm("sinfo", "-h", "-n", victim, "-o", "%T"), "node that is down")
    if is_back:
        lab.cluster.start_node(victim)
    return Told(lab, run, lab.wait(run, "succeeded", "failed"), {"victim": victim})


def crash_and_return(lab: SlurmLab) -> Told:
    """The node is back before the job starts again, and yet not to be trusted."""
    return crash(lab, "fragile", 2, is_back=True)


def crash_of_the_batch_host(lab: SlurmLab) -> Told:
    return crash(lab, "fragile-too", 1, is_back=False)


@pytest.mark.slow
@tells(crash_and_return, crash_of_the_batch_host)
def test_a_node_that_dies_costs_a_requeue_without_it(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    # Where Slurm gives the job the same node again, a linked job follows without it.
    assert {event["reason"] for event in events(it.run, "requeued")} == {"node-failed"}
    assert events(it.run, "resumed") and len(it.losses) == 80
    last = it.lab.accounted(job_id(it.run), "NodeList")[-1]
    assert last[0] == "COMPLETED"
    assert it.more["victim"] not in it.lab.slurm("scontrol", "show", "hostnames", last[1]).split()


# -- a supervisor


def supervisor(run: RunDir, node: int) -> int | None:
    """Its process id. The nodes of the test cluster are processes of this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
            ours = b"launcher.supervise" in command and str(run.path).encode() in command
            if ours and f"SLURM_NODEID={node}".encode() in environment:
                return int(folder.name)
    return None


def killed_on(lab: SlurmLab, node: int) -> Told:
    run = lab.submit(slow(lab, 0.5, resources={"nodes": 2, "ranks_per_node": 1, "time": "10m"}))
    wait_for(lambda: events(run, "checkpoint"), "a checkpoint")
    os.kill(wait_for(lambda: supervisor(run, node), "a supervisor"), signal.SIGKILL)
    return Told(lab, run, lab.wait(run, "succeeded", "failed"))


def killed_on_node_0(lab: SlurmLab) -> Told:
    return killed_on(lab, 0)


def killed_on_node_1(lab: SlurmLab) -> Told:
    return killed_on(lab, 1)


@pytest.mark.slow
@tells(killed_on_node_0, killed_on_node_1)
def test_a_supervisor_that_is_killed_costs_a_requeue(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert [event["reason"] for event in events(it.run, "requeued")] == ["node-failed"]
    assert events(it.run, "resumed") and len(it.losses) == 80


# -- scancel


def cancelled(
    lab: SlurmLab, moment: Callable[[RunDir], Any], options: dict[str, Any] | None = None, **fields: Any
) -> Told:
    lab.profile(**(options or {}))
    run = lab.submit(slow(lab, 0.2, steps=100000, **fields))
    wait_for(lambda: moment(run), "moment for scancel")
    lab.slurm("scancel", job_id(run))
    return Told(lab, run, lab.wait(run))


def cancelled_while_pending(lab: SlurmLab) -> Told:
    def waits(run: RunDir) -> Any:
        return "BeginTime" in lab.queued(run) and lab.status(run)["reason"]

    return cancelled(lab, waits, {"extra": {"begin": "now+1hour"}})


def cancelled_at_the_start(lab: SlurmLab) -> Told:
    return cancelled(lab, lambda run: "RUNNING" in lab.queued(run))


def cancelled_in_training(lab: SlurmLab) -> Told:
    return cancelled(lab, lambda run: steps(run) > 3, train={"checkpoint_every": None})


def cancelled_in_a_checkpoint(lab: SlurmLab) -> Told:
    train = {"checkpoint_every": 1, "keep_checkpoints": 1}
    return cancelled(lab, lambda run: any(run.checkpoints.glob("*partial*")) or steps(run) > 20, train=train)


@pytest.mark.slow
@tells(cancelled_while_pending, cancelled_at_the_start, cancelled_in_training, cancelled_in_a_checkpoint)
def test_scancel_ends_the_run_at_any_phase_and_nothing_starts_it_again(it: Told) -> None:
    assert it.status["state"] == "cancelled", it.lab.all_logs(it.run)
    assert it.lab.cli("status", it.run.id).returncode == EXIT_CODES["cancelled"]
    assert it.lab.accounted(job_id(it.run))[-1][0].startswith("CANCELLED")
    assert not events(it.run, "requeued") and len(handles(it.run)) == 1
    if it.more.get("steps"):
        assert it.status["checkpoint_step"] >= 3, "there was time for a checkpoint"


# -- launcher cancel


def cancelled_at_the_time_limit(lab: SlurmLab) -> Told:
    lab.script(HELD, "held.py")
    lab.profile(signal_seconds=60)
    run = lab.submit(str(lab.job(**HELD_JOB, recipe="auto", resources={**ONE_RANK, "time": "2m"})))
    wait_for((run.path / "held").exists, "first step")
    lab.slurm("scancel", "--batch", "--signal=USR2", job_id(run))  # as Slurm does a minute before the limit
    wait_for(lambda: events(run, "stopping"), "warning")
    done = lab.cli("cancel", run.id)
    wait_for(lambda: len(events(run, "stopping")) > 1, "request to cancel")
    (run.path / "go").touch()
    return Told(lab, run, lab.wait(run), {"said": done.stdout + done.stderr})


@pytest.mark.slow
@tells(cancelled_at_the_time_limit)
def test_a_cancel_during_the_stop_at_a_time_limit_leaves_a_checkpoint_and_nothing_in_the_queue(
    it: Told,
) -> None:
    assert "asked to write a checkpoint" in it.more["said"]
    assert [event["reason"] for event in events(it.run, "stopping")] == ["time-limit", "cancelled"]
    assert (it.status["state"], it.status["checkpoint_step"]) == ("cancelled", 1), it.lab.all_logs(it.run)
    ((state, code),) = it.lab.accounted(job_id(it.run), "ExitCode")
    assert (state, code) == ("FAILED", f"{EXIT_CODES['cancelled']}:0")
    assert not events(it.run, "requeued") and len(handles(it.run)) == 1


# -- sweeps

TASK_OF_ARRAY = """
import os, sys
print("I am", os.environ["WHO"])
if os.environ["WHO"] == "b":
    sys.exit("train.py: error: b fails")
"""


def array(lab: SlurmLab) -> Told:
    lab.script(TASK_OF_ARRAY)
    job = lab.job(command="python train.py", resources=ONE_RANK, env={"WHO": "?"})
    done = lab.cli("submit", str(job), "-c", "lab.yaml", "--sweep", "env.WHO=a,b,c")
    assert done.returncode == 0, done.stderr
    listed = json.loads(lab.cli("list", "--json").stdout)
    runs = [RunDir(lab.folder / "runs" / run["run_id"]) for run in listed]
    return Told(lab, runs[0], {}, {"ended": [(run, lab.wait(run)) for run in runs]})


@pytest.mark.slow
@tells(array)
def test_in_an_array_one_failing_task_fails_alone(it: Told) -> None:
    found = {}
    for run, status in it.more["ended"]:
        who = json.loads(run.run.read_text())["job"]["env"]["WHO"]
        array_id, task = job_id(run).split("_")
        ((state, code),) = it.lab.accounted(job_id(run), "ExitCode")
        found[who] = (array_id, status["state"], state, code, task)
    ids = {row[0] for row in found.values()}
    assert len(ids) == 1, "one submission"
    assert {row[4] for row in found.values()} == {"0", "1", "2"}
    assert found["b"][1:4] == ("failed", "FAILED", f"{EXIT_CODES['user-error']}:0")
    for who in "ac":
        assert found[who][1:4] == ("succeeded", "COMPLETED", "0:0")


# -- text

NASTY = 'it\'s "x"; $(touch PWNED) `touch PWNED` #%j \\ {micro_batch_size} é , *'


def text(lab: SlurmLab) -> Told:
    project = lab.folder / "a b'c$(touch PWNED);%x"
    project.mkdir()
    lab = SlurmLab(project, lab.cluster)
    lab.script("import os, sys, pathlib\npathlib.Path(sys.argv[1]).write_text(os.environ['MOOD'])\n")
    job = lab.job(
        name=NASTY,
        command=["python", "train.py", "{run_dir}/seen"],
        resources=ONE_RANK,
        env={"MOOD": NASTY, "lower_case": "x"},
    )
    run = lab.submit(str(job))
    return Told(lab, run, lab.wait(run))


@pytest.mark.slow
@tells(text)
def test_shell_characters_in_names_folders_and_environment_are_only_text(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert (it.run.path / "seen").read_text() == NASTY
    assert not list(it.lab.folder.parent.rglob("PWNED"))
    assert json.loads(it.lab.cli("list", "--json").stdout)[0]["name"] == NASTY
