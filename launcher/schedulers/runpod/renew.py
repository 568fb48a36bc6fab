"""Another pod in the place of an interruptible one that was taken away."""

from __future__ import annotations

import time
from pathlib import Path

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import LIVING, SchedulerError, Status
from launcher.schedulers.runpod.alone import BusyError, renting
from launcher.schedulers.runpod.errors import ApiError
from launcher.schedulers.runpod.looks import Looks
from launcher.schedulers.runpod.place import handle_of
from launcher.schedulers.runpod.watch import pace, waits

AGAIN_SECONDS = 30.0
"Between two tries to rent one."


class Renewal:
    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._tried: dict[Path, float] = {}
        self.renewed: set[Path] = set()
        "Runs that have got one from this process."

    def state(self, run: RunDir) -> Status:
        """After renting, where that is due. Raises SchedulerError."""
        found = self._looks.state(run)
        if not _wants_new_pod(run, found):
            return found
        if time.monotonic() < self._tried.get(run.path, float("-inf")) + AGAIN_SECONDS * pace():
            return self._looks.state(run)
        try:
            with renting(run):
                if _wants_new_pod(run, self._looks.state(run)):  # nobody was faster
                    self._tried[run.path] = time.monotonic()
                    self._rent(run)
        except BusyError:
            return found
        return self._looks.state(run)

    def _rent(self, run: RunDir) -> None:
        from launcher.schedulers.runpod.create import NotRentedError
        from launcher.schedulers.runpod.lease import lease, leased, market_again
        from launcher.schedulers.runpod.twins import UnendedError

        client = self._looks.client
        try:
            self._looks.end(handle_of(run))
            market = market_again(client, leased(run))
            lease(client, self._looks.copy(run), "requeued", market, reason="preempted")
            self.renewed.add(run.path)
        except UnendedError:
            pass  # the look at its state tells of it
        except (NotRentedError, ApiError) as error:
            _wait(run, error)


def _wants_new_pod(run: RunDir, status: Status) -> bool:
    """An interruptible pod was taken away, and its run is to go on."""
    from launcher.spec.job import Job
    from launcher.supervise.policy import spent_budgets

    about = run.read_about()
    if about["cluster"]["runpod"].get("bid_per_gpu") is None:
        return False
    if waits(run):
        return run.read_state().get("state", "submitted") in LIVING
    if status.state != "interrupted" or status.failure != "preempted":
        return False
    job = Job.model_validate(about["job"])
    return job.requeue and spent_budgets(run.read_events()).get("preemptions", 0) <= job.retries.preemptions


def _wait(run: RunDir, why: SchedulerError) -> None:
    """None was to be had. With a budget that is spent none will be."""
    from launcher.schedulers.runpod.create import BudgetSpentError

    if isinstance(why, BudgetSpentError):
        kept = {"state": "interrupted", "failure": "preempted", "reason": str(why)}
        run.event("finished", **kept, by="runpod")
    else:
        run.event("waiting", reason=str(why))
        kept = {
            "state": "submitted",
            "reason": f"waits for a pod: {why}; `launcher logs {run.id} -f` goes on trying",
        }
    replace_json(run.state, {**kept, "time": now()})
