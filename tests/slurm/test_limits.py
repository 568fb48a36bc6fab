"""What a real Slurm with enforced limits holds back for ever is refused before, and nothing else is."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from launcher.planning.plan import make_plan
from launcher.schedulers.over_ssh.login import Here, ask
from launcher.schedulers.slurm.pending import why_pending
from launcher.schedulers.slurm.records import questions, records
from launcher.schedulers.slurm.request import Request
from launcher.schedulers.slurm.site import questions as site_questions
from launcher.schedulers.slurm.site import site
from launcher.spec.cluster import Cluster as Profile
from launcher.spec.job import Job
from tests.lab import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import started
from tests.slurm.lab import SlurmLab
from tests.slurm.shape import PARTITIONS, Shape

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENFORCED = Shape(
    nodes=2,
    enforce=("associations", "limits", "qos"),
    partitions=(*PARTITIONS.items(), ("own", "Nodes=ALL MaxTime=INFINITE DefaultTime=60")),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Accounts root > faculty > group, in which the user is."""
    for one in started(tmp_path_factory, ENFORCED):
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        sacctmgr(one, "add", "qos", "of-partition")
        sacctmgr(one, "add", "account", "faculty", "parent=root")
        sacctmgr(one, "add", "account", "group", "parent=faculty")
        sacctmgr(one, "add", "user", user, "account=group")
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
    here = site(ask(Here(), site_questions()))
    request = Request(profile, job, make_plan(job, profile), here)
    refused = list(request._limits(here.partitions[str(options["partition"])]))
    wanted = [
        f"--partition={options['partition']}", "--account=group", f"--nodes={fields.get('nodes', 1)}",
        "--ntasks-per-node=1", f"--cpus-per-task={fields['cpus_per_node']}", f"--time={SMALL['time'][:-1]}",
        f"--mem={job.resources.memory_per_node // 2**20}M",
    ]  # fmt: skip
    if fields["gpus_per_node"]:
        wanted.append(f"--gpus-per-node={fields['gpus_per_node']}")
    number = lab.sbatch("sleep 60", *wanted)
    try:
        state, reason = wait_for(lambda: said_of(lab, number), f"verdict of Slurm on {number}", 20)
        record = records(ask(Here(), questions([number]))).get(number)
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
