"""A plan as plain data for other programs, with sizes in bytes and times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.memory.accuracy import known_errors
from launcher.planning.cost import cost_of
from launcher.planning.fastest_recipe import Candidate
from launcher.planning.questions import Answer, Comparison
from launcher.planning.zero_stages import Stages
from launcher.report.content import Page

if TYPE_CHECKING:
    from launcher.schedulers.base import Prepared


def as_data(page: Page) -> dict[str, Any]:
    """Return the output of `launcher plan --json`."""
    decision = page.decision
    measured = any(entry.measured_by == "launcher" for entry in known_errors())
    data: dict[str, Any] = {"job": page.job.name, "cluster": page.cluster.name, "measured_on_gpu": measured}
    if decision is None:
        data["refused"] = page.refusal
    else:
        estimate = decision.chosen.estimate
        cost = cost_of(page.job, page.cluster, decision.plan)
        data["cost"] = None if cost is None else cost.as_json()
        data |= decision.model_dump(mode="json", exclude={"plan": {"estimate"}})
        data["parameters"] = decision.parameters
        data["chosen"] = _candidate(decision.chosen)
        data["tokens_per_sample"] = page.tokens_per_sample
        data["fits"] = decision.room.misfit(estimate) is None
        data["rungs"] = [
            {**rung.model_dump(mode="json", exclude={"candidate"}), **_candidate(rung.candidate)}
            for rung in decision.rungs
        ]
    data["questions"] = [_comparison(one) for one in page.comparisons]
    if page.zero is not None:
        data["zero"] = _stages(page.zero)
    return data


def submitted_data(prepared: Prepared, warnings: Sequence[str], handle: str | None) -> dict[str, Any]:
    """Return the output of `submit --json`. `handle` is None if nothing was submitted."""
    request = prepared.request
    cost = cost_of(request.job, request.cluster, request.plan, prepared.offered)
    return {
        "run_id": request.run_id,
        "handle": handle,
        "cluster": request.cluster.name,
        "cost": None if cost is None else cost.as_json(),
        "plan": request.plan.model_dump(mode="json"),
        "warnings": list(warnings),
        "directory": prepared.run_dir,
        "files": [file.path for file in prepared.files],
        "command": list(prepared.command),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    time = candidate.time
    data = candidate.model_dump(mode="json")
    data["estimate"] |= {
        "needed": candidate.estimate.needed,
        "allocated": candidate.estimate.allocated,
        "host_per_node": candidate.estimate.host_per_node,
    }
    if time is not None:
        data["time"] |= {"total": time.total, "samples_per_second": time.samples_per_second}
    return data


def _stages(zero: Stages) -> dict[str, Any]:
    stages = [
        {
            **stage.model_dump(mode="json", exclude={"candidate"}),
            "total": stage.total,
            "in_the_paper": stage.in_the_paper,
            **(_candidate(stage.candidate) if stage.candidate is not None else {}),
        }
        for stage in zero.stages
    ]
    per_parameter = zero.per_parameter._asdict()
    return {"recipe": zero.recipe.model_dump(), "bytes_per_parameter": per_parameter, "stages": stages}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "question": comparison.question,
        "conclusion": comparison.conclusion,
        "answers": [_answer(answer) for answer in comparison.answers],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    chosen = answer.choice.chosen
    fields = {"label": answer.label, "fits": chosen is not None, "reason": answer.choice.reason}
    if chosen is None:
        return fields
    cost = {} if answer.hours is None else {"hours": answer.hours, "usd": answer.usd}
    return {**fields, **_candidate(chosen), **cost}
