"""The doctor on RunPod, on the sandbox: a pod is rented for it, examined, and given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.places import runpod

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_pod_is_examined(tmp_path: Path) -> None:
    with runpod(tmp_path) as place:
        lab = place.lab
        lab.script("import nosuchmodule\n")
        job = lab.job(command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": 2})
        done = lab.cli("doctor", "-c", place.profile, "--job", str(job), "--json")
        print(done.stderr, done.stdout)
        told = json.loads(done.stdout)
        verdicts = {one["check"]: one["verdict"] for one in told["findings"]}
        good = {check for check, verdict in verdicts.items() if verdict == "good"}
        assert {"answers", "ranks", "all-reduce", "model-ddp", "model-fsdp", "job-files"} <= good
        assert verdicts["job-imports"] == "broken" and done.returncode == 1
        run = lab.newest()
        again = lab.cli("doctor", "--show", run.id)
        assert again.returncode == 1 and max(map(len, again.stdout.splitlines())) <= 80
        assert not list(place.there(run).path.rglob(".doctor*"))
