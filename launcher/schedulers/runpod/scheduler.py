"""The RunPod scheduler. A run uses one or more pods, and a network volume for its directory."""

from __future__ import annotations

import functools
import posixpath
import shutil
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, PreparedSweep, Request, SchedulerError, Status
from launcher.schedulers.local_copies import copies_folder, write_copy
from launcher.schedulers.rundir import asking_to_stop, in_force, may_start, rewrite_run, writing
from launcher.schedulers.runpod.errors import ApiError
from launcher.schedulers.runpod.handle import PREFIX, Handle, handle_of, pod_run_dir
from launcher.schedulers.runpod.lifecycle import may_appear_until
from launcher.schedulers.runpod.mirror import Copy
from launcher.schedulers.runpod.pods import members
from launcher.schedulers.runpod.poller import Poller, evidence_of
from launcher.schedulers.runpod.queue import put_in_line
from launcher.schedulers.runpod.records import adopt, ask_to_stop
from launcher.schedulers.runpod.settings import has_api_key, pace
from launcher.schedulers.runpod.volume import GoneError, Volume, named_endpoint
from launcher.schedulers.sweep_process import sweep_process_afterwards
from launcher.schedulers.sweeps_without_queue import OneByOne, remove_here, submit_in_order
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.events import Finished
from launcher.spec.progress import working
from launcher.spec.records import ClusterRecord
from launcher.supervise.sweep_turn import sweep_folder

if TYPE_CHECKING:
    from launcher.render.render import RenderedFile
    from launcher.render.values import Target
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.offers import Market, Offer
    from launcher.schedulers.runpod.request import PodPrepared

QUEUE = "launcher.schedulers.runpod.queue"
PAUSE_SECONDS = 60.0
"How long fetched prices stay valid, and the longest Retry-After pause that a submission waits for."
LOOK_SECONDS = 2.0
"Pause between two polls of a run by one process."


class RunPodScheduler(OneByOne):
    """Runs jobs on rented pods, with run directories on a network volume that has an S3 API.

    Each run of a sweep gets its own pod. A process on this machine rents it when it is the run's turn.
    """

    multi_node = True
    own_logs = "pod-node-*.log"

    def __init__(self) -> None:
        self._volumes: dict[tuple[str, str | None], Volume] = {}
        self._queried: dict[str, tuple[float, Market]] = {}
        "Need -> (time of the query, what can be rented)."
        self._last: dict[Path, tuple[float, Status]] = {}
        self._poller = Poller(lambda: self.client, self.copy)

    @classmethod
    def place(cls, cluster: ClusterRecord) -> Hashable:
        return cluster.runpod.volume_id, cluster.paths.runs

    def handle(self, run: RunDir) -> str:
        return str(handle_of(run))

    @functools.cached_property
    def client(self) -> Client:
        from launcher.schedulers.runpod.api import Client

        return Client()

    def prepare(self, request: Request) -> PodPrepared:
        """Render the run, with its price if there is an API key.

        Raises RenderError, SchedulerError, OSError.
        """
        from launcher.schedulers.runpod import request as requests

        prepared = requests.prepare(request)
        if not has_api_key():
            return requests.with_prices(prepared, ["prices and stock are shown if there is a RunPod API key"])
        try:
            market = self._query_market(prepared)
        except SchedulerError as error:
            pause = error if isinstance(error, ApiError) and error.wait is not None else None
            unknown = requests.with_prices(prepared, [f"prices and stock are unknown: {error}"])
            return replace(unknown, pause=pause)
        lines = requests.offer_lines(market, prepared.section.budget)
        ordered = requests.with_prices(requests.order_by_offer(prepared, market), lines)
        return replace(ordered, market=market, offered=market.offered)

    @classmethod
    def scripts(cls, target: Target) -> tuple[RenderedFile, ...]:
        from launcher.schedulers.runpod.scripts import scripts

        return scripts(target)

    @classmethod
    def notes(cls, target: Target) -> tuple[str, ...]:
        from launcher.schedulers.runpod.scripts import notes

        return notes(target)

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        """Check the volume, the secrets and the offers. Return lines for the user. Raises SchedulerError."""
        from launcher.schedulers.runpod.offers import s3_refusal
        from launcher.schedulers.runpod.request import offer_lines, secret_values
        from launcher.schedulers.runpod.scripts import CHANGE_ME, NO_VOLUME_YET

        prepared = _of_runpod(prepared)
        section, pause = prepared.section, prepared.pause
        secret_values(prepared.request.job)
        if section.volume_id == CHANGE_ME:
            raise SchedulerError(NO_VOLUME_YET)
        if section.volume_id is None:
            raise SchedulerError(
                "runpod.volume_id is not set: without a network volume the results are lost with the pod"
            )
        if pause is not None:
            if pause.wait is None or pause.wait > PAUSE_SECONDS:
                raise pause
            time.sleep(pause.wait)
        market = prepared.market or self._query_market(prepared)
        if why := s3_refusal(market.data_center, named_endpoint(), section.volume_id):
            raise SchedulerError(why)
        prefix = folder_on_volume(section.volume_path, prepared.run_dir)
        if prefix is None:
            raise SchedulerError(
                f"paths.runs: {prepared.run_dir} is not below {section.volume_path}, the volume's mount point"
            )
        self._volume(section.volume_id, market.data_center).walk(prefix)
        if not market.offers:
            raise SchedulerError("nothing can be rented:\n" + "\n".join(market.left_out))
        return () if prepared.market is not None else offer_lines(market, section.budget)

    def submit(self, prepared: Prepared) -> RunDir:
        """Rent a pod for the run. Raises SchedulerError. If certainly no pod exists, nothing is left over."""
        from launcher.schedulers.runpod.renting import lease, renting

        prepared = _of_runpod(prepared)
        market = prepared.market or self._query_market(prepared)
        by_gpu = {option.gpu_id: option for option in (prepared, *prepared.others)}
        chosen = market.offers[0].need.gpu_id if market.offers else prepared.gpu_id
        run = _write(by_gpu[chosen], market)
        copy = self.copy(run)

        def planned_for(offer: Offer) -> None:
            nonlocal chosen
            if offer.need.gpu_id != chosen:
                chosen = offer.need.gpu_id
                rewrite_run(run, _in_data_center(by_gpu[chosen], market))
                copy.push()

        try:
            with renting(run):
                with working("sending the job's code"):
                    self._send_code(prepared, copy.volume)
                lease(self.client, copy, "submitted", market, planned_for)
                return run
        except BaseException:
            if not may_start(run):
                self._withdraw(run, copy)
            raise

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        count = len(sweep.runs)
        return (
            *super().check_sweep(sweep),
            f"{count} runs, each with its own pod: together they cost at most {count} times one run. A "
            "process on this machine rents a pod when it is a run's turn. While this machine is off, pods "
            f"keep running and none is rented; after a restart, run `launcher sweep resume {sweep.id}`",
        )

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        """Rent a pod for the first run, and let the others wait for their turn.

        Raises SchedulerError. The runs submitted before the error continue, unless the sweep was cancelled.
        """
        first = self.submit(sweep.runs[0])

        def submit(prepared: Prepared) -> RunDir:
            return first if prepared is sweep.runs[0] else self._put_in_line(_of_runpod(prepared))

        with sweep_process_afterwards(sweep_folder(first, sweep.id), QUEUE):
            return submit_in_order(self, sweep, submit)

    def _put_in_line(self, prepared: PodPrepared) -> RunDir:
        run = _write(prepared, prepared.market or self._query_market(prepared))
        self._send_code(prepared, self.copy(run).volume)
        put_in_line(run)
        return run

    def resume(self, run: RunDir, again: Prepared | None = None) -> None:
        """Rent a new pod for the run, which continues from its last checkpoint.

        A run of a sweep waits for its turn.
        """
        from launcher.schedulers.runpod.renting import NotRentedError, renting

        if run.path in self._poller.renewed:  # the last poll has rented it
            return
        with renting(run):
            asked_to_stop = run.cancel.exists()
            try:
                self._resume(run, again)
            except (NotRentedError, KeyboardInterrupt) as error:
                if isinstance(error, NotRentedError) or not may_start(run):
                    self._put_back(self.copy(run), asked_to_stop)
                raise

    def _put_back(self, copy: Copy, asked_to_stop: bool) -> None:
        """Replace the records of a refused submission, and a withdrawn plan, on the volume."""
        with suppress(SchedulerError):
            if not copy.has_begun():  # another machine may have resumed it
                copy.push()
                if asked_to_stop:  # a pod that RunPod has not confirmed may still start
                    ask_to_stop(copy)

    def _resume(self, run: RunDir, again: Prepared | None) -> None:
        from launcher.schedulers.runpod.renting import lease, offers_again
        from launcher.schedulers.runpod.request import PodPrepared

        status = self._poller.status(run)
        if not status.ended:
            raise SchedulerError(f"{run.id} is still {status.state}")
        if status.state != "cancelled" and (other := self._poller.other(run, handle_of(run))):
            adopt(self.copy(run), other)
            raise SchedulerError(f"{run.id} is still running in {other.path.strip('/')}: nothing is rented")
        self._poller.end(handle_of(run))
        self.copy(run).fetch(Wanted())
        if isinstance(again, PodPrepared) and again.why_unplanned is not None and not again.section.unplanned:
            raise SchedulerError(f"nothing is rented: {again.gpu_id}: {again.why_unplanned}")
        if again is not None:  # keep the data centre: the volume does not move
            again = replace(again, about=again.about.replace(runpod=run.read_about().runpod))
        with in_force(run, again):
            run.cancel.unlink(missing_ok=True)
            if isinstance(again, PodPrepared):
                self._send_code(again, self.copy(run).volume)
            self._last.pop(run.path, None)
            if (sweep := run.read_about().sweep) is not None:
                with sweep_process_afterwards(sweep_folder(run, sweep.id), QUEUE):
                    put_in_line(run)
                return
            market, lines = offers_again(self.client, run)
            for line in lines:
                print(line, file=sys.stderr)
            lease(self.client, self.copy(run), "resubmitted", market)

    def status(self, run: RunDir) -> Status:
        """Poll a run. If its interruptible pod was taken away, rent another one."""
        if (last := self._last.get(run.path)) is not None and last[0] > time.monotonic():
            return last[1]
        status = self._poller.status(run, "renew")
        self._last[run.path] = (time.monotonic() + LOOK_SECONDS * pace(), status)
        return status

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        """Poll many runs, without renting anything for them."""
        return [self._poller.status(run) for run in runs]

    def stream(self, run: RunDir) -> Iterator[bytes]:
        """Yield the log of the run's first pod, including the image pull, until the run ends."""
        from launcher.schedulers.runpod.stream import follow

        followed: str | None = None
        while True:
            pod = self._first_pod(handle_of(run))
            if pod is not None and pod != followed:
                followed = pod
                for line in follow(self.client, pod, lambda: self.status(run).ended):
                    yield f"{line.ts} {line.source}: {line.line}\n".encode()
            if self.status(run).ended:
                return
            time.sleep(LOOK_SECONDS * pace())

    def cancel(self, run: RunDir) -> None:
        """Ask the run to write a checkpoint and stop; a second call kills the ranks.

        If the run has not begun according to the volume, end its pod. Raises SchedulerError.
        """
        status = self._poller.status(run)
        if status.ended:
            raise SchedulerError(f"{run.id} is not running: {status.state}")
        self._last.pop(run.path, None)
        copy = self.copy(run)
        with asking_to_stop([run], copy.has_sent, run.id):
            ask_to_stop(copy)  # first, because an unconfirmed pod may still start
        try:
            self._poller.status(run, "cancel")
        except SchedulerError as error:
            raise SchedulerError(
                f"{error}; the request to stop is sent anyway, and {run.id} will obey it even if it starts "
                f"later: `launcher status {run.id}` shows when it stops; if it does not, cancel it again"
            ) from None

    def has_begun(self, run: RunDir) -> bool:
        """Return whether the run had begun when it was cancelled. If not, `cancel` ended it at once."""
        last = next(reversed(run.read_events()), None)
        return not (isinstance(last, Finished) and last.by == "runpod")

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self._poller.wanted = wanted or Wanted()
        self._last.pop(run.path, None)
        self._poller.fetch(run)

    def where(self, run: RunDir) -> str:
        return f"{PREFIX}{run.read_about().cluster.runpod.volume_id}:{_path_on_pod(run)}"

    def remove(self, runs: Sequence[RunDir]) -> None:
        for run in runs:
            if (until := may_appear_until(evidence_of(run))) is not None:
                raise SchedulerError(
                    f"{run.id} is kept until {until}: RunPod has confirmed no pod for it, and a pod that "
                    "still appears must find the request to stop on the volume; run "
                    f"`launcher clean {run.id}` after that"
                )
        for run in runs:
            self._poller.end(handle_of(run))
            self.copy(run).remove()
            remove_here(run)

    def _query_market(self, prepared: PodPrepared) -> Market:
        """Query the offers, once for all runs of a sweep with equal needs. Raises SchedulerError."""
        from launcher.schedulers.runpod.request import market_for

        options = (prepared, *prepared.others)
        need = repr(
            [
                (option.section, option.needs, option.why_unplanned, option.request.job.resources)
                for option in options
            ]
        )
        at, market = self._queried.get(need, (0.0, None))
        if market is None or time.monotonic() > at + PAUSE_SECONDS:
            market = market_for(self.client, prepared)
            self._queried[need] = time.monotonic(), market
        return market

    def copy(self, run: RunDir) -> Copy:
        """Return the local copy of the run's directory on the volume. Raises SchedulerError."""
        about = run.read_about()
        section = about.cluster.runpod
        prefix = folder_on_volume(section.volume_path, _path_on_pod(run))
        if prefix is None or section.volume_id is None:
            raise SchedulerError(f"{run.id} is on no network volume")
        centre = about.runpod.data_center if about.runpod is not None else None
        return Copy(run, self._volume(section.volume_id, centre), prefix)

    def _volume(self, volume_id: str, centre: str | None) -> Volume:
        if (volume_id, centre) not in self._volumes:
            self._volumes[volume_id, centre] = Volume(volume_id, centre)
        return self._volumes[volume_id, centre]

    def _send_code(self, prepared: PodPrepared, volume: Volume) -> None:
        code = prepared.target.code
        if prepared.archive is None or code is None:
            return
        folder = folder_on_volume(prepared.section.volume_path, prepared.target.workdir)
        assert folder is not None  # it is below the mount point
        key = f"{folder.rstrip('/')}.tar.gz"
        with suppress(GoneError):
            if volume.look(key).size == len(prepared.archive):
                return
        volume.write(key, prepared.archive)

    def _withdraw(self, run: RunDir, copy: Copy) -> None:
        with suppress(SchedulerError):  # on errors, the copy on the volume stays
            copy.remove()
        shutil.rmtree(run.path)

    def _first_pod(self, handle: Handle) -> str | None:
        """Return the id of the pod, or of a cluster's first pod; None while there is none."""
        if not handle.cluster:
            return handle.id
        with suppress(ApiError):
            for pod in members(self.client, handle.path):
                if pod.cluster is not None and pod.cluster.rank == 0:
                    return pod.id
        return None


def _of_runpod(prepared: Prepared) -> PodPrepared:
    from launcher.schedulers.runpod.request import PodPrepared

    assert isinstance(prepared, PodPrepared)  # `prepare` of this scheduler returned it
    return prepared


def _in_data_center(prepared: PodPrepared, market: Market) -> PodPrepared:
    """Return the run with the data centre of its volume recorded."""
    return replace(prepared, about=prepared.about.replace(runpod={"data_center": market.data_center}))


def _write(prepared: PodPrepared, market: Market) -> RunDir:
    """Write the local copy of a run. Raises SchedulerError."""
    root = copies_folder(f"runpod-{prepared.section.volume_id}", str(Path(prepared.run_dir).parent))
    with writing(root):
        run = write_copy(_in_data_center(prepared, market), root)
    remember_root(root)
    return run


def _path_on_pod(run: RunDir) -> str:
    cluster = run.read_about().cluster
    return pod_run_dir(cluster.paths.runs, cluster.runpod.volume_path, run.id)


def folder_on_volume(volume_path: str, path: str) -> str | None:
    """Return the volume key of a folder on the pod, or None if the folder is not on the volume."""
    below = posixpath.relpath(posixpath.normpath(path), posixpath.normpath(volume_path))
    return None if below.startswith("..") else f"{below}/"
