"""What a real Slurm with enforced limits holds back for ever is refused before, and nothing else is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.plan import make_plan
from launcher.schedulers.login import LocalLogin, ask
from launcher.schedulers.slurm.feasibility import Feasibility
from launcher.schedulers.slurm.pending import why_pending
from launcher.schedulers.slurm.records import look_up
from launcher.schedulers.slurm.site import questions as site_questions
from launcher.schedulers.slurm.site import site
from launcher.spec.cluster import Cluster as Profile
from launcher.spec.job import Job
from tests.lab import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import started
from tests.slurm.lab import SlurmLab
from tests.slurm.shape import CLUSTER, PARTITIONS, Shape

pytestmark = pytest.mark.e2e

ENFORCED = Shape(
    nodes=2,
    enforce=("associations", "limits", "qos"),
    partitions=(
        *PARTITIONS.items(),
        ("own", "Nodes=ALL MaxTime=INFINITE DefaultTime=60"),
        ("for-second", "Nodes=ALL MaxTime=60 AllowAccounts=second"),
        ("for-of-partition", "Nodes=ALL MaxTime=60 AllowQos=of-partition"),
    ),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Accounts root > faculty > group, in which the user is, and second, which is not the default."""
    for one in started(tmp_path_factory, ENFORCED):
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        sacctmgr(one, "add", "qos", "of-partition")
        sacctmgr(one, "add", "account", "faculty", "parent=root")
        sacctmgr(one, "add", "account", "group", "parent=faculty")
        sacctmgr(one, "add", "user", user, "account=group")
        sacctmgr(one, "add", "account", "second", "parent=root")
        sacctmgr(one, "add", "user", user, "account=second", "qos=normal,of-partition")
        update = ["scontrol", "update", "partition=own", "qos=of-partition"]
        subprocess.run(update, env=env_of(one), check=True)
        yield one


def env_of(cluster: Cluster) -> dict[str, str]:
    return {**os.environ, **cluster.env()}


def sacctmgr(cluster: Cluster, *words: str) -> None:
    command = ["sacctmgr", "-iQ", *words]
    done = subprocess.run(command, env=env_of(cluster), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def limits(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Whose -> `Name=value ...`; what a test has set is taken away again."""
    wanted: dict[str, str] = {}
    yield wanted
    for whose, words in wanted.items():
        cleared = [re.sub(r"=[\w.:]+(?=,|$)", "=-1", word) for word in words.split()]
        sacctmgr(cluster, "modify", *whose.split(), "set", *cleared)


QOS = "qos normal"
SMALL = {"cpus_per_node": 1, "memory_per_node": "100MiB", "time": "30m"}
REFUSED = [
    (
        {"account group": "MaxWall=10"},
        {},
        {},
        "resources.time: 30m asked for, account group allows 10m (MaxWall",
    ),
    (
        {"account group": "MaxTRES=node=1"},
        {"nodes": 2},
        {},
        "resources.nodes: 2 nodes in all, account group gi",
    ),
    ({"account faculty": "GrpTRES=cpu=3"}, {"cpus_per_node": 4}, {}, "account faculty gives 3 (GrpTRES)"),
    (
        {QOS: "MaxTRESPU=cpu=4"},
        {"cpus_per_node": 8},
        {},
        "resources.cpus_per_node: 8 CPUs in all, QOS normal",
    ),
    (
        {QOS: "MaxTRES=mem=1G"},
        {"memory_per_node": "2GiB"},
        {},
        "resources.memory_per_node: 2 GiB of memory in",
    ),
    ({QOS: "MaxTRESPerNode=cpu=2"}, {"cpus_per_node": 3}, {}, "3 CPUs on each node, QOS normal gives 2"),
    (
        {QOS: "MaxTRESPA=gres/gpu=1"},
        {"gpus_per_node": 2},
        {"gpu_request": "gpus-per-node"},
        "resources.gpus_per_node: 2 GPUs in all, QOS normal gives 1 (MaxTRESPA)",
    ),
    (
        {QOS: "MaxWall=60", "qos of-partition": "MaxWall=5"},
        {},
        {"partition": "own"},
        "30m asked for, QOS of-partition allows 5m",
    ),
]
# A limit that another one overrides, one that is for others, one that the job just keeps.
TAKEN = [
    ({"account group": "MaxWall=10 MaxTRES=node=1", QOS: "MaxWall=60 MaxTRES=node=2"}, {"nodes": 2}, {}),
    ({QOS: "MaxWall=5", "qos of-partition": "MaxWall=60"}, {}, {"partition": "own"}),
    (
        {"account group": "MaxTRES=cpu=1", "qos of-partition": "MaxTRES=cpu=4"},
        {"cpus_per_node": 4},
        {"partition": "own"},
    ),
    ({"qos of-partition": "MaxTRES=cpu=1"}, {"cpus_per_node": 4}, {}),
    ({QOS: "MaxTRESPU=cpu=4,mem=200M MaxWall=30"}, {"nodes": 2, "cpus_per_node": 2}, {}),
    ({QOS: "MaxTRES=gres/gpu:a=1"}, {"gpus_per_node": 2}, {"gpu_request": "gpus-per-node"}),
]


def verdict(
    cluster: Cluster, lab: SlurmLab, resources: dict[str, object], slurm: dict[str, object]
) -> tuple[list[str], str, str]:
    """What is refused before; then Slurm's state of such a job, and why it waits in launcher's words."""
    fields = {"gpus_per_node": 0} | SMALL | resources
    options = {"partition": "main", "account": "group", "gpu_request": "none"} | slurm
    node = {"gpu": {"type": "A100", "count": 2, "memory": "39GiB"}, "cpus": 16}
    profile = Profile.model_validate(
        {"name": "c", "scheduler": "slurm", "max_nodes": 9, "node": node, "slurm": options}
    )
    job = Job.model_validate({"name": "j", "command": ["true"], "batch": {"global": 8}, "resources": fields})
    here = site(ask(LocalLogin(), site_questions()))
    feasibility = Feasibility(profile, job, make_plan(job, profile), here)
    refused = list(feasibility._limits(here.partitions[str(options["partition"])]))
    wanted = [
        f"--partition={options['partition']}", "--account=group", f"--nodes={fields.get('nodes', 1)}",
        "--ntasks-per-node=1", f"--cpus-per-task={fields['cpus_per_node']}", f"--time={SMALL['time'][:-1]}",
        f"--mem={job.resources.memory_per_node // 2**20}M",
    ]  # fmt: skip
    if fields["gpus_per_node"]:
        wanted.append(f"--gpus-per-node={fields['gpus_per_node']}")
    number = lab.sbatch("sleep 60", *wanted)
    try:
        state, reason = wait_for(lambda: said_of(lab, number), f"verdict of Slurm on {number}")
        record = look_up(partial(ask, LocalLogin()), [number]).get(number)
    finally:
        lab.slurm("scancel", number)
    assert record is not None
    return refused, state, f"{reason}: {why_pending(record, here)}"


def seldom(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


def said_of(lab: SlurmLab, job: str) -> list[str] | None:
    """State and reason, once the job runs or a limit holds it back."""
    state, reason = lab.slurm("squeue", "-h", "-j", job, "-o", "%T %r").split(" ", 1)
    return [state, reason] if state == "RUNNING" or reason.startswith(("QOS", "Assoc", "Max")) else None


@pytest.mark.slow
@pytest.mark.parametrize(("set_", "resources", "slurm", "said"), [*REFUSED[:4], *seldom(REFUSED[4:])])
def test_a_limit_that_the_job_exceeds_by_itself_is_named_with_its_field(
    cluster: Cluster,
    slurm_lab: SlurmLab,
    limits: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    set_: dict[str, str],
    resources: dict[str, object],
    slurm: dict[str, object],
    said: str,
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env()["SLURM_CONF"])
    limits |= set_
    for whose, words in set_.items():
        sacctmgr(cluster, "modify", *whose.split(), "set", *words.split())
    (refused,), state, why = verdict(cluster, slurm_lab, resources, slurm)
    assert said in refused and "ask for no more" in refused
    assert state == "PENDING", why
    assert "can never start" in why or "shorter resources.time" in why, why


@pytest.mark.slow
@pytest.mark.parametrize(("set_", "resources", "slurm"), [*TAKEN[:2], *seldom(TAKEN[2:])])
def test_a_job_that_slurm_starts_is_not_refused(
    cluster: Cluster,
    slurm_lab: SlurmLab,
    limits: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    set_: dict[str, str],
    resources: dict[str, object],
    slurm: dict[str, object],
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env()["SLURM_CONF"])
    limits |= set_
    for whose, words in set_.items():
        sacctmgr(cluster, "modify", *whose.split(), "set", *words.split())
    refused, state, why = verdict(cluster, slurm_lab, resources, slurm)
    assert (refused, state) == ([], "RUNNING"), why


NEVER = [
    ("for-second", "account", "it takes second; set slurm.account to second", "Account=second"),
    (
        "for-of-partition",
        "qos",
        "it takes of-partition; none of yours may use it",
        "Account=second QOS=of-partition",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "field", "said", "change"), NEVER)
def test_a_default_that_the_partition_is_not_for_is_refused_and_a_job_with_it_is_told_what_to_do(
    slurm_lab: SlurmLab,
    monkeypatch: pytest.MonkeyPatch,
    partition: str,
    field: str,
    said: str,
    change: str,
) -> None:
    job = slurm_lab.job(task=None, command=["true"], recipe={"sharding": "none"}, resources=ONE_RANK)
    slurm_lab.profile(partition=partition)
    done = slurm_lab.cli("submit", str(job), "-c", "lab.yaml")
    assert done.returncode == 4 and f"slurm.{field}: partition {partition} does not take your" in done.stderr
    assert said in done.stderr and not list(slurm_lab.folder.glob("runs/*"))
    monkeypatch.setenv("SLURM_CONF", slurm_lab.environ["SLURM_CONF"])
    number = slurm_lab.sbatch("sleep 60", f"--partition={partition}")
    seen = partial(look_up, partial(ask, LocalLogin()), [number])
    record = wait_for(lambda: (one := seen().get(number)) and one.reason and one, "reason of Slurm")
    why = why_pending(record)
    assert f"may not use its partition ({partition}) (Slurm says: {partition} allows " in why
    name = "Account" if field == "account" else "QOS"
    assert f"`scontrol update JobId={number} {name}=NAME`" in why and "wait;" not in why
    slurm_lab.slurm("scontrol", "update", f"JobId={number}", *change.split())
    wait_for(lambda: (one := seen().get(number)) and one.state == "RUNNING", "start of the job")


ONE_RANK = {"nodes": 1, "ranks_per_node": 1, "time": "5m"}
COUNT = """#!/bin/sh
echo {name} "$*" >>{folder}/calls
exec {real} "$@"
"""


def counting(lab: SlurmLab, *names: str) -> Path:
    """Slurm's commands note how they are called in the file that is returned."""
    calls, folder = lab.folder / "calls", lab.folder / "bin"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(COUNT.format(name=name, folder=lab.folder, real=shutil.which(name)))
        (folder / name).chmod(0o755)
    lab.environ["PATH"] = f"{folder}:{lab.environ['PATH']}"
    return calls


@pytest.mark.slow
def test_what_accounting_said_is_kept_and_refuses_nothing_that_was_allowed_since(
    cluster: Cluster, slurm_lab: SlurmLab
) -> None:
    lab, user = slurm_lab, subprocess.check_output(["id", "-un"], text=True).strip()
    calls = counting(lab, "sacctmgr")
    job = str(lab.job(task=None, command=["true"], recipe={"sharding": "none"}, resources=ONE_RANK))
    lab.profile(account="group", qos="new")

    def submitted() -> tuple[int, int]:
        calls.write_text("")
        return lab.cli("submit", job, "-c", "lab.yaml").returncode, len(calls.read_text().splitlines())

    refused, asked = submitted()
    assert refused == 4 and asked
    sacctmgr(cluster, "add", "qos", "new")
    sacctmgr(cluster, "modify", "user", user, "where", "account=group", "set", "qos+=new")
    assert submitted() == (0, asked), "asked again before it would refuse"
    assert submitted() == (0, 0)
    sacctmgr(cluster, "modify", "user", user, "where", "account=group", "set", "qos-=new")
    assert submitted()[0] == 4, "sbatch --test-only knows it"


@pytest.mark.slow
def test_accounting_that_hangs_holds_no_verb_up(cluster: Cluster, slurm_lab: SlurmLab) -> None:
    lab = slurm_lab
    calls = counting(lab, "squeue", "scontrol", "sacct")
    job = str(lab.job(task=None, command=["sleep", "60"], recipe={"sharding": "none"}, resources=ONE_RANK))
    at_most = 25  # less than one question to slurmdbd takes that hangs
    cluster.freeze_accounting()
    try:
        submitted = lab.cli("submit", job, "-c", "lab.yaml", timeout=at_most)
        run = lab.newest()
        calls.unlink(missing_ok=True)
        with ThreadPoolExecutor() as pool:
            following = pool.submit(lab.cli, "logs", run.id, "-f", timeout=at_most)
            wait_for(calls.exists, "question of the follower")
            wait_for(lambda: run.read_state().state == "running", "start of the run")
            lab.cli("cancel", run.id, timeout=at_most)
            followed = following.result()
        status = lab.cli("status", run.id, timeout=at_most)
    finally:
        cluster.thaw_accounting()
    assert submitted.returncode == 0, submitted.stderr
    assert "gave no answer within 3 s: account, QOS and limits were not checked" in submitted.stdout
    assert followed.returncode == 0 and "cancelled" in status.stdout, followed.stderr + status.stderr
    assert "sacct" not in calls.read_text(), "the controller knows the job"


@pytest.mark.slow
def test_nor_where_the_profile_names_the_cluster(cluster: Cluster, slurm_lab: SlurmLab) -> None:
    """Asked for a cluster by its name, each of Slurm's commands asks slurmdbd where that is."""
    lab = slurm_lab
    lab.profile(clusters=CLUSTER)
    job = str(lab.job(task=None, command=["sleep", "60"], recipe={"sharding": "none"}, resources=ONE_RANK))
    run = lab.submit(job)
    cluster.freeze_accounting()
    try:
        status = lab.cli("status", run.id, timeout=25)
        cancelled = lab.cli("cancel", run.id, timeout=25)
    finally:
        cluster.thaw_accounting()
    assert status.returncode == 0 and "does not answer" not in status.stdout, status.stdout
    assert cancelled.returncode == 0, cancelled.stderr
    assert lab.wait(run)["state"] == "cancelled"
