"""Plans with tensor and pipeline parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.planning.decide import Decider
from launcher.planning.declared import DeclaredParams
from launcher.planning.plan import NotEstimatedError
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job

GPU = {"type": "NVIDIA A100-SXM4-80GB", "count": 8, "memory": "79.1GiB"}
EIGHT = Cluster.model_validate({"name": "eight", "scheduler": "local", "node": {"gpu": GPU, "cpus": 64}})


def job(**recipe: Any) -> Job:
    fields = {"name": "parallel", "task": "a:B", "batch": {"global": 8}, "steps": 1, "recipe": recipe}
    return Job.model_validate(fields)


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_without_a_trace_no_part_of_a_model_is_said_to_fit(name: str) -> None:
    with pytest.raises(NotEstimatedError, match="not estimated, because the step cannot be traced"):
        Decider(job(**{name: 2}), EIGHT, DeclaredParams(1000)).decide()
