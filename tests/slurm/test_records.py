"""Jobs as Slurm tells of them: answers that were recorded, each put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import pytest

from launcher.schedulers.login import Answer
from launcher.schedulers.slurm.records import JobRecord, duration, look_up, moment, queue_query, records
from launcher.schedulers.slurm.states import SLURM_STATES, meaning
from tests.slurm.recorded import answers


def of(name: str, job: str) -> JobRecord:
    record = records(answers(name)).get(job)
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("name", "job", "state", "failure"),
    [
        ("22.05.8-jobs", "81", "running", None),
        ("22.05.8-jobs", "82", "succeeded", "succeeded"),
        ("22.05.8-jobs", "83", "failed", "nccl-timeout"),  # exit code 12 of the supervisor
        ("22.05.8-jobs", "84", "failed", "unknown"),
        ("22.05.8-jobs", "85_3", "failed", "unknown"),
        ("22.05.8-jobs", "85_6", "submitted", None),
        ("22.05.8-jobs", "89", "cancelled", "cancelled"),
        ("22.05.8-timeout", "4", "interrupted", "time-limit"),
        ("22.05.8-ends", "103", "failed", "node-failed"),
        ("22.05.8-ends", "104", "submitted", None),
        ("22.05.8-no-accounting", "1", "failed", "unknown"),
        ("22.05.8-no-accounting", "2", "running", None),
    ],
)
def test_what_a_job_came_to(name: str, job: str, state: str, failure: str | None) -> None:
    meant = meaning(of(name, job))
    assert (meant.state, meant.failure) == (state, failure)


def test_a_record_holds_what_all_three_commands_know() -> None:
    assert of("22.05.8-few", "83") == JobRecord(
        id="83",
        state="FAILED",
        exit_code=12,
        partition="main",
        nodes="n1",
        submitted=datetime(2026, 11, 21, 23, 30, 48, tzinfo=timezone.utc),
        start=datetime(2026, 11, 21, 23, 30, 48, tzinfo=timezone.utc),
        end=datetime(2026, 11, 21, 23, 30, 48, tzinfo=timezone.utc),
        time_limit=3600,
        comment="exit 12",
        account="root",
        qos="normal",
        node_count=1,
        cpus=1,
        memory="100M",
    )


@pytest.mark.parametrize(
    ("job", "state", "code", "limit"),
    [
        ("101", "RUNNING", None, 3600),
        ("102", "RUNNING", None, 180),
        ("103", "CANCELLED", 0, float("inf")),
    ],
)
def test_jobs_of_older_and_newer_versions_without_accounting(
    job: str, state: str, code: int | None, limit: float
) -> None:
    record = of("other-jobs", job)
    assert (record.state, record.exit_code, record.time_limit) == (state, code, limit)
    assert records(answers("other-jobs")).accounting.startswith("this cluster keeps no accounting")


def test_a_name_or_comment_that_looks_like_slurms_fields_deceives_nobody() -> None:
    record = of("22.05.8-few", "88")
    assert (record.state, record.exit_code) == ("RUNNING", None)
    assert record.comment == "tricky Restarts=9 ExitCode=7:7"
    assert of("22.05.8-jobs", "82").comment == "well | done"


def test_a_killed_job_tells_its_signal() -> None:
    assert (of("22.05.8-jobs", "84").exit_code, of("22.05.8-jobs", "84").signal) == (0, 9)
    assert meaning(of("22.05.8-jobs", "84")).words == "was ended by SIGKILL"
    unopened = meaning(JobRecord(id="9", state="FAILED", exit_code=0, signal=53))
    assert "working directory or its output file is not there" in unopened.words


def test_an_unknown_job_is_no_trouble_and_no_record() -> None:
    found = records(answers("22.05.8-unknown"))
    assert found.get("999") is None and found.trouble == ""


def test_without_accounting_the_controller_and_scontrol_tell_all() -> None:
    found = records(answers("22.05.8-no-accounting"))
    assert found.controller == "" and found.accounting.startswith("this cluster keeps no accounting")
    assert of("22.05.8-no-accounting", "1").exit_code == 3


def test_accounting_that_is_down_is_told_and_hides_nothing_that_the_controller_knows() -> None:
    found = records(answers("22.05.8-accounting-down"))
    assert found.controller == "" and "Connection refused" in found.accounting
    assert {job.state for job in found.jobs.values()} == {"CANCELLED", "COMPLETED"}


def test_with_the_controller_down_accounting_still_answers_and_the_trouble_is_named() -> None:
    found = records(answers("22.05.8-controller-down"))
    assert "Unable to contact slurm controller (connect failure)" in found.controller
    assert meaning(found.jobs["103"]).failure == "node-failed"


def test_waiting_tasks_that_accounting_puts_into_one_line_are_told_apart() -> None:
    told = answers("22.05.8-jobs") | {"squeue": Answer(1, "", "Unable to contact slurm controller\n")}
    assert {id_ for id_ in records(told).jobs if id_.startswith("85_")} == {f"85_{task}" for task in range(7)}


def test_a_job_that_only_accounting_takes_for_alive_is_lost() -> None:
    told = answers("22.05.8-jobs") | {"squeue": Answer(0, "", "")}
    record = records(told).get("88")
    assert record is not None and meaning(record).state == "lost"


def test_slurm_that_is_not_installed_is_said() -> None:
    none = Answer(127, "", "env: 'squeue': No such file or directory\n")
    assert records({"squeue": none, "sacct": none}).controller == "there are no Slurm commands here"


def test_a_thousand_tasks_are_one_short_question() -> None:
    assert "--jobs=123" in queue_query([f"123_{task}" for task in range(1000)])["squeue"]


class Asked:
    """Recorded answers, and what was asked of them."""

    def __init__(self, name: str, **instead: Answer) -> None:
        self.answers, self.trips = answers(name) | instead, list[list[str]]()

    def __call__(self, questions: Mapping[str, Sequence[str]]) -> dict[str, Answer]:
        self.trips.append(sorted(questions))
        return {name: self.answers[name] for name in questions}


@pytest.mark.parametrize(
    ("job", "trips"),
    [
        ("81", [["squeue"]]),  # runs
        ("82", [["squeue"]]),  # has succeeded
        ("83", [["squeue"], ["sacct", "scontrol 83"]]),  # has failed: with which exit code?
        ("89", [["squeue"]]),  # has been cancelled by the user
        ("999", [["squeue"], ["sacct"]]),  # is not known to the controller
    ],
)
def test_accounting_is_asked_only_for_what_the_controller_does_not_tell(
    job: str, trips: list[list[str]]
) -> None:
    asked = Asked("22.05.8-jobs", **{"scontrol 83": answers("22.05.8-few")["scontrol 83"]})
    known = look_up(asked, [job], ["89"])
    assert asked.trips == trips
    if job == "83":
        assert known.jobs["83"].exit_code == 12


def test_a_job_beside_a_task_that_only_its_array_tells_of_stays_known() -> None:
    told = answers("22.05.8-jobs")["squeue"].out.splitlines()
    alone = Answer(0, "\n".join(line for line in told if line.startswith("81|")), "")
    array = Answer(0, "\n".join(line for line in told if line.startswith("85_")), "")
    asked = Asked("22.05.8-jobs", squeue=alone, **{"squeue of arrays": array, "sacct": Answer(124, "", "")})
    known = look_up(asked, ["81", "85_3"])
    assert asked.trips[1:] == [["sacct", "squeue of arrays"]]
    assert {job: one.state for job, one in known.jobs.items() if job in ("81", "85_3")} == {
        "81": "RUNNING",
        "85_3": "FAILED",
    }
    assert known.accounting == "Slurm's accounting gave no answer within 3 s"


# Of the manual pages of 20.11 to 25.11.
STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING"),
    *("DEADLINE", "EXPEDITING", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PENDING", "POWER_UP_NODE", "PREEMPTED", "RECONFIG_FAIL"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD"),
    *("REVOKED", "RUNNING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT"),
    *("STOPPED", "SUSPENDED", "TIMEOUT", "UPDATE_DB"),
)


@pytest.mark.parametrize(
    "state",
    STATES,
)
def test_every_state_of_every_version_has_a_meaning(state: str) -> None:
    assert state in SLURM_STATES
    assert meaning(JobRecord(id="1", state=state)).state in (
        *("submitted", "running", "stopping", "lost", "succeeded", "failed", "interrupted", "cancelled"),
    )


def test_a_state_that_is_newer_than_launcher_is_named() -> None:
    assert "BRAND_NEW" in meaning(JobRecord(id="1", state="BRAND_NEW")).words


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:05", 5),
        ("10:00", 600),
        ("1:00:00", 3600),
        ("2-00:00:00", 172800),
        ("1-12:00", 129600),
        ("90", 5400),
        ("00:00:01.250", 1),
        ("UNLIMITED", float("inf")),
        ("NOT_SET", None),
        ("Partition_Limit", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_times_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["N/A", "Unknown", "None", "NONE", ""])
def test_a_time_that_is_not_known(text: str) -> None:
    assert moment(text) is None
