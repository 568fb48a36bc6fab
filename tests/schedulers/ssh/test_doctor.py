"""The doctor on two hosts that share no folder, over real ssh: orders and answers are copied between them."""

from __future__ import annotations

import json

import pytest

from tests.schedulers.ssh.test_no_shared_folder import Apart
from tests.schedulers.ssh.test_no_shared_folder import lab as lab

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_hosts_that_share_no_folder_are_examined(lab: Apart) -> None:
    done = lab.cli("doctor", "-c", "both.yaml", "-N", "2", "--json")
    told = json.loads(done.stdout)
    print(done.stderr, json.dumps(told["findings"], indent=1))
    verdicts = {one["check"]: one["verdict"] for one in told["findings"] if one["verdict"] == "good"}
    assert {"answers", "ranks", "rendezvous-port", "all-reduce", "model-fsdp"} <= set(verdicts)
    assert "same-files" not in {one["check"] for one in told["findings"]}, "they have nothing in common"
    assert {one["node"] for one in told["measured"] if one["check"] == "host"} == {0, 1}
    run = lab.newest()
    assert lab.on_disk(run, 1).read_about()["apart"] is True
    assert not list(lab.folder.rglob(".doctor*"))
    again = lab.cli("doctor", "--show", run.id)
    assert again.returncode == done.returncode
    assert max(map(len, again.stdout.splitlines())) <= 80
