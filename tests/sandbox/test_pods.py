"""The sandbox over real HTTP: pods are processes, the contract is RunPod's, the bill is by the second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from launcher.schedulers.over_ssh.snapshot import take
from tests.lab import wait_for
from tests.sandbox.server import OPENAPI, Sandbox, body, launch, start

GPU = {"id": "NVIDIA RTX A5000", "count": 2}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    secret = {"RUNPOD_SECRET_token": "sesame", "AWS_PROFILE": "not for pods"}
    with start(tmp_path_factory.mktemp("runpod") / "sandbox", environ=secret) as sandbox:
        yield sandbox


def lines(sandbox: Sandbox, pod: str, until: str, **more: Any) -> list[tuple[str, dict[str, str]]]:
    """(event id, data) as they come, up to the line that holds `until`."""
    url = f"{sandbox.environ['LAUNCHER_RUNPOD_API']}/pods/{pod}/logs"
    headers = {"Authorization": f"Bearer {sandbox.environ['RUNPOD_API_KEY']}", **more.pop("headers", {})}
    found: list[tuple[str, dict[str, str]]] = []
    id = ""
    with httpx.stream("GET", url, headers=headers, timeout=240, **more) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("id: "):
                id = line[4:]
            elif line.startswith("data: "):
                found.append((id, json.loads(line[6:])))
                if until in found[-1][1]["line"]:
                    return found
    return found


def texts(found: list[tuple[str, dict[str, str]]]) -> list[str]:
    return [data["line"] for _, data in found]


def test_a_pod_runs_its_command_with_runpods_environment_and_nothing_of_ours(sandbox: Sandbox) -> None:
    args = "bash -c 'env | sort; pwd; echo \"it is\" \\$HOME >/workspace/told; echo end; sleep 1000'"
    env = {"MINE": "a b", "TOKEN": "{{ RUNPOD_SECRET_token }}"}
    pod = sandbox.create(args, env=env)
    assert pod["status"] == "PROVISIONING" and pod["cost"] == 0.06 and pod["env"] == env
    found = dict(line.partition("=")[::2] for line in texts(lines(sandbox, pod["id"], "end")))
    assert found["RUNPOD_POD_ID"] == pod["id"] and found["RUNPOD_DC_ID"] == "EU-RO-1"
    assert found["RUNPOD_VOLUME_ID"] == "sandbox" and found["RUNPOD_CPU_COUNT"] == "2"
    assert found["MINE"] == "a b" and found["TOKEN"] == "sesame"
    assert found["LAUNCHER_RUNPOD_API"] == sandbox.environ["LAUNCHER_RUNPOD_API"]
    assert "AWS_PROFILE" not in found and "RUNPOD_SECRET_token" not in found
    if sandbox.state()["isolated"]:
        assert (sandbox.volume / "told").read_text() == "it is $HOME\n"
        assert not Path("/workspace").exists() or not Path("/workspace/told").exists()
    running = sandbox.pod(pod["id"])
    assert running["status"] == "RUNNING" and running["startedAt"] and running["runtime"]["uptime"] >= 0
    assert sandbox.ask("GET", f"/pods/{pod['id']}", key=found["RUNPOD_API_KEY"]).json()["id"] == pod["id"]
    assert sandbox.ask("GET", "/pods", key=found["RUNPOD_API_KEY"]).status_code == 403
    other = sandbox.create()
    for method in ("GET", "DELETE"):
        assert sandbox.ask(method, f"/pods/{other['id']}", key=found["RUNPOD_API_KEY"]).status_code == 403
    assert sandbox.ask("DELETE", f"/pods/{pod['id']}", key=found["RUNPOD_API_KEY"]).status_code == 204
    assert sandbox.ask("GET", f"/pods/{pod['id']}", key=found["RUNPOD_API_KEY"]).status_code == 401
    assert sandbox.ask("DELETE", f"/pods/{other['id']}").status_code == 204
    assert sandbox.ask("DELETE", f"/pods/{other['id']}").status_code == 404


def test_a_command_that_returns_is_started_again_in_the_same_pod(sandbox: Sandbox) -> None:
    pod = sandbox.create("bash -c 'echo >>/tmp/starts; echo start $(wc -l </tmp/starts); exit 3'")
    found = texts(lines(sandbox, pod["id"], "start 3", params={"source": "container"}))
    assert found == ["start 1", "start 2", "start 3"]
    system = texts(lines(sandbox, pod["id"], "exit code", params={"source": "system"}))
    assert system[-1] == "container ended with exit code 3"
    assert sandbox.pod(pod["id"])["status"] == "RUNNING"
    sandbox.ask("DELETE", f"/pods/{pod['id']}")


def test_the_log_is_resumed_where_it_broke(sandbox: Sandbox) -> None:
    pod = sandbox.create("bash -c 'for i in {1..9}; do echo line $i; done; sleep 2; echo last; sleep 1000'")
    first = lines(sandbox, pod["id"], "line 4", params={"source": "container"})
    rest = lines(sandbox, pod["id"], "last", headers={"Last-Event-ID": first[-1][0]}, params={"tail": "1"})
    assert texts(first) + texts(rest) == [f"line {i}" for i in range(1, 10)] + ["last"]
    moment = rest[2][1]["ts"]
    assert texts(lines(sandbox, pod["id"], "last", params={"since": moment})) == texts(rest)[2:]
    assert texts(lines(sandbox, pod["id"], "last", params={"tail": "2"}))[-2:] == ["line 9", "last"]
    assert sandbox.ask("GET", f"/pods/{pod['id']}/logs?tail=5001").status_code == 422
    assert sandbox.ask("GET", f"/pods/{pod['id']}/logs?since=yesterday").status_code == 422
    with httpx.stream(
        "GET",
        f"{sandbox.environ['LAUNCHER_RUNPOD_API']}/pods/{pod['id']}/logs?tail=0",
        headers={"Authorization": f"Bearer {sandbox.environ['RUNPOD_API_KEY']}"},
    ) as open_ended:
        sandbox.ask("DELETE", f"/pods/{pod['id']}")
        assert "remove container" in open_ended.read().decode(), "the stream ends with its pod"


def test_stop_start_restart_and_what_is_not_allowed(sandbox: Sandbox) -> None:
    pod = sandbox.create("bash -c 'trap \"echo asked to end; exit\" TERM; echo up; sleep 1000 & wait'")["id"]
    lines(sandbox, pod, "up")

    def act(action: str) -> httpx.Response:
        return sandbox.ask("POST", f"/pods/{pod}/action", json={"action": action})

    assert act("start").status_code == 409 and act("jump").status_code == 422
    assert act("restart").status_code == 200
    wait_for(lambda: lines(sandbox, pod, "asked to end"), "SIGTERM")
    stopped = act("stop")
    assert stopped.status_code == 200
    found = sandbox.wait(pod, "EXITED")
    assert found["cost"] == 0.0 and found["actions"] == ["start", "terminate"] and found["runtime"] is None
    assert act("stop").status_code == 409
    assert act("start").json()["status"] == "PROVISIONING"
    sandbox.wait(pod, "RUNNING")
    assert act("terminate").status_code == 204
    assert sandbox.ask("GET", f"/pods/{pod}").status_code == 404


def test_nothing_of_a_pod_is_left_whatever_it_started(sandbox: Sandbox) -> None:
    hidden = 'setsid bash -c "trap : TERM HUP; while :; do sleep 0.1; done" & disown'
    pod = sandbox.create(f"bash -c 'trap : TERM; {hidden}; echo up; while :; do sleep 0.1; done'")["id"]
    lines(sandbox, pod, "up")
    assert len(sandbox.processes()) >= 2
    sandbox.ask("DELETE", f"/pods/{pod}")
    wait_for(lambda: not sandbox.processes(), "end of every process")


@pytest.mark.skipif(not OPENAPI.is_file(), reason="RunPod's OpenAPI document is not here (RUNPOD_OPENAPI)")
def test_what_breaks_runpods_contract_is_refused_with_every_fault(sandbox: Sandbox) -> None:
    answer = sandbox.ask("POST", "/pods", json={**body("x"), "gpuTypeIds": ["x"], "disk": "5"})
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
    told = " ".join(answer.json()["errors"])
    assert "gpuTypeIds" in told and "disk" in told and answer.json()["status"] == 422
    assert sandbox.ask("GET", "/pods?colour=red").status_code == 422
    assert sandbox.ask("GET", "/catalog/gpus?include=EVERYTHING").status_code == 422


def test_rules_that_no_schema_holds_are_refused_with_400(sandbox: Sandbox) -> None:
    for change, word in (
        ({"gpu": GPU}, "exactly one"),
        ({"cpu": {"id": "cpu3c", "vcpuCount": 6}}, "does not exist"),
        ({"mounts": {"network": [{"volumeId": "nix", "path": "/workspace"}]}}, "nix not found"),
        ({"dataCenterIds": ["US-TX-3"]}, "no longer any instances"),
        ({"env": {f"V{i}": "" for i in range(51)}}, "50"),
    ):
        answer = sandbox.ask("POST", "/pods", json={**body("x"), **change})
        assert answer.status_code == 400 and word in answer.json()["detail"], answer.text
    gpu = {**body("x"), "gpu": {**GPU, "allowedCudaVersions": ["11.8"]}}
    del gpu["cpu"]
    assert "no longer any instances" in sandbox.ask("POST", "/pods", json=gpu).json()["detail"]
    assert sandbox.ask("POST", "/pods", content=b"{").status_code == 400
    assert not sandbox.state()["live"]


def test_every_answer_tells_the_limits_and_a_wrong_key_is_401(sandbox: Sandbox) -> None:
    answer = sandbox.ask("GET", "/pods")
    assert answer.headers["RateLimit-Policy"].startswith('"minute";q=')
    assert "r=" in answer.headers["RateLimit"]
    for key in ("wrong", "wrong two", "rpa_pod_"):
        assert sandbox.ask("GET", "/pods", key=key).status_code == 401
    unsigned = httpx.get(sandbox.environ["LAUNCHER_RUNPOD_API"] + "/pods")
    assert unsigned.status_code == 401 and unsigned.json()["detail"] == "missing bearer token"
    assert sandbox.ask("GET", "//sandbox/state", key="wrong").status_code == 401


def test_the_catalogue_holds_prices_stock_and_places(sandbox: Sandbox) -> None:
    gpus = sandbox.ask("GET", "/catalog/gpus?include=AVAILABILITY&product=POD").json()["gpus"]
    one = next(gpu for gpu in gpus if gpu["id"] == GPU["id"])
    assert one["price"]["secure"] == 0.27 and one["dataCenters"][0]["availability"] == "HIGH"
    assert sandbox.ask("GET", "/catalog/gpus?include=AVAILABILITY").status_code == 400
    assert sandbox.ask("GET", f"/catalog/gpus/{GPU['id']}").json()["memory"] == 24
    assert sandbox.ask("GET", "/catalog/cpus/cpu3c").json()["vcpu"]["min"] == 2
    centres = sandbox.ask("GET", "/catalog/datacenters?include=GPU_AVAILABILITY,CPU_AVAILABILITY").json()
    assert {place["id"] for place in centres["dataCenters"]} >= {"EU-RO-1", "US-KS-2"}
    assert sandbox.ask("GET", "/catalog/datacenters/EU-RO-1").json()["region"] == "EUROPE"
    for path in ("/catalog/gpus/x", "/catalog/cpus/x", "/catalog/datacenters/x", "/network-volumes/x"):
        assert sandbox.ask("GET", path).status_code == 404


def test_volumes_are_made_and_removed_but_not_under_a_pod(sandbox: Sandbox) -> None:
    made = sandbox.ask("POST", "/network-volumes", json={"name": "v", "size": 10, "dataCenter": "US-KS-2"})
    assert made.status_code == 201
    id = made.json()["id"]
    pod = sandbox.create(mounts={"network": [{"volumeId": id, "path": "/data"}]})
    assert pod["dataCenterId"] == "US-KS-2"
    assert sandbox.ask("DELETE", f"/network-volumes/{id}").status_code == 409
    sandbox.ask("DELETE", f"/pods/{pod['id']}")
    assert sandbox.ask("DELETE", f"/network-volumes/{id}").status_code == 204
    assert [one["id"] for one in sandbox.ask("GET", "/network-volumes").json()["networkVolumes"]] == [
        "sandbox"
    ]


def test_a_cluster_gives_each_node_its_rank_and_ends_as_a_whole(sandbox: Sandbox) -> None:
    wanted = {
        "name": "two", "type": "TRAINING", "image": "x",
        "compute": {"gpuTypeId": GPU["id"], "gpuCountPerPod": 2, "podCount": 2},
        "args": "bash -c 'echo $NODE_RANK/$NUM_NODES $NODE_ADDR $PRIMARY_ADDR $WORLD_SIZE $RUNPOD_API_KEY"
        ' $(sh -c "echo \\$\\$"); sleep 99\'',
    }  # fmt: skip
    made = sandbox.ask("POST", "/clusters", json=wanted)
    assert made.status_code == 201 and made.json()["pods"]["total"] == 2, made.text
    cluster = made.json()["id"]
    pods = sandbox.ask("GET", f"/clusters/{cluster}/pods").json()["pods"]
    assert [pod["cluster"]["rank"] for pod in pods] == [0, 1]
    told = [
        texts(lines(sandbox, pod["id"], "rpa_pod", params={"source": "container"}))[0].split() for pod in pods
    ]
    assert [one[0] for one in told] == ["0/2", "1/2"] and [one[3] for one in told] == ["4", "4"]
    assert told[0][1] == told[0][2] == told[1][2] and told[1][1] == pods[1]["cluster"]["ip"]
    assert told[0][5] != told[1][5], "torchrun takes nodes with one address and one process id for one node"
    assert sandbox.ask("GET", "/pods").json()["pods"] == []
    assert len(sandbox.ask("GET", "/pods?includeClusterPods=true").json()["pods"]) == 2
    assert sandbox.ask("DELETE", f"/pods/{pods[0]['id']}").status_code == 409
    assert sandbox.ask("DELETE", f"/clusters/{cluster}", key=told[1][4]).status_code == 204
    assert sandbox.ask("GET", "/clusters").json() == {"clusters": []}
    assert sandbox.ask("GET", f"/clusters/{cluster}").status_code == 404
    wait_for(lambda: not sandbox.processes(), "end of every process")


def graphql(sandbox: Sandbox, query: str, **variables: Any) -> dict[str, Any]:
    answer = sandbox.ask("POST", "//graphql", json={"query": query, "variables": variables})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


SPOT = (
    "mutation ($input: PodRentInterruptableInput!) { podRentInterruptable(input: $input) { id costPerHr } }"
)
DEMAND = "mutation ($input: PodFindAndDeployOnDemandInput) { podFindAndDeployOnDemand(input: $input) { id } }"
WANTED = {
    "name": "spot", "imageName": "x", "gpuTypeId": GPU["id"], "gpuCount": 1, "cloudType": "SECURE",
    "dockerArgs": "bash -c 'trap \"echo asked; exit\" TERM; echo up; sleep 99 & wait'",
    "networkVolumeId": "sandbox", "volumeMountPath": "/workspace", "env": [{"key": "A", "value": "b"}],
}  # fmt: skip


def test_a_spot_pod_is_rented_by_graphql_and_taken_away(sandbox: Sandbox) -> None:
    low = graphql(sandbox, SPOT, input={**WANTED, "bidPerGpu": 0.01})
    assert "below the lowest" in low["errors"][0]["message"] and low["data"] is None
    wrong = graphql(sandbox, SPOT, input={**WANTED, "bidPerGpu": 0.2, "gpuNumber": 1})["errors"][0]
    assert wrong["extensions"]["code"] == "BAD_USER_INPUT" and "gpuNumber" in wrong["message"]
    assert (
        graphql(sandbox, "query { nothing }")["errors"][0]["extensions"]["code"]
        == "GRAPHQL_VALIDATION_FAILED"
    )
    made = graphql(sandbox, SPOT, input={**WANTED, "bidPerGpu": 0.2})["data"]["podRentInterruptable"]
    assert made["costPerHr"] == 0.2
    pod = sandbox.wait(made["id"], "RUNNING")
    assert pod["env"] == {"A": "b"} and pod["gpu"] == {"id": GPU["id"], "count": 1}
    lines(sandbox, made["id"], "up")
    sandbox.interrupt(made["id"])
    told = texts(lines(sandbox, made["id"], "asked"))
    assert told[-2:] == ["stop container: the spot instance was taken away", "asked"], "SIGTERM comes first"
    assert sandbox.pod(made["id"])["status"] == "EXITED"
    ended = graphql(sandbox, "mutation ($id: String!) { podTerminate(input: {podId: $id}) }", id=made["id"])
    assert ended == {"data": {"podTerminate": None}}
    assert sandbox.ask("GET", f"/pods/{made['id']}").status_code == 404


def test_the_service_itself_ends_a_pod_whose_time_is_over(sandbox: Sandbox) -> None:
    seconds, made = 1, dict[str, Any]()
    while not made.get("data"):  # on a busy machine the time may be over before the request is read
        soon = (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()
        made = graphql(sandbox, DEMAND, input={**WANTED, "terminateAfter": soon})
        assert made.get("data") or "passed" in made["errors"][0]["message"]
        seconds *= 2
    id = made["data"]["podFindAndDeployOnDemand"]["id"]
    wait_for(lambda: sandbox.ask("GET", f"/pods/{id}").status_code == 404, "end of the pod")
    assert (
        "passed" in graphql(sandbox, DEMAND, input={**WANTED, "terminateAfter": soon})["errors"][0]["message"]
    )


def test_a_pod_is_billed_by_the_second_and_the_bill_survives_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "sandbox"
    with start(folder) as first:
        price = first.create()["cost"]
        pod = first.state()["live"][0]["id"]
        first.wait(pod, "RUNNING")
        time.sleep(1.2)
        first.ask("DELETE", f"/pods/{pod}")
        wait_for(lambda: first.state()["gone"], "end")
        bill = first.ask("GET", f"/billing/pods?podId={pod}&bucketSize=hour").json()
        kept = first.create()["id"]
        first.wait(kept, "RUNNING")
    usd = bill["metadata"]["totals"]["totalAmount"]
    elapsed = round(usd * 3600 / price, 6)
    assert elapsed == int(elapsed) >= 2 and bill["metadata"]["totals"]["cpuAmount"] == usd
    assert bill["metadata"]["uniquePodCount"] == 1 and bill["records"][0]["podId"] == pod
    with start(folder) as again:
        assert again.environ["RUNPOD_API_KEY"] == first.environ["RUNPOD_API_KEY"], "keys stay good"
        later = again.ask("GET", "/billing/pods?lastN=2&bucketSize=hour").json()
        assert {one["podId"] for one in later["records"]} == {pod, kept}
        assert again.state()["live"] == [] and {one["id"] for one in again.state()["gone"]} == {pod, kept}


def test_without_namespaces_pods_are_kept_apart_and_ended_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "sandbox"
    nothing = {"PATH": str(tmp_path)}  # no unshare
    killed = launch(folder, environ=nothing)
    try:
        assert killed.state()["isolated"] is False
        loop = "trap : TERM; while :; do sleep .1; done"
        args = f"bash -c 'echo $$ >/tmp/mine; (setsid sleep 1000 &); echo up; {loop}'"
        first, second = killed.create(args)["id"], killed.create(args)["id"]
        for pod in (first, second):
            assert "up" in texts(lines(killed, pod, "up"))
            assert (folder / "pods" / pod / "disk" / "tmp" / "mine").exists()
        assert str(killed.volume) in (folder / "runpod-sandbox.yaml").read_text(), "in place of /workspace"
        killed.ask("DELETE", f"/pods/{first}")
        wait_for(lambda: not (folder / "pods" / first / "disk").exists(), "end of the pod")
        assert not killed.processes(first) and killed.processes(second)
    finally:
        killed.end(signal.SIGKILL)
    assert killed.processes(), "nothing but the next start can end them"
    with start(folder, environ=nothing):
        assert not killed.processes()


def test_a_server_that_is_killed_leaves_no_process_and_its_successor_closes_the_bill(tmp_path: Path) -> None:
    folder = tmp_path / "sandbox"
    killed = launch(folder)
    try:
        isolated = killed.state()["isolated"]
        pod = killed.create("bash -c 'setsid sleep 1000 & sleep 1000'")["id"]
        wait_for(lambda: len(killed.processes()) >= 2, "processes of the pod")
    finally:
        killed.end(signal.SIGKILL)
    if isolated and os.geteuid() == 0:
        wait_for(lambda: not killed.processes(), "end of every process, by the kernel alone")
    with start(folder) as again:
        assert not killed.processes()
        assert [one["id"] for one in again.state()["gone"]] == [pod]
        before = again.state()["usd"]
        time.sleep(1.1)
        assert 0 < again.state()["usd"] == before, "nothing is billed any more"


def test_a_folder_in_a_project_is_no_part_of_its_code(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "mine").mkdir(parents=True)
    for name in ("train.py", "mine/train.py"):
        (project / name).write_text("print(1)\n")
    with start(project / "box" / "sandbox") as sandbox:
        (sandbox.volume / "code.tar.gz").write_bytes(b"of an earlier submission")
        for _ in ("no repository", "a repository"):
            found = {entry.path for entry in take(project).entries}
            assert found == {"train.py", "mine/train.py", "box/sandbox.faults", "box/sandbox.log"}
            subprocess.run(["git", "init", "-q", str(project)], check=True)
    with start(project / "mine") as sandbox:
        assert not (sandbox.folder / ".gitignore").exists(), "a folder of somebody's own stays as it was"
