"""What is rented costs what every verb says, and the worst case holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.cli.main import app
from launcher.planning.cost import Cost, Offered, cost_of
from launcher.planning.plan import make_plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job

GPU = {"type": "NVIDIA RTX A5000", "count": 1, "memory": "23.6GiB"}
OFFER = Offered("1 x A, SECURE", 1.0, 1.0, 24 * 3600)


def cost(
    job: dict[str, Any] | None = None,
    offered: Offered | None = OFFER,
    speed: float | None = None,
    nodes: int = 1,
    price: float | None = None,
    **section: Any,
) -> Cost:
    written = {"name": "a", "command": ["true"], "batch": {"global": 8}, **(job or {})}
    written["resources"] = {"nodes": nodes, **written.get("resources", {})}
    cluster = Cluster.model_validate(
        {
            "name": "c",
            "scheduler": "runpod",
            "max_nodes": 4,
            "node": {"gpu": GPU},
            "runpod": {"gpu_id": "A", "volume_id": "v", **section},
            "usd_per_gpu_hour": price,
        }
    )
    read = Job.model_validate(written)
    plan = make_plan(read, cluster).model_copy(update={"samples_per_second": speed})
    found = cost_of(read, cluster, plan, offered)
    assert found is not None
    return found


def test_a_predicted_job_has_all_four_numbers() -> None:
    found = cost({"steps": 3600}, speed=4.0, max_hours=10)
    assert (found.usd_per_hour, found.hours, found.usd, found.worst_usd) == (1.0, 2.0, 2.0, 10.0)
    assert dict(found.rows()) == {
        "price": "1.00 USD/h (1 x A, SECURE)",
        "predicted time": "2 h",
        "predicted total": "2.00 USD",
        "worst case": "10.00 USD: 10 h (max_hours), then RunPod itself ends the pod",
    }


def test_the_default_limit_is_named_as_one() -> None:
    found = cost()
    assert found.worst_usd == 24.0 and "24 h (max_hours, by default)" in found.worst


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({}, "`steps` is not set"),
        ({"steps": 5}, "the model of a command is not known"),
        ({"steps": 5, "command": None, "task": "a:B"}, "have not been planned yet"),
        ({"steps": 5, "resources": {"gpus_per_node": 0}}, "no speed is predicted for a CPU"),
    ],
)
def test_where_no_time_is_predicted_it_says_why(job: dict[str, Any], why: str) -> None:
    found = cost(job)
    assert found.hours is None and found.usd is None and why in found.hours_unknown


def test_what_is_shortest_limits_the_worst_case() -> None:
    assert cost({"resources": {"time": "2h"}}).worst_usd == 2.0
    assert "resources.time" in cost({"resources": {"time": "2h"}}).worst
    paid = Offered("1 x A", 1.0, 1.0, 3 * 3600)
    assert cost(offered=paid, budget=3).worst_usd == 3.0
    assert "what the budget pays for" in cost(offered=paid, budget=3).worst
    assert cost(offered=None, price=0.5, budget=3).worst_usd == 3.0


def test_the_dearest_offer_is_the_worst_case_since_the_others_may_be_refused() -> None:
    found = cost(offered=Offered("1 x A", 1.0, 2.5, 24 * 3600))
    assert (found.usd_per_hour, found.worst_usd) == (1.0, 60.0) and "2.50 USD/h" in found.worst


def test_every_pod_that_replaces_an_interruptible_one_counts() -> None:
    job = {"retries": {"preemptions": 4}}
    assert cost(job, bid_per_gpu=1).worst_usd == 5 * 24.0
    assert cost({**job, "requeue": False}, bid_per_gpu=1).worst_usd == 24.0
    assert cost(job, bid_per_gpu=1, budget=30).worst_usd == 30.0
    assert cost(job).worst_usd == 24.0, "nobody resumes a pod on demand by itself"


@pytest.mark.parametrize(
    ("more", "why"),
    [({"server_limit": False}, "server_limit: false"), ({"nodes": 2}, "no time limit for a cluster of pods")],
)
def test_without_a_limit_of_runpods_the_worst_case_has_no_total(more: dict[str, Any], why: str) -> None:
    found = cost(**more)
    assert found.worst_usd is None and why in found.worst
    assert "24.00 USD a day" in found.worst and "leaks --end" in found.worst


def test_a_price_that_is_not_known_is_no_price() -> None:
    found = cost(offered=None)
    assert found.usd_per_hour is None and "asks RunPod" in found.price
    assert found.worst_usd is None and "not known without a price" in found.worst
    assert cost(offered=None, max_price=2).worst_usd == 48.0
    assert cost(offered=None, budget=7).worst_usd == 7
    idle = cost({"resources": {"gpus_per_node": 0}}, offered=None, price=0.5)
    assert idle.usd_per_hour is None and "that of a GPU" in idle.price


def test_elsewhere_a_price_in_the_profile_is_enough() -> None:
    job = Job.model_validate({"name": "a", "command": ["true"], "batch": {"global": 8}})
    box = {"name": "c", "scheduler": "slurm", "node": {"gpu": GPU}, "slurm": {"partition": "p"}}
    free = Cluster.model_validate(box)
    assert cost_of(job, free, make_plan(job, free)) is None
    paid = Cluster.model_validate({**box, "usd_per_gpu_hour": 2})
    found = cost_of(job, paid, make_plan(job, paid))
    assert found is not None and found.usd_per_hour == 2 and "resources.time is not set" in found.worst
    timed = Job.model_validate(
        {**job.model_dump(by_alias=True), "resources": {"time": "1h"}, "requeue": False}
    )
    found = cost_of(timed, paid, make_plan(timed, paid))
    assert found is not None and found.worst_usd == 2


def test_plan_and_submit_lead_with_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "250")
    for kind in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    (tmp_path / "job.yaml").write_text(
        "{name: a, command: ['true'], plan: {params: 1e9}, recipe: {optimizer: adamw, precision: bf16},"
        " batch: {global: 8}, steps: 100}"
    )
    verbs = (("plan", "job.yaml"), ("submit", "job.yaml", "--dry-run"))
    texts, data = [], []
    for verb in verbs:
        done = CliRunner().invoke(app, (*verb, "-c", "runpod-a6000"))
        assert done.exit_code == 0, done.output
        rows = (re.split("  +", line, maxsplit=1) for line in done.stdout.splitlines())
        texts.append({row[0]: row[1].strip() for row in rows if len(row) == 2})
        data.append(
            json.loads(CliRunner().invoke(app, (*verb, "-c", "runpod-a6000", "--json")).stdout)["cost"]
        )
    plan, submit = texts
    assert list(submit)[:4] == ["price", "predicted time", "predicted total", "worst case"]
    assert "0.49 USD/h" in submit["price"] and "0.49 USD/h" in plan["cost"]
    assert submit["worst case"].partition(":")[0] in plan["cost"]
    assert data[0] == data[1] and data[0]["usd_per_hour"] == 0.49 and data[0]["worst_usd"] == 0.49 * 24
