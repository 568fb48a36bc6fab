"""A request to stop that does not arrive, over real ssh and through the real CLI."""

from __future__ import annotations

import pytest

from tests.lab import wait_for
from tests.schedulers.ssh.hosts import Laptop
from tests.schedulers.ssh.test_runs import waiting

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_request_that_could_not_be_sent_is_not_kept_and_one_that_may_have_been_is_said_to(
    laptop: Laptop,
) -> None:
    run = waiting(laptop, 1, "one.yaml")
    there, host = laptop.on_disk(run), laptop.hosts[0]
    host.sshd.stop()
    said = laptop.said("cancel", run.id, code=4)
    assert "cannot log in to tensor01" in said
    assert f"{run.id} was not asked to stop and keeps running: cancel it again" in " ".join(said.split())
    host.sshd.start()
    assert "running" in laptop.said("list") and laptop.status(run)["state"] == "running"
    assert not run.cancel.exists() and not there.cancel.exists()
    shell, cut = host.sshd.shell.read_text(), host.folder / "cut"
    cut.touch()
    done_and_cut = f'if [ -e {cut} ]; then sh -c "$SSH_ORIGINAL_COMMAND" >/dev/null; kill -9 $PPID; fi'
    host.sshd.login_shell(shell.partition("\n")[2].replace("exec sh", f"{done_and_cut}; exec sh"))
    said = " ".join(laptop.said("cancel", run.id, code=4).split())
    cut.unlink()
    assert "the request to stop may or may not have arrived" in said
    wait_for(lambda: laptop.status(run)["state"] == "cancelled", "end of the run")
