"""The pod's script against a loopback server: it unpacks, supervises, and always ends the pod."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher.planning.plan import make_plan
from launcher.render.quote import RenderError
from launcher.render.values import PodCode, Target
from launcher.schedulers.base import Request
from launcher.schedulers.over_ssh import snapshot
from launcher.schedulers.runpod.request import pack
from launcher.schedulers.runpod.scheduler import RunPodScheduler
from launcher.schedulers.runpod.scripts import added_at_creation
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from tests.lab import PATIENCE, wait_for
from tests.render import stubs
from tests.render.run import notes, render_run

CLUSTER = {
    "name": "pods",
    "scheduler": "runpod",
    "max_nodes": 4,
    "node": {"gpu": {"type": "RTX A5000", "count": 2, "memory": "24GiB"}},
    "container": {"image": "repo/image:tag"},
    "runpod": {"gpu_id": "NVIDIA RTX A5000", "volume_id": "vol", "max_hours": 1},
}
NASTY = "it's $(touch PWNED)\n`id` \\ é\n"


class Api:
    """Answers in the order given, the last one for ever; remembers requests."""

    def __init__(self, *answers: tuple[str, int, str]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, str]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                api.requests.append((self.command, self.path, self.headers.get("Authorization", "")))
                method, status, body = api.answers[0] if len(api.answers) == 1 else api.answers.pop(0)
                assert method == self.command
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


class Pod:
    """A rendered on-pod.sh that runs in a folder which stands for the volume."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stub = stubs.make(folder / "stubs")
        self.run_dir = folder / "vol ume" / "runs" / "r1"
        self.process: subprocess.Popen[bytes] | None = None
        self.apis: list[Api] = []
        # Pauses pass quickly; the script is the same.
        (self.stub.bin / "sleep").write_text(
            '#!/bin/bash\necho "$1" >>"$STUB_OUT.sleeps"\n'
            'if (($1 > 1000)); then exec /bin/sleep "$1"; fi\nexec /bin/sleep 0.05\n'
        )
        (self.stub.bin / "sleep").chmod(0o755)

    def target(self, nodes: int = 1, cluster: dict[str, object] | None = None, **fields: object) -> Target:
        job = Job.model_validate({"name": "j", "batch": {"global": 8}, "command": ["true"], **fields})
        return Target(
            job=job,
            cluster=Cluster.model_validate({**CLUSTER, **(cluster or {})}),
            run_id="r1",
            run_dir=str(self.run_dir),
            workdir=str(self.folder),
            python=str(self.stub.python),
            nodes=nodes,
            ranks_per_node=2,
            carried={"run.json": NASTY, "attempts/000/recipe.json": "{}"},
            secrets_given=True,
        )

    def start(self, api: Api, target: Target, /, **env: str) -> None:
        script = self.folder / "on-pod.sh"
        script.write_text(next(file.text for file in render_run(target) if file.path == "on-pod.sh"))
        self.apis.append(api)
        pod = {"RUNPOD_POD_ID": "pod1", "RUNPOD_API_KEY": "key-1", "LAUNCHER_RUNPOD_API": api.url}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(script)],
                env=self.stub.env(**{**pod, **env}),
                start_new_session=True,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while text not in (log := (self.folder / "log").read_text()):
            assert time.monotonic() < deadline, log
            assert self.process is not None and self.process.poll() is None, "the script returned: " + log
            time.sleep(0.02)
        return log

    def end(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for api in self.apis:
            api.server.shutdown()
            api.server.server_close()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    pod.end()


def path_for(pod: Pod, client: str) -> dict[str, str]:
    """The pod's PATH, without curl if it has to ask with Python."""
    if client == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    if client == "curl":
        return {}
    names = "bash base64 cat chmod date env grep mkdir mv rm sed tail tee timeout tr"
    for name in names.split():
        if not (pod.stub.bin / name).exists():
            (pod.stub.bin / name).symlink_to(shutil.which(name) or name)
    return {"PATH": str(pod.stub.bin)}


@pytest.mark.parametrize("client", ["curl", "python"])
def test_it_unpacks_supervises_ends_the_pod_and_never_returns(pod: Pod, client: str) -> None:
    path = path_for(pod, client)
    api = Api(("DELETE", 500, "oops"), ("DELETE", 429, ""), ("DELETE", 204, ""))
    pod.start(api, pod.target(), STUB_EXIT="7", **path)
    log = pod.wait_for("the pod is ending")
    assert api.requests == [("DELETE", "/pods/pod1", "Bearer key-1")] * 3
    assert "the run ended with exit code 7" in log
    assert "RunPod answered '500'" in log and "key-1" not in log
    assert (pod.run_dir / "run.json").read_text() == NASTY
    assert os.access(pod.run_dir / "scripts" / "start.sh", os.X_OK)
    argv = [b"-m", b"launcher.supervise", str(pod.run_dir).encode()]
    assert pod.stub.python_argv() == [*argv, b"--stop-file", str(pod.run_dir / "pod-pod1.stop").encode()]
    assert not list(pod.folder.rglob("PWNED"))
    time.sleep(0.3)
    assert pod.process is not None and pod.process.poll() is None
    assert len(api.requests) == 3


def test_a_pod_that_is_started_again_after_its_end_does_not_train_again(pod: Pod) -> None:
    pod.start(Api(("DELETE", 204, "")), pod.target())
    pod.wait_for("the pod is ending")
    pod.end()
    pod.stub.out.unlink()
    pod.start(Api(("DELETE", 404, "")), pod.target())
    pod.wait_for("was started again")
    pod.wait_for("the pod is ending")
    assert not pod.stub.out.exists()


def test_a_pod_without_the_jobs_code_says_so_once_and_ends(pod: Pod) -> None:
    missing = str(pod.folder / "it's $(not) there")
    pod.start(Api(("DELETE", 204, "")), replace(pod.target(), workdir=missing))
    log = pod.wait_for("the pod is ending")
    assert log.count(f"or into the image), in {missing}\n") == 1
    assert "the run ended with exit code 78" in log
    assert not pod.stub.out.exists()


def test_a_job_without_code_of_its_own_starts_in_the_run_directory(pod: Pod) -> None:
    target = replace(pod.target(), workdir=str(pod.run_dir))
    pod.start(Api(("DELETE", 204, "")), target)
    assert "exit code 0" in pod.wait_for("the pod is ending")
    assert not any("code" in note for note in notes(target))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "/workspace/.launcher/code/"),
        ({"workdir": "src"}, "/workspace/.launcher/code/"),
        ({"workdir": "/opt/code"}, "/opt/code"),
        ({"command": None, "steps": 1, "task": "my.gpt:GPT"}, "/workspace/.launcher/code/"),
        ({"command": None, "steps": 1, "task": "launcher.tasks.gpt:PydocGPT"}, "/workspace/runs/r1"),
    ],
)
def test_the_jobs_code_goes_to_the_pod(tmp_path: Path, fields: dict[str, object], expected: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("1")
    fields = {
        "name": "j",
        "batch": {"global": 8},
        "command": ["true"],
        "resources": {"gpus_per_node": 2},
        **fields,
    }
    job, cluster = Job.model_validate(fields), Cluster.model_validate(CLUSTER)
    request = Request(
        job=job,
        job_file=tmp_path / "job.yaml",
        cluster=cluster,
        plan=make_plan(job, cluster),
        run_id="r1",
        runs_root=Path("/unused"),
        project_dir=Path("/unused"),
    )
    prepared = RunPodScheduler().prepare(request)
    assert prepared.target.workdir.startswith(expected)
    assert prepared.about.workdir == prepared.target.workdir
    assert (prepared.target.code is not None) == expected.endswith("/code/")
    own = [text for text in prepared.warnings if "must be on the pod" in text]
    assert bool(own) == (expected == "/opt/code")
    # What is too large for the arguments of a command goes to the volume.
    (tmp_path / "src" / "data").write_bytes(os.urandom(100_000))
    if expected.endswith("/code/"):
        large = RunPodScheduler().prepare(request)
        assert large.archive is not None and large.target.code == PodCode(large.target.workdir[-20:], None)


@pytest.mark.parametrize("inline", [True, False])
def test_the_code_is_unpacked_once_for_all_runs(pod: Pod, inline: bool) -> None:
    source = pod.folder / "source"
    source.mkdir()
    (source / "it's a file").write_text("content")
    (source / "link").symlink_to("it's a file")
    taken = snapshot.take(source)
    packed = pack(taken)
    assert packed == pack(taken)
    code = pod.folder / "vol ume" / "code" / "abc"
    if not inline:
        code.parent.mkdir(parents=True)
        (code.parent / "abc.tar.gz").write_bytes(packed)
    target = replace(pod.target(), workdir=str(code), code=PodCode("abc", packed if inline else None))
    pod.start(Api(("DELETE", 204, "")), target)
    assert "exit code 0" in pod.wait_for("the pod is ending")
    assert (code / "link").read_text() == "content"
    assert sorted(path.name for path in code.parent.iterdir() if path.name != "abc.tar.gz") == ["abc"]


def test_a_second_pod_of_one_submission_ends_itself_and_leaves_the_run_alone(pod: Pod) -> None:
    pod.run_dir.mkdir(parents=True)
    (pod.run_dir / "runpod-submission-1").write_text("other\n")
    pod.start(Api(("DELETE", 204, "")), pod.target())
    log = pod.wait_for("the pod is ending")
    assert "other has this run" in log and not pod.stub.out.exists()
    event = json.loads((pod.run_dir / "events.jsonl").read_text())
    assert (event["event"], event["pod"], event["handle"]) == ("twin", "pod1", "runpod:pods:other")
    assert not (pod.run_dir / "state.json").exists() and not (pod.run_dir / "scripts").exists()


def test_a_pod_of_an_earlier_submission_ends_itself(pod: Pod) -> None:
    pod.run_dir.mkdir(parents=True)
    (pod.run_dir / "runpod-submission-1").write_text("pod1\n")
    (pod.run_dir / "runpod-submission-2").write_text("newer\n")
    pod.start(Api(("DELETE", 204, "")), pod.target())
    assert "newer has this run" in pod.wait_for("the pod is ending")
    assert not pod.stub.out.exists()


def test_where_no_supervisor_came_the_script_says_why_the_run_failed(pod: Pod) -> None:
    # A log that is written late is read whole all the same.
    (pod.stub.bin / "tee").write_text(f'#!/bin/bash\n/bin/sleep 0.5\nexec {shutil.which("tee")} "$@"\n')
    (pod.stub.bin / "tee").chmod(0o755)
    pod.start(Api(("DELETE", 204, "")), pod.target(cluster={"setup": ["false"]}))
    pod.wait_for("the pod is ending")
    state = json.loads((pod.run_dir / "state.json").read_text())
    assert (state["state"], state["failure"]) == ("failed", "unknown")
    assert state["reason"] == "a setup line of the cluster profile failed with exit code 1 (exit code 78)"
    assert json.loads((pod.run_dir / "events.jsonl").read_text())["event"] == "finished"


def test_what_the_run_went_on_writing_is_kept_when_the_pod_starts_anew(pod: Pod) -> None:
    (pod.run_dir / "attempts" / "000").mkdir(parents=True)
    (pod.run_dir / "attempts" / "000" / "recipe.json").write_text("lower")
    pod.start(Api(("DELETE", 204, "")), pod.target())
    pod.wait_for("the pod is ending")
    assert (pod.run_dir / "attempts" / "000" / "recipe.json").read_text() == "lower"


def test_an_interpreter_that_is_missing_still_ends_the_pod_and_is_the_reason(pod: Pod) -> None:
    pod.run_dir.mkdir(parents=True)
    (pod.run_dir / "pod-node-0.log").write_text("[launcher] attempt 0: cancelled by the user\n")
    pod.start(Api(("DELETE", 204, "")), replace(pod.target(), python="/no/python"))
    assert "exit code 127" in pod.wait_for("the pod is ending")
    reason = json.loads((pod.run_dir / "state.json").read_text())["reason"]
    assert reason.endswith("/no/python: No such file or directory (exit code 127)")


def test_a_failing_setup_line_still_ends_the_pod(pod: Pod) -> None:
    pod.start(Api(("DELETE", 204, "")), pod.target(cluster={"setup": ["false"]}))
    log = pod.wait_for("the pod is ending")
    assert "setup line of the cluster profile failed with exit code 1" in log
    assert not pod.stub.out.exists()


@pytest.mark.parametrize(
    ("limit", "signals", "said"),
    [
        # `sleep` is short below 1000 s: the run is asked to stop before its end comes.
        ("600", "told: time-limit", "exit code 0"),
        ("3600", "SIGTERM", "stopped by runpod.max_hours"),
    ],
)
def test_the_limit_of_hours_asks_the_run_to_stop_and_then_ends_it(
    pod: Pod, limit: str, signals: str, said: str
) -> None:
    # A stub of `timeout`: the clock of the real one rings as soon as there is a supervisor, or never.
    rings = (
        '(until [[ -e $STUB_OUT ]]; do /bin/sleep 0.05; done; kill -ALRM "$$") & ' if limit == "3600" else ""
    )
    (pod.stub.bin / "timeout").write_text(
        f'#!/bin/bash\n[[ $4 == {limit} ]] || exit 99\n{rings}exec {shutil.which("timeout")} "$@"\n'
    )
    (pod.stub.bin / "timeout").chmod(0o755)
    pod.start(Api(("DELETE", 204, "")), pod.target(), STUB_MODE="wait", LAUNCHER_MAX_SECONDS=limit)
    assert said in pod.wait_for("the pod is ending")
    assert Path(f"{pod.stub.out}.signals").read_text() == signals


def test_a_limit_counts_from_the_first_start_of_the_pod(pod: Pod) -> None:
    deadline, stop = pod.run_dir / "pod-pod1.deadline", pod.run_dir / "pod-pod1.stop"
    began = int(time.time())
    pod.start(Api(("DELETE", 204, "")), pod.target(), STUB_MODE="wait", LAUNCHER_MAX_SECONDS="3600")
    wait_for(pod.stub.out.exists, "a supervisor")
    pod.end()
    assert began + 3600 <= int(deadline.read_text()) <= time.time() + 3600
    pod.stub.out.unlink()
    # As after an hour of crashes, the last of them in the time for a checkpoint.
    deadline.write_text(f"{began - 1}\n")
    stop.write_text("time-limit\n")
    api = Api(("DELETE", 204, ""))
    pod.start(api, pod.target(), STUB_MODE="wait", LAUNCHER_MAX_SECONDS="3600")
    pod.wait_for("the pod is ending")
    state = json.loads((pod.run_dir / "state.json").read_text())
    assert (state["state"], state["failure"]) == ("failed", "time-limit") and "max_hours" in state["reason"]
    assert not pod.stub.out.exists() and len(api.requests) == 1
    assert stop.read_text() == "time-limit\n" and deadline.read_text() == f"{began - 1}\n"


@pytest.mark.parametrize("client", ["curl", "python"])
def test_the_limit_of_a_pod_whose_clock_is_hours_ahead_counts_by_runpods(pod: Pod, client: str) -> None:
    now = '+%s) echo "$(($(/bin/date +%s) + 7200))"'
    (pod.stub.bin / "date").write_text(f'#!/bin/sh\ncase $* in {now} ;; *) exec /bin/date "$@" ;; esac\n')
    (pod.stub.bin / "date").chmod(0o755)
    latest = int(time.time()) + 1800
    api = Api(("GET", 200, "{}"), ("DELETE", 204, ""))
    limits = {"LAUNCHER_DEADLINE": str(latest), "LAUNCHER_MAX_SECONDS": "3600"}
    pod.start(api, pod.target(), STUB_MODE="wait", **limits, **path_for(pod, client))
    wait_for(pod.stub.out.exists, "a supervisor")
    end = int((pod.run_dir / "pod-pod1.deadline").read_text())
    assert latest - 60 <= end - 7200 <= latest, "by its own clock"


def test_a_pod_that_cannot_count_its_starts_ends_itself(pod: Pod) -> None:
    """Otherwise one that is killed again and again on a full volume is billed until its time is over."""
    pod.run_dir.mkdir(parents=True)
    (pod.run_dir / "pod-pod1.starts").symlink_to("/dev/full")
    pod.start(Api(("DELETE", 204, "")), pod.target())
    assert "is the network volume full?" in pod.wait_for("the pod is ending")
    assert json.loads((pod.run_dir / "state.json").read_text())["failure"] == "disk-full"
    assert not pod.stub.out.exists()


def test_a_pod_that_was_told_to_stop_is_told_again_after_a_restart(pod: Pod) -> None:
    pod.run_dir.mkdir(parents=True)
    (pod.run_dir / "pod-pod1.stop").write_text("preempted\n")
    pod.start(Api(("DELETE", 204, "")), pod.target(), STUB_MODE="wait", LAUNCHER_MAX_SECONDS="36000")
    pod.wait_for("the pod is ending")
    assert Path(f"{pod.stub.out}.signals").read_text() == "told: preempted"


def test_term_to_the_pod_reaches_the_supervisor(pod: Pod) -> None:
    pod.start(Api(("DELETE", 204, "")), pod.target(), STUB_MODE="wait-for-signal", STUB_EXIT="5")
    wait_for(pod.stub.out.exists, "a supervisor")
    assert pod.process is not None
    pod.process.send_signal(signal.SIGTERM)
    assert "exit code 5" in pod.wait_for("the pod is ending")
    assert Path(f"{pod.stub.out}.signals").read_text() == "SIGTERM told: preempted"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_pods_of_a_cluster_end_with_the_cluster(pod: Pod, rank: str) -> None:
    body = json.dumps({"id": "pod1", "cluster": {"rank": 0, "id": "cl-7", "ip": "10.0.0.1"}}, indent=1)
    api = Api(("GET", 200, body), ("DELETE", 409, "{}"), ("GET", 200, body), ("DELETE", 204, ""))
    pod.start(api, pod.target(nodes=2), NODE_RANK=rank, PRIMARY_ADDR="10.0.0.1")
    pod.wait_for("the pod is ending")
    assert [request[:2] for request in api.requests] == [
        *[
            ("GET", "/pods/pod1"),
            ("DELETE", "/pods/pod1"),
            ("GET", "/pods/pod1"),
            ("DELETE", "/clusters/cl-7"),
        ]
    ]
    argv = b" ".join(pod.stub.python_argv()).decode()
    assert f"--nodes 2 --node-rank {rank} --rendezvous 10.0.0.1 --port-base 61000 --stop-file" in argv
    sleeps = Path(f"{pod.stub.out}.sleeps").read_text().split()
    assert {"0": "30", "1": "900"}[rank] in sleeps, "the first node gives the others time to finish"
    assert (pod.run_dir / "runpod-submission-1").read_text() == "cl-7\n"


def test_the_pods_of_a_resumed_cluster_do_not_take_what_earlier_ones_agreed_on_for_theirs(pod: Pod) -> None:
    """RunPod may give the first pod of each cluster the same address."""
    body = json.dumps({"id": "pod1", "cluster": {"rank": 0, "id": "cl-8", "ip": "10.0.0.1"}})
    api = Api(("GET", 200, body), ("DELETE", 204, ""))
    env = {"NODE_RANK": "0", "PRIMARY_ADDR": "10.0.0.1", "LAUNCHER_SUBMISSION": "2"}
    pod.start(api, pod.target(nodes=2), **env)
    pod.wait_for("the pod is ending")
    assert b"--rendezvous 10.0.0.1 --port-base 61017" in b" ".join(pod.stub.python_argv())


def test_a_pod_of_a_cluster_asks_again_which_cluster_it_belongs_to(pod: Pod) -> None:
    body = json.dumps({"id": "pod1", "cluster": {"rank": 1, "id": "cl-7", "ip": "10.0.0.2"}})
    pod.run_dir.mkdir(parents=True)
    (pod.run_dir / "runpod-submission-1").write_text("cl-7\n")  # by the first node
    api = Api(("GET", 500, ""), ("GET", 429, ""), ("GET", 200, body), ("DELETE", 204, ""))
    pod.start(api, pod.target(nodes=2), NODE_RANK="1", PRIMARY_ADDR="10.0.0.1")
    assert "the run ended with exit code 0" in pod.wait_for("the pod is ending")


def test_a_cluster_without_its_addresses_is_refused_and_ended(pod: Pod) -> None:
    pod.start(Api(*[("GET", 404, "")] * 7, ("DELETE", 204, "")), pod.target(nodes=2))
    assert "RunPod gave no PRIMARY_ADDR" in pod.wait_for("the pod is ending")
    assert not pod.stub.out.exists()


def request(target: Target) -> dict[str, object]:
    text = next(file.text for file in render_run(target) if file.path.startswith("create-"))
    body = json.loads(text)
    assert isinstance(body, dict)
    return body


def test_secrets_enter_the_request_by_reference_only(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-value")
    target = pod.target(secrets=["HF_TOKEN", {"name": "WANDB", "runpod": "wandb_key"}])
    assert request(target)["env"] == {
        "LAUNCHER_RUN_ID": "r1",
        "LAUNCHER_SUBMISSION": "1",
        "LAUNCHER_MAX_SECONDS": "3600",
        "WANDB": "{{ RUNPOD_SECRET_wandb_key }}",
    }
    assert [secret.name for secret in added_at_creation(target)] == ["HF_TOKEN"]
    assert any("HF_TOKEN is added when the request is sent" in note for note in notes(target))
    assert not any("hf-value" in file.text for file in render_run(target))


def test_what_runpod_cannot_do_is_refused(pod: Pod) -> None:
    many = [f"S{number}" for number in range(50)]
    with pytest.raises(RenderError, match="54 variables"):
        render_run(pod.target(secrets=many))
    without = {"runpod": {**CLUSTER["runpod"], "volume_id": None}}  # type: ignore[dict-item]
    with pytest.raises(RenderError, match=r"several nodes need runpod\.volume_id"):
        render_run(pod.target(nodes=2, cluster=without))
    assert any("is lost with it" in note for note in notes(pod.target(cluster=without)))
    with pytest.raises(RenderError, match="private registry"):
        render_run(pod.target(nodes=2, cluster={"runpod": {**CLUSTER["runpod"], "registry_id": "x"}}))  # type: ignore[dict-item]
    with pytest.raises(RenderError, match="at most 120000 fit"):
        render_run(pod.target(command=["x" * 120_000]))
    with pytest.raises(RenderError, match="not an image reference"):
        render_run(pod.target(image="a b; rm"))
