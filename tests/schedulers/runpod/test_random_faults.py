"""Random faults from a seed: whatever goes wrong, no pod is left, and no run is trained twice at a time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.cli.main import app
from tests.lab import PATIENCE, wait_for
from tests.sandbox.server import Sandbox, start

# Stands for `python -m launcher.supervise RUN_DIR ...` on the pod: begins, trains a while, says how it ended.
SUPERVISOR = """\
#!/bin/bash
[[ $2 == launcher.supervise ]] || exec python3 "$@"
run=$3
echo "begin $RUNPOD_POD_ID $(date +%s.%N)" >>"$run/trained"
say() { printf '%s' "$1" >"$run/.state.$$" && mv "$run/.state.$$" "$run/state.json"; }
trap 'echo "end $RUNPOD_POD_ID" >>"$run/trained"
  say "{\\"state\\": \\"interrupted\\", \\"failure\\": \\"preempted\\"}"; exit 75' TERM
say '{"state": "running"}'
for _ in {1..8}; do
  [[ -e $run/cancel ]] && break
  sleep 0.1
done
echo "end $RUNPOD_POD_ID" >>"$run/trained"
say '{"state": "succeeded", "failure": "succeeded"}'
"""
PROFILE: dict[str, Any] = {
    "name": "pods", "scheduler": "runpod", "container": {"image": "any"},
    "node": {"gpu": {"type": "A5000", "count": 1, "memory": "24GiB"}},
    "paths": {"python": "/workspace/supervisor"},
    "runpod": {
        "gpu_id": "NVIDIA RTX A5000", "cpu_id": "cpu3c", "vcpu": 2, "volume_id": "sandbox", "max_hours": 0.1,
        "data_centers": ["EU-RO-1"], "max_price": 0.5,
    },
}  # fmt: skip
JOB = {"name": "j", "batch": {"global": 8}, "command": ["true"], "recipe": {"sharding": "none"}}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with start(tmp_path_factory.mktemp("runpod") / "sandbox", "--restart", "0.05") as sandbox:
        (sandbox.volume / "supervisor").write_text(SUPERVISOR)
        (sandbox.volume / "supervisor").chmod(0o755)
        yield sandbox


@pytest.fixture
def cli(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CLI within this process: hundreds of verbs, and no interpreter to start for each."""
    if not sandbox.state()["isolated"]:
        pytest.skip("no mount namespaces here: /workspace of the pods would be this machine's")
    environ = {**sandbox.environ, "LAUNCHER_RUNPOD_PAUSE": "0.02"}
    for name in ("STATE", "CONFIG", "CACHE"):
        environ[f"XDG_{name}_HOME"] = str(tmp_path / name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()

    def cli(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, arguments)
        error = done.exception
        if error is not None and not isinstance(error, SystemExit):
            from launcher.cli.main import _exit_code

            assert _exit_code(error) is not None, (arguments, repr(error))
            return 1, str(error)
        return done.exit_code, done.output

    return cli


def faults(die: random.Random) -> dict[str, Any]:
    """Some of them, as often as they would be a bad day."""
    creation = "POST /v2/pods|POST /graphql"
    all_of_them = {
        "no-capacity": {"p": 0.5},
        "forbidden": {"p": 0.3},
        "rate-limit": {"p": 0.1, "value": 0},
        "server-error": {"p": 0.1},
        "lost-response": {"p": 0.6, "on": creation},
        "gateway-timeout": {"p": 0.5, "on": creation},
        "wrong-types": {"p": 0.3},
        "not-json": {"p": 0.2},
        "huge-body": {"p": 0.5, "value": 9, "times": 1, "on": creation},
        "redirect": {"p": 0.2, "on": creation},
        "slow-pull": {"p": 0.5, "value": 0.3},
        "pull-error": {"p": 0.3},
        "interrupt": {"p": 0.7, "value": 0.7},
        "price": {"p": 0.5, "value": 20},
        "unlisted": {"p": 0.7, "value": 0.2},
        "s3-error": {"p": 0.05},
    }
    chosen = die.sample(sorted(all_of_them), die.randint(1, 5))
    return {name: all_of_them[name] for name in chosen}


def one_sequence(seed: int, sandbox: Sandbox, cli: Any) -> dict[str, Any]:
    die = random.Random(seed)
    spot = die.random() < 0.4
    YAML().dump({**JOB, "resources": {"gpus_per_node": int(spot)}}, Path("job.yaml"))
    section = {**PROFILE["runpod"], **({"bid_per_gpu": 0.2} if spot else {})}
    YAML().dump({**PROFILE, "runpod": section}, Path("pods.yaml"))
    chosen = faults(die)
    before = {pod["id"] for pod in sandbox.state()["gone"]}
    sandbox.faults(**chosen)
    code, said = cli("submit", "job.yaml", "-c", "pods.yaml")
    told = f"seed {seed}, {sorted(chosen)}: {said}"
    for _ in range(die.randint(0, 3)):
        time.sleep(die.random() / 3)
        cli(*die.choice([("status",), ("cancel",), ("list",), ("resume",)]))
    # The day ends: what was started comes to its end, and what nobody needs is ended.
    sandbox.faults()
    begin, rounds = time.monotonic(), 0
    while live(sandbox):
        cli("list")
        cli("status")
        if time.monotonic() > begin + 4:  # the last layer
            rounds += 1
            cli("runpod", "leaks", "--end")
        assert time.monotonic() < begin + PATIENCE, f"pods are left: {live(sandbox)}; {told}"
        time.sleep(0.1)
    wait_for(lambda: all(pod["halted"] for pod in sandbox.state()["gone"]), "end of the processes")
    gone = {pod["id"]: pod for pod in sandbox.state()["gone"]}
    for file in (sandbox.volume / "runs").glob("*/trained"):
        at_it = ""
        for what, pod, *moment in map(str.split, file.read_text().splitlines()):
            if what == "end":
                at_it = ""
                continue
            # One that was killed could not say so.
            alone = at_it == "" or gone[at_it]["halted"] < float(moment[0])
            assert alone, f"{at_it} and {pod} train at once; {told}"
            at_it = pod
    made = sum(id not in before for id in gone)
    return {"seed": seed, "faults": sorted(chosen), "code": code, "pods": made, "leaks": rounds}


def live(sandbox: Sandbox) -> list[str]:
    return [f"{pod['name']} {pod['status']}" for pod in sandbox.state()["live"]]


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(200), marks=pytest.mark.thorough)], ids=["few", "two hundred"]
)
@pytest.mark.timeout(3600)
def test_no_pod_is_left_after_random_faults(seeds: range, sandbox: Sandbox, cli: Any) -> None:
    results = [one_sequence(seed, sandbox, cli) for seed in seeds]
    for one in results:
        print(json.dumps(one))
    assert not live(sandbox)
    wait_for(lambda: not sandbox.processes(), "end of every process")
    assert sum(one["pods"] for one in results) > 0 and any(one["code"] == 0 for one in results)
