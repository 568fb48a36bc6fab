"""Faults: each does what it says, as often as it says, and the same way for the same seed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("starlette")

from launcher.sandbox.faults import KINDS, Dice, Fault, parse, read
from tests.lab import wait_for
from tests.sandbox.server import Sandbox, body, start


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with start(tmp_path_factory.mktemp("runpod") / "sandbox", "--seed", "7") as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: Sandbox) -> Iterator[Sandbox]:
    yield shared
    shared.faults()
    for pod in shared.state()["live"]:
        shared.ask("DELETE", f"/pods/{pod['id']}")


def names(sandbox: Sandbox) -> list[str]:
    return [pod["name"] for pod in sandbox.ask("GET", "/pods").json()["pods"]]


def test_faults_are_read_from_the_command_line_and_from_files() -> None:
    assert parse("slow-pull=0.5:20x3") == ("slow-pull", Fault(p=0.5, value=20, times=3))
    assert read({"price": 1, "rate-limit": {"p": 0.1, "on": "POST"}})["rate-limit"].on == "POST"
    for text in ("no-capacity", "nothing=1", "price=x"):
        with pytest.raises(ValueError, match="NAME is one of no-capacity"):
            parse(text)
    with pytest.raises(ValueError, match=r"price.p"):
        parse("price=2")
    with pytest.raises(ValueError, match=r"known are no-capacity"):
        read({"nothing": 1})
    with pytest.raises(ValueError, match=r"price.extra"):
        read({"price": {"p": 1, "extra": 1}})


def test_the_die_falls_the_same_way_whatever_falls_beside_it() -> None:
    faults = {"no-capacity": Fault(p=0.5), "price": Fault(p=0.5)}
    alone, mixed = Dice(3, faults), Dice(3, faults)
    one = [alone.happens("no-capacity") for _ in range(50)]
    two = []
    for _ in range(50):
        mixed.happens("price")
        two.append(mixed.happens("no-capacity"))
    assert one == two and 10 < one.count(None) < 40
    assert [Dice(4, faults).happens("no-capacity") for _ in range(1)] and Dice(3, faults).happens(
        "price", "x"
    ) in (None, 3)


def test_refusals_before_anything_is_done(sandbox: Sandbox) -> None:
    for fault, status in (
        ("no_capacity", 400), ("forbidden", 403), ("no_balance", 402), ("rate_limit", 429),
        ("server_error", 500), ("redirect", 307),
    ):  # fmt: skip
        sandbox.faults(**{fault: {"p": 1, "times": 1}})
        answer = sandbox.ask("POST", "/pods", json=body("sleep 9"))
        assert answer.status_code == status, fault
        assert status != 429 or answer.headers["Retry-After"] == "1"
        assert status == 307 or answer.json()["status"] == status
        assert sandbox.state()["live"] == [] and sandbox.state()["fell"] == {fault.replace("_", "-"): 1}
    assert sandbox.ask("POST", "/pods", json=body("sleep 9")).status_code == 201


def test_answers_that_are_lost_or_spoilt_after_the_pod_was_made(sandbox: Sandbox) -> None:
    for number, fault in enumerate(("gateway-timeout", "wrong-types", "not-json", "huge-body"), 1):
        sandbox.faults(**{fault: {"p": 1, "times": 1, "value": 1 if fault == "huge-body" else None}})
        answer = sandbox.ask("POST", "/pods", json=body("sleep 9"))
        assert len(sandbox.state()["live"]) == number
        if fault == "gateway-timeout":
            assert answer.status_code == 504
        elif fault == "wrong-types":
            assert answer.json()["id"] == 17
        elif fault == "not-json":
            assert answer.text.startswith("<html>")
        else:
            assert len(answer.content) > 1 << 20
    sandbox.faults(lost_response={"p": 1, "times": 1, "on": "^POST /v2/pods$"})
    assert len(names(sandbox)) == 4, "the fault is for creation only"
    with pytest.raises(httpx.RemoteProtocolError):
        sandbox.ask("POST", "/pods", json=body("sleep 9"))
    assert len(names(sandbox)) == 5


def test_a_pod_that_costs_more_is_not_listed_yet_or_has_no_image(sandbox: Sandbox) -> None:
    sandbox.faults(price=1, unlisted={"p": 1, "value": 5}, pull_error={"p": 1, "times": 1})
    made = sandbox.create()
    assert made["cost"] == pytest.approx(0.18)
    assert names(sandbox) == [] and sandbox.pod(made["id"])["id"] == made["id"]
    wait_for(lambda: names(sandbox) == ["test"], "the pod in the list")
    failed = sandbox.wait(made["id"], "ERROR")
    assert failed["cost"] == 0.0 and failed["actions"] == ["start", "terminate"]
    sandbox.faults(slow_pull={"p": 1, "value": 5}, slow_answer={"p": 1, "times": 1, "value": 0.5})
    begin = time.monotonic()
    slow = sandbox.create()
    assert time.monotonic() - begin > 0.5
    assert sandbox.pod(slow["id"])["status"] == "STARTING"
    sandbox.wait(slow["id"], "RUNNING")
    assert time.monotonic() - begin > 5


def test_only_spot_pods_are_taken_away(sandbox: Sandbox) -> None:
    sandbox.faults(interrupt={"p": 1, "value": 1})
    demand = sandbox.create()["id"]
    wanted = {
        "name": "spot", "imageName": "x", "gpuTypeId": "NVIDIA RTX A5000", "cloudType": "SECURE",
        "bidPerGpu": 0.2, "networkVolumeId": "sandbox",
        "dockerArgs": "bash -c 'trap exit TERM; while :; do sleep 0.1; done'",
    }  # fmt: skip
    query = "mutation ($i: PodRentInterruptableInput!) { podRentInterruptable(input: $i) { id } }"
    made = sandbox.ask("POST", "//graphql", json={"query": query, "variables": {"i": wanted}}).json()
    spot = made["data"]["podRentInterruptable"]["id"]
    sandbox.wait(spot, "EXITED")
    assert sandbox.pod(demand)["status"] == "RUNNING"


def test_a_client_that_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    with start(tmp_path / "sandbox", "--per-minute", "5") as sandbox:
        answers = [sandbox.ask("GET", "/pods") for _ in range(12)]  # a new minute may begin in between
        late = [answer for answer in answers if answer.status_code == 429]
        assert late and 1 <= int(late[0].headers["Retry-After"]) <= 60
        assert late[0].headers["RateLimit"].startswith('"minute";r=0')


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--fault", "nothing=1"], "NAME is one of"),
        (["--faults", "/no/such/file"], "no/such/file"),
        (["--openapi", __file__], "OpenAPI"),
    ],
)
def test_bad_options_are_one_clear_message(tmp_path: Path, options: list[str], told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "runpod", "sandbox", "--folder", str(tmp_path / "s"), *options],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith("launcher: ") and not (tmp_path / "s").exists()


def test_two_servers_share_neither_a_port_nor_a_folder(shared: Sandbox, tmp_path: Path) -> None:
    pod = shared.create()["id"]
    port = shared.environ["LAUNCHER_RUNPOD_API"].split(":")[-1].removesuffix("/v2")
    for options, told in (
        (["--folder", str(tmp_path), "--port", port], f"127.0.0.1:{port}: Address already in use"),
        (["--folder", str(shared.folder), "--port", "0"], f"a sandbox is running in {shared.folder}"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "launcher", "runpod", "sandbox", *options],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 2 and told in done.stderr, done.stderr
    assert shared.pod(pod)["status"] in ("STARTING", "RUNNING")
    shared.ask("DELETE", f"/pods/{pod}")


def test_every_kind_of_fault_is_told_in_one_line() -> None:
    assert all(text and "\n" not in text for text in KINDS.values())
