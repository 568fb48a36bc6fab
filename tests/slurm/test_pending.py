"""Why a job waits: Slurm's own reasons, recorded, and every reason of its source."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from launcher.schedulers.slurm.pending import why_pending
from launcher.schedulers.slurm.reasons import REASONS
from launcher.schedulers.slurm.records import JobRecord, records
from launcher.schedulers.slurm.site import site
from tests.slurm.recorded import answers

NOW = datetime(2026, 11, 21, 23, 31, tzinfo=timezone.utc)


def why(name: str, job: str, where: str) -> str:
    record = records(answers(name)).get(job)
    assert record is not None
    return why_pending(record, site(answers(where)), NOW)


@pytest.mark.parametrize(
    ("name", "job", "said"),
    [
        ("22.05.8-jobs", "85_6", "its array runs no more tasks at the same time"),
        ("22.05.8-jobs", "91", "it is held; `scontrol release 91` lets it go on"),
        ("22.05.8-jobs", "92", "its earliest start time has not come yet; that is in 1h ("),
        ("22.05.8-jobs", "93", "(20m asked for, short allows 10m); submit it again with a shorter"),
        ("22.05.8-jobs", "94", "(4 asked for, main gives 3)"),
        ("22.05.8-jobs", "95", "waits for nodes to become free; Slurm plans to start it in 1h ("),
        ("22.05.8-jobs", "96", "jobs of higher priority are before it; Slurm plans to start it in 2h ("),
        ("22.05.8-ends", "104", "it was put back into the queue and is held; `scontrol release 104`"),
        ("22.05.8-preempted", "105", "(Slurm says: UnavailableNodes:n1)"),
    ],
)
def test_what_a_real_slurm_said(name: str, job: str, said: str) -> None:
    assert said in why(name, job, "22.05.8-site")


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("5", "its QOS limits GPUs or other GRES for each user (QOS normal: MaxTRESPU gres/gpu=2)"),
        ("6", "a job (QOS high: MaxTRES gres/gpu=1) [QOSMaxGRESPerJob]; this job can never start"),
        ("7", "(QOS high: GrpTRESRunMins cpu=100)"),
        ("8", "its QOS limits time for a job (QOS normal: MaxWall 01:00:00)"),
    ],
)
def test_the_limit_that_holds_a_job_back_is_named_with_its_value(job: str, said: str) -> None:
    assert said in why("22.05.8-limits", job, "22.05.8-limits")


@pytest.mark.parametrize("parent", ["lab", "root"])
def test_a_limit_of_an_account_above_ones_own_is_found(parent: str) -> None:
    here = site(answers("22.05.8-limits"))
    mine = {"User": "", "Account": "mine", "ParentName": parent}
    here = replace(here, associations=(*(here.associations or ()), mine))
    record = JobRecord(id="1", state="PENDING", reason="AssocGrpNodeLimit", account="mine")
    is_named = "(account lab: GrpTRES node=2)" in why_pending(record, here)
    assert is_named == (parent == "lab"), "an account beside ones own holds nothing back"


_WHAT = ("CPU", "Cpu", "Mem", "Memory", "Node", "GRES", "License", "Energy", "BB", "Billing", "Unknown")
# Every name that src/common/job_state_reason.c puts together, older spellings included.
LIMITS = [
    *(f"{who}Grp{what}{rest}" for who, what, rest in itertools.product(
        ("QOS", "Assoc"), _WHAT, ("", "Limit", "Minutes", "MinutesLimit", "RunMinutes", "RunMinutesLimit"))),
    *(f"{who}Grp{what}Limit" for who in ("QOS", "Assoc") for what in ("Jobs", "SubmitJobs", "Wall")),
    *(f"{who}Max{what}{per}" for who, what, per in itertools.product(
        ("QOS", "Assoc"), _WHAT, ("PerJob", "PerJobLimit", "PerNode", "MinutesPerJob", "MinutesPerJobLimit")
    )),
    *(f"QOSMax{what}PerUser" for what in _WHAT),
    *("QOSMaxCpuPerUserLimit", "QOSMaxJobsPerUserLimit", "QOSMaxNodePerUserLimit", "AssocMaxJobsLimit"),
    *("QOSMaxSubmitJobPerUserLimit", "AssocMaxSubmitJobLimit", "QOSMaxWallDurationPerJobLimit"),
    *("AssocMaxWallDurationPerJobLimit", "QOSMinCpuNotSatisfied"),
    *("MaxJobsPerAccount", "MaxSubmitJobsPerAccount"),
    *(f"QOSMin{what}" for what in _WHAT),
    *(f"Max{what}{rest}" for what, rest in itertools.product(
        _WHAT, ("PerAccount", "RunMinsPerAccount", "RunMinsPerUser"))),
]  # fmt: skip


def test_every_reason_has_words_and_an_advice() -> None:
    here = site(answers("22.05.8-limits"))
    for reason in (*REASONS, *LIMITS):
        record = JobRecord(id="7", state="PENDING", reason=reason, account="a", qos="q", partition="p")
        words = why_pending(record, here, NOW)
        assert "Slurm says" not in words and "{" not in words and ";" in words, reason


def test_a_reason_that_is_not_known_is_given_as_it_is() -> None:
    record = JobRecord(id="7", state="PENDING", reason="Brand_new,_and_odd")
    assert "Slurm says 'Brand new, and odd'" in why_pending(record)


def test_sentences_of_slurm_mean_the_same_with_blanks_and_underscores() -> None:
    said = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    record = JobRecord(id="7", state="PENDING", reason=said)
    assert why_pending(record) == why_pending(replace(record, reason=said.replace(" ", "_")))
    assert why_pending(record).startswith("nodes that it needs are down")
    reserved = JobRecord(id="7", state="PENDING", reason="ReqNodeNotAvail,_Reserved_for_maintenance")
    assert "(Slurm says: Reserved for maintenance)" in why_pending(reserved)


def test_an_estimate_that_has_passed_is_now() -> None:
    record = JobRecord(id="7", state="PENDING", reason="Resources", start=NOW - timedelta(minutes=3))
    assert "Slurm plans to start it now" in why_pending(record, None, NOW)
    begins = why_pending(replace(record, reason="BeginTime"), None, NOW)
    assert begins.startswith(
        "its earliest start time has not come yet; that is within a minute; nothing to do but"
    )
