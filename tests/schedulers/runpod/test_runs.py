"""Submitting and following on the sandbox: one pod for one submission, ended by whatever way it goes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.api.prepare import Limits
from launcher.api.resubmission import prepared_again
from launcher.api.resume import resume
from launcher.cli.main import _exit_code, app
from launcher.planning.plan import PlanRefusedError
from launcher.report.event_lines import Story
from launcher.rundir.files import replace_json
from launcher.rundir.find import find_run
from launcher.rundir.time import now
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.lookup import scheduler_of
from launcher.schedulers.lookup import statuses as statuses_of
from launcher.schedulers.runpod.errors import ApiError
from launcher.schedulers.runpod.lifecycle import why_leaked
from launcher.schedulers.runpod.poller import evidence_of
from launcher.spec.events import Requeued, SecondEnded, Submitted, Submitting
from tests.lab import wait_for
from tests.schedulers.runpod.http_server import Reply, Served
from tests.schedulers.runpod.runs import A5000, A6000, Lab


def test_a_run_is_priced_submitted_followed_and_removed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "hf_canary_value_9137")
    (lab.folder / "code" / ".env").write_text("CANARY=hf_canary_value_9137\n")
    ready = lab.prepare(limits=Limits(budget=0.05), job={"secrets": ["CANARY"]})
    assert any("not sent with the code" in line and ": .env; " in line for line in ready.warnings)
    # 2 vCPUs at 0.03 USD and 10 GB of disk; the budget gives less than the profile's hour.
    assert any(
        "rents CPU pod, SECURE, EU-RO-1, stock HIGH: 0.061 USD/h; at most 0.814 h" in w
        for w in ready.warnings
    )
    run = lab.submit(ready)
    handle = lab.handle(run)
    assert handle.startswith("runpod:box:") and lab.scheduler.where(run).endswith(f"/workspace/runs/{run.id}")
    assert run.path.parent.stat().st_mode & 0o777 == 0o700, "copies are for us alone"
    lab.until(run, "running")
    assert lab.there(run).stat().st_mode & 0o777 == 0o700
    (pod,) = lab.pods(run)
    assert pod["env"]["LAUNCHER_SUBMISSION"] == "1" and int(pod["env"]["LAUNCHER_MAX_SECONDS"]) < 3600
    lab.go(run)
    assert lab.until(run, "succeeded").exit_code == 0
    lab.no_pods(run)
    assert b"secret 20" in lab.scheduler.logs(run, 0), "the pod had the secret's value"
    submitted = next(event for event in run.read_events() if isinstance(event, Submitted))
    assert submitted.usd_per_hour == 0.06
    assert [one.state for one in statuses_of([run])] == ["succeeded"]
    for folder in (run.path, lab.there(run), lab.folder / "state"):
        for file in folder.rglob("*"):
            if file.is_file():
                text = file.read_bytes()
                assert (
                    b"hf_canary" not in text and lab.sandbox.environ["RUNPOD_API_KEY"].encode() not in text
                ), file
    big = lab.there(run) / "checkpoints" / "step-00000001" / "rank.bin"
    big.parent.mkdir(parents=True)
    big.write_bytes(bytes(range(256)) * 40_000)  # more than one answer brings
    assert lab.look(run).checkpoint_step == 1
    assert lab.scheduler.copy(run).download(lab.folder / "all") > 10_000_000
    copied = lab.folder / "all" / "checkpoints" / "step-00000001" / "rank.bin"
    assert copied.read_bytes() == big.read_bytes()
    assert lab.scheduler.copy(run).download(lab.folder / "all") == 0
    with pytest.raises(SchedulerError, match="has succeeded"):
        resume(run)
    lab.scheduler.remove([run])
    assert not run.path.exists() and not [p for p in lab.there(run).rglob("*") if p.is_file()]


def test_what_is_shown_leaves_out_what_is_packed_into_a_script_and_the_files_do_not(lab: Lab) -> None:
    (lab.folder / "code" / "train.py").write_text(random.Random(7).randbytes(9000).hex())
    ready = lab.prepare()
    job = ("job.yaml", "-c", "box.yaml")
    for verb in (("submit", *job, "--dry-run"), ("render", *job)):
        said = CliRunner().invoke(app, verb).output
        assert re.search(r"<left out here: the job's code as tar\.gz, \d+\.?\d* KiB in base64>", said)
        assert re.search(r"echo <left out here: on-pod\.sh, \d+\.?\d* KiB in base64> \| base64 -d", said)
        assert "put 'run.json' '644' <left out here: run.json, " in said
        assert not re.search(r"[A-Za-z0-9+/=]{200,}", said)
    assert CliRunner().invoke(app, ("render", *job, "-o", "out")).exit_code == 0
    for file in ready.files:
        written = (lab.folder / "out" / "scripts" / file.path).read_text()
        assert "left out here" not in written
        assert (max(map(len, written.split())) > 9000) == (file.path != "start.sh")


@pytest.mark.parametrize("fault", ["lost_response", "gateway_timeout"])
def test_a_lost_answer_makes_no_second_pod(lab: Lab, fault: str) -> None:
    ready = lab.prepare()
    lab.sandbox.faults(
        **{fault: {"p": 1, "times": 1, "on": "POST /(v2/pods|graphql)$"}, "unlisted": {"p": 1, "value": 0.1}}
    )
    run = lab.submit(ready)
    handle = lab.handle(run)
    (pod,) = lab.pods(run)
    assert handle.endswith(pod["id"])
    lab.go(run)
    lab.until(run, "succeeded")
    lab.no_pods(run)
    assert lab.bill(run) == 1


def test_where_nobody_tells_the_pod_is_found_by_its_name_later(lab: Lab) -> None:
    ready = lab.prepare()
    lab.sandbox.faults(
        lost_response={"p": 1, "times": 1, "on": "POST /(v2/pods|graphql)$"},
        server_error={"p": 1, "on": "GET /v2/pods$"},
    )
    with pytest.raises(
        UnclearError, match="it is unknown whether RunPod has created launcher-tiny"
    ) as caught:
        lab.submit(ready)
    lab.sandbox.faults()
    run = find_run(ready.request.run_id)
    assert f"`launcher status {run.id}` looks for its pod again" in str(caught.value)
    assert _exit_code(caught.value) == 5
    found = lab.until(run, "running")
    (pod,) = lab.pods(run)
    assert found.handle.endswith(pod["id"]) and scheduler_of(run) is lab.scheduler


def test_a_pod_that_is_billed_above_the_limit_is_ended_and_the_next_gpu_is_rented(lab: Lab) -> None:
    ready = lab.prepare(gpu=True, limits=Limits(max_price=0.6), other_gpus={A6000: "47.4GiB"})
    assert [line.split(":")[0] for line in ready.warnings if "1 x" in line] == [
        f"rents 1 x {A5000}, SECURE, EU-RO-1, stock HIGH",
        f"else 1 x {A6000}, SECURE, EU-RO-1, stock MEDIUM",
    ]
    # A pod that begins finds no GPU here, and ends at once.
    lab.sandbox.faults(price={"p": 1, "times": 1}, slow_pull={"p": 1, "value": 60})
    run = lab.submit(ready)
    (pod,) = lab.pods(run)
    assert pod["gpu"]["id"] == A6000 and lab.bill(run) == 2
    assert run.read_about().cluster.node.gpu.type == A6000, "the plan is the one for that GPU"
    assert json.loads((lab.there(run) / "run.json").read_text())["cluster"]["runpod"]["gpu_id"] == A6000


def test_a_gpu_on_which_the_job_does_not_fit_is_not_even_asked_for(lab: Lab) -> None:
    job = {"plan": {"params": 3e9}}
    gpus = {A6000: "47.4GiB", "NVIDIA A100-SXM4-80GB": "79.1GiB"}
    ready = lab.prepare(gpu=True, job=job, other_gpus=gpus)
    assert [one.gpu_id for one in (ready, *ready.others)] == ["NVIDIA A100-SXM4-80GB"]
    told = [line for line in ready.warnings if " x " in line]
    assert len(told) == 1 and told[0].startswith("rents 1 x NVIDIA A100-SXM4-80GB")
    with pytest.raises(PlanRefusedError):
        lab.prepare(gpu=True, job=job)


TASK = {"task": "nowhere:Task", "command": None, "steps": 1}
HELD = {"plan": {"params": 2e9}, "recipe": {"offload": "cpu", "sharding": "fsdp"}}


@pytest.mark.parametrize(
    ("job", "server_limit", "words"),
    [
        (
            TASK,
            True,
            f"{A5000}: it is unknown whether the job fits: run `launcher plan JOB -c CLUSTER` once",
        ),
        (HELD, False, r"keeps in host memory [\d.]+ GiB per node, and `node.memory` is not set"),
        (
            {"resources": {"memory_per_node": "60GiB"}},
            False,
            r"resources.memory_per_node asks for 60 GiB per node, and `node.memory` is not set",
        ),
    ],
    ids=["no traces", "host memory", "host memory of a command"],
)
def test_a_gpu_of_which_nobody_knows_whether_the_job_fits_is_rented_on_demand_only(
    lab: Lab, job: dict[str, Any], server_limit: bool, words: str
) -> None:
    ready = lab.prepare(gpu=True, job=job, other_gpus={A6000: "47.4GiB"}, server_limit=server_limit)
    assert not [line for line in ready.warnings if line.startswith("rents")]
    with pytest.raises(SchedulerError, match=words) as caught:
        lab.scheduler.check(ready)
    assert str(caught.value).count("--unplanned") == 2, "both GPUs"
    asked = lab.prepare(gpu=True, job=job, limits=Limits(unplanned=True), server_limit=server_limit)
    assert [line for line in asked.warnings if line.startswith(f"rents 1 x {A5000}")]
    lab.scheduler.check(asked)


def test_a_host_without_the_memory_that_the_plan_offloads_to_is_not_rented(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {**HELD, "plan": {"params": 1e9}}
    ready = lab.prepare(gpu=True, job=job, other_gpus={A6000: "47.4GiB"})
    assert ready.request.plan.estimate is not None
    needed = math.ceil(ready.request.plan.estimate.host_per_node / 10**9)
    assert 25 < needed < 50, "more than a host of an A5000 has in the sandbox, and less than one of an A6000"
    (first, second) = (line for line in ready.warnings if " x " in line)
    assert first.startswith(f"rents 1 x {A5000} with at least {needed} GB of host memory, SECURE")
    assert second.startswith(f"else 1 x {A6000} with at least {needed} GB of host memory, SECURE")
    run = lab.submit(ready)
    (pod,) = lab.pods(run)
    assert pod["gpu"]["id"] == A6000
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    lab.scheduler.resume(run, None)
    assert f"rents 1 x {A6000} with at least {needed} GB of host memory" in capsys.readouterr().err


def test_a_run_whose_plan_is_damaged_is_rented_again_without_a_predicted_time(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lab.submit(lab.prepare(gpu=True))
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    run.plan.write_text('{"recipe": 1}')
    lab.scheduler.resume(run, None)
    assert re.search(rf"(?m)^rents 1 x {A5000}, SECURE, .* USD/h; at most", capsys.readouterr().err)


def test_memory_that_the_job_asks_for_is_asked_of_runpod(lab: Lab) -> None:
    ready = lab.prepare(gpu=True, job={"resources": {"memory_per_node": "60GB"}})
    with pytest.raises(SchedulerError, match=r"at least 60 GB of host memory.*no longer any instances"):
        lab.submit(ready)


def test_a_run_that_was_rented_on_demand_is_resumed_so_and_not_on_a_profile_that_does_not_say_it(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = lab.prepare(gpu=True, job=HELD, limits=Limits(unplanned=True, budget=3), server_limit=False)
    run = lab.submit(ready)
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    with pytest.raises(SchedulerError, match=r"nothing is rented: .*--unplanned"):
        lab.scheduler.resume(run, prepared_again(run, [], str(lab.profile(gpu=True, server_limit=False))))
    lab.scheduler.resume(run, prepared_again(run, ["env.NEW=1"], None))
    lab.until(run, "running")
    said = capsys.readouterr().err
    assert re.search(rf"(?m)^rents 1 x {A5000}, .* USD/h; at most", said)
    assert "of 3.00 USD of the budget" in said


def test_a_pause_that_runpod_asks_for_is_kept(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"title": "Too many requests", "detail": "Too many requests"}
    server = Served(lambda _: Reply(429, problem, {"Retry-After": "3600"}))
    monkeypatch.setenv("LAUNCHER_RUNPOD_API", server.url)
    ready = lab.prepare()
    words = r"429: Too many requests; RunPod asks for a pause of 3600 s: try again after that$"
    with pytest.raises(ApiError, match=words):
        lab.scheduler.check(ready)
    server.close()
    assert len(server.asked) == 1


def test_community_is_not_rented_and_the_reason_is_told(lab: Lab) -> None:
    told = lab.prepare(clouds=["SECURE", "COMMUNITY"]).warnings
    assert "not rented: COMMUNITY: every run needs a network volume" in "\n".join(told)
    with pytest.raises(SchedulerError, match="COMMUNITY: every run needs"):
        lab.submit(lab.prepare(clouds=["COMMUNITY"]))


def test_a_run_is_resumed_with_another_job_on_its_volume(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    lab.no_pods(run)
    again = prepared_again(run, ["env.NEW=1"], None)
    (lab.folder / "code" / "train.py").write_text("print(2)\n")
    lab.scheduler.resume(run, again)
    lab.until(run, "running")
    scripts = lab.there(run) / "plans" / "000" / "scripts"
    assert "NEW" in (scripts / "start.sh").read_text()
    lab.go(run)
    lab.until(run, "succeeded")
    assert lab.scheduler.copy(run).volume.id == "sandbox"


def test_what_is_too_dear_or_has_no_room_leaves_nothing_behind(lab: Lab) -> None:
    with pytest.raises(SchedulerError, match=r"0\.\d+ USD/h is above the 0\.1 of max_price"):
        lab.submit(lab.prepare(gpu=True, limits=Limits(max_price=0.1)))
    with pytest.raises(SchedulerError, match=r"budget pays for \d+s, and launcher rents for at least 10m"):
        lab.submit(lab.prepare(limits=Limits(budget=0.001)))
    ready = lab.prepare(gpu=True, other_gpus={A6000: "47.4GiB"})
    for fault, words in {
        "no_capacity": "no longer any instances",
        "no_balance": "add credit",
        "forbidden": "is denied",
    }.items():
        lab.sandbox.faults(**{fault: 1})
        with pytest.raises(SchedulerError, match=words) as caught:
            lab.submit(ready)
        assert len(re.findall(r"^1 x NVIDIA .*: RunPod: ", str(caught.value), re.M)) == (
            1 if fault == "no_balance" else 2
        )
    assert not lab.sandbox.state()["live"]
    assert not list((lab.folder / "state").rglob("run.json"))
    runs = lab.sandbox.volume / "runs" / ready.request.run_id
    assert not [p for p in runs.rglob("*") if p.is_file()]


def test_a_volume_that_is_not_there_and_one_that_cannot_be_read_are_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SchedulerError, match="no network volume nowhere"):
        lab.submit(lab.prepare(volume_id="nowhere"))
    with pytest.raises(SchedulerError, match="put your network volume's id into the profile"):
        lab.submit(lab.prepare(volume_id="CHANGE-ME"))
    with pytest.raises(SchedulerError, match="the results are lost with the pod"):
        lab.submit(lab.prepare(volume_id=None))
    with pytest.raises(SchedulerError, match="is in EU-RO-1, so its pods must be too"):
        lab.submit(lab.prepare(data_centers=["US-KS-2"]))
    monkeypatch.delenv("RUNPOD_S3_ACCESS_KEY")
    with pytest.raises(SchedulerError, match="no key for the S3 API"):
        lab.submit(lab.prepare())
    assert not lab.sandbox.state()["live"]


def test_a_pod_that_has_not_begun_is_cancelled_by_ending_it_and_a_run_by_asking_it(lab: Lab) -> None:
    lab.sandbox.faults(slow_pull={"p": 1, "value": 30, "times": 1})
    run = lab.submit(lab.prepare())
    assert "is STARTING (CPU, SECURE, EU-RO-1" in lab.until(run, "submitted").reason or lab.pods(run)
    lab.scheduler.cancel(run)
    assert lab.look(run).state == "cancelled"
    lab.no_pods(run)
    with pytest.raises(SchedulerError, match="is not running: cancelled"):
        lab.scheduler.cancel(run)
    lab.scheduler.resume(run)
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    assert lab.until(run, "cancelled").exit_code == 18
    lab.no_pods(run)


def test_a_pod_that_somebody_ended_is_a_lost_run_that_can_be_resumed(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    handle = lab.handle(run)
    lab.until(run, "running")
    lab.sandbox.ask("DELETE", handle.replace("runpod:box:", "/pods/"))
    lost = lab.until(run, "lost", "failed", "interrupted")
    if lost.state == "lost":
        assert "is gone before its run was over" in lost.reason
    lab.scheduler.resume(run)
    again = lab.handle(run)
    assert again != handle
    lab.until(run, "running")
    lab.go(run)
    lab.until(run, "succeeded")
    lab.no_pods(run)
    assert [e.submission for e in run.read_events() if isinstance(e, Submitting)] == [1, 2]


def test_an_interruptible_pod_that_is_taken_away_is_replaced_by_who_looks(lab: Lab) -> None:
    run = lab.submit(lab.prepare(gpu=True, bid_per_gpu=0.2))
    handle = lab.handle(run)
    lab.until(run, "running")
    lab.sandbox.interrupt(handle.rpartition(":")[2])
    wait_for(lambda: lab.look(run).handle != handle, "another pod")
    events = run.read_events()
    (requeued,) = [event for event in events if isinstance(event, Requeued)]
    assert (requeued.reason, requeued.gpu) == ("preempted", A5000)
    assert f"[launcher] another pod: {A5000} in EU-RO-1, 0.200 USD/h" in Story(run).news()
    lab.until(run, "running")
    lab.go(run)
    lab.until(run, "succeeded")
    lab.no_pods(run)
    assert lab.bill(run) == 2


def test_without_room_for_another_pod_the_run_waits_for_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lab.submit(lab.prepare(gpu=True, bid_per_gpu=0.2))
    handle = lab.handle(run)
    lab.until(run, "running")
    lab.sandbox.faults(no_capacity={"p": 1, "times": 2})
    lab.sandbox.interrupt(handle.rpartition(":")[2])
    wait_for(lambda: "waits for a pod" in lab.look(run).reason, "it waits")
    assert statuses_of([run])[0].state == "submitted" and not lab.pods(run), "looking at a list rents nothing"
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")


def test_with_a_budget_that_is_spent_no_other_pod_is_waited_for(lab: Lab) -> None:
    run = lab.submit(lab.prepare(gpu=True, bid_per_gpu=0.2, limits=Limits(budget=1)))
    handle = lab.handle(run)
    lab.until(run, "running")
    about = run.read_about().as_json()
    about["cluster"]["runpod"]["budget"] = 0.001
    replace_json(run.path / "run.json", about)
    lab.sandbox.interrupt(handle.rpartition(":")[2])
    wait_for(lambda: re.search(r"of the budget pays for \d+s,", lab.look(run).reason), "it gives up")
    assert lab.look(run).state == "interrupted" and not lab.pods(run)


def test_a_second_pod_of_the_same_submission_ends_itself(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    handle = lab.handle(run)
    lab.until(run, "running")
    (pod,) = lab.pods(run)
    keep = {name: pod[name] for name in ("name", "image", "args", "env", "mounts", "disk")}
    twin = lab.sandbox.ask("POST", "/pods", json={**keep, "cpu": {"id": "cpu3c", "vcpuCount": 2}}).json()
    wait_for(lambda: [one["id"] for one in lab.pods(run)] == [pod["id"]], "the twin ends")
    lab.look(run)
    event = next(event for event in run.read_events() if isinstance(event, SecondEnded))
    assert (event.as_json()["pod"], event.handle) == (twin["id"], handle)
    assert lab.look(run).state == "running"


def test_a_pod_whose_limit_runpod_does_not_keep_runs_like_any_other(lab: Lab) -> None:
    run = lab.submit(lab.prepare(gpu=True, server_limit=False))
    lab.until(run, "running")
    lab.go(run)
    lab.until(run, "succeeded")
    lab.no_pods(run)


def crash(lab: Lab) -> None:
    """The container of the only pod, which RunPod starts again."""
    for process in lab.sandbox.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_a_pod_that_crashes_again_and_again_is_ended(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    (pod,) = lab.pods(run)
    starts = lab.there(run) / f"pod-{pod['id']}.starts"
    for number in range(1, 5):
        wait_for(lambda n=number: lines(starts) == n and lab.sandbox.processes(), "another start")
        crash(lab)
    lab.no_pods(run)
    found = lab.look(run)
    assert (found.state, found.failure) == ("failed", "unknown") and "crashed 4 times" in found.reason
    assert lab.bill(run) == 1


@pytest.mark.slow
def test_a_limit_is_kept_through_crashes(lab: Lab) -> None:
    run = lab.submit(lab.prepare(limits=Limits(max_hours=6.5 / 3600), server_limit=False))
    began = time.monotonic()
    for _ in range(2):
        lab.until(run, "running")
        time.sleep(2.5)
        crash(lab)
    lab.no_pods(run)
    assert time.monotonic() - began < 10
    found = lab.look(run)
    assert (found.state, found.failure) in {("interrupted", "time-limit"), ("failed", "time-limit")}


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_leaked_pods_are_found_and_only_those_are_ended(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    from launcher.cli.runpod import leaks

    run = lab.submit(lab.prepare())
    handle = lab.handle(run)
    lab.until(run, "running")
    leaked = lab.sandbox.create(name=f"launcher-{run.id}-7")
    stranger = lab.sandbox.create(name="launcher-of-another-machine-1")
    other = lab.sandbox.create(name="somebody-elses")
    with pytest.raises(SystemExit) as ended:
        leaks(None, end=False, json=True)
    told = {one["path"]: one for one in json.loads(capsys.readouterr().out)}
    assert ended.value.code == 1
    assert told[f"/pods/{leaked['id']}"]["why"].startswith("its run is in pods/")
    assert told[f"/pods/{stranger['id']}"]["why"] is None and not told[f"/pods/{stranger['id']}"]["known"]
    assert f"/pods/{other['id']}" not in told
    with pytest.raises(SystemExit):
        leaks([stranger["id"]], end=True, json=False)
    left = {pod["id"] for pod in lab.sandbox.state()["live"]}
    assert left == {handle.rpartition(":")[2], other["id"]}
    replace_json(run.state, {"state": "succeeded", "time": now()})
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        leaks(None, end=False, json=False)
    assert ended.value.code == 0 and "is ending, as its run has" in capsys.readouterr().out


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled_is_changed_before_the_run_goes_on(lab: Lab) -> None:
    lab.sandbox.faults(pull_error={"p": 1, "times": 1})
    run = lab.submit(lab.prepare())
    failed = lab.until(run, "failed")
    assert f"`launcher resume {run.id} --set image=NAME`" in failed.reason and failed.failure == "unknown"
    said = " ".join(CliRunner().invoke(app, ("status", run.id)).output.split())
    assert f"next see the reason; then launcher resume {run.id}" in said
    lab.scheduler.resume(run, prepared_again(run, ["image=sandbox/other"], None))
    lab.until(run, "running")
    assert [pod["image"] for pod in lab.pods(run)] == ["sandbox/other"]


def test_several_nodes_are_a_cluster_that_begins_and_ends_together(lab: Lab) -> None:
    job = {"resources": {"nodes": 2}}
    ready = lab.prepare(gpu=True, job=job)
    assert ready.command == ("POST", "/v2/clusters")
    run = lab.submit(ready)
    handle = lab.handle(run)
    assert handle.startswith("runpod:box:cluster/")
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    lab.sandbox.ask("DELETE", handle.replace("runpod:box:cluster/", "/clusters/"))


def test_the_log_is_streamed_until_the_run_ends(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    lines = b""
    for line in lab.scheduler.stream(run):
        lines += line
        if b"supervisor 0" in line:
            lab.go(run)
    assert b"container: [launcher] supervisor 0 of none begins" in lines, lines.decode()
    assert b"the run ended with exit code 0" in lines


@pytest.mark.slow
def test_a_damaged_state_on_the_volume_is_told_and_neither_believed_nor_a_leak(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    lab.until(run, "running")
    (pod,) = lab.pods(run)
    good = (lab.there(run) / "state.json").read_bytes()
    runner = CliRunner()
    for damaged in ('{"state": 5, "time": []}', '{"state": "failed", "reason": {}}', '["failed"]', "nothing"):
        (lab.there(run) / "state.json").write_text(damaged)
        status = lab.look(run)
        assert status.state == "running" and "is not a valid state of a run" in status.reason
        for verb in (["status", run.id], ["list"]):
            done = runner.invoke(app, verb, catch_exceptions=False)
            assert done.exit_code == 0 and "running" in done.output, done.output
    assert why_leaked(evidence_of(run), f"/pods/{pod['id']}", "RUNNING") is None
    (lab.there(run) / "state.json").write_bytes(good)
    lab.go(run)
    lab.until(run, "succeeded")
