"""RunPod: one run over one or many pods, its directory on a network volume and a copy of it here."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.rundir.files import replace_json
from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import Capabilities, Prepared, Request, Scheduler, SchedulerError, Status
from launcher.schedulers.over_ssh.exchange import Wanted
from launcher.schedulers.rundir import asking_to_stop, for_us_alone, in_force, rewrite_run, write_run
from launcher.schedulers.runpod.alone import renting
from launcher.schedulers.runpod.errors import ApiError
from launcher.schedulers.runpod.looks import Looks
from launcher.schedulers.runpod.place import (
    PREFIX,
    Handle,
    copies_of,
    folder_on_volume,
    handle_of,
)
from launcher.schedulers.runpod.rejected import ask_to_stop
from launcher.schedulers.runpod.renew import Renewal
from launcher.schedulers.runpod.watch import pace, waits

if TYPE_CHECKING:
    from launcher.render.render import RenderedFile
    from launcher.render.values import Target
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy
    from launcher.schedulers.runpod.offers import Market, Offer
    from launcher.schedulers.runpod.prepared import PodPrepared
    from launcher.schedulers.runpod.volume import Volume

PAUSE_SECONDS = 60.0
"That RunPod may ask for between a look at its prices and a submission, which waits as long."
LOOK_SECONDS = 2.0
"Between two looks of one process at a run."


class RunPodScheduler(Scheduler):
    """The run directory must lie on a network volume that has an S3 API."""

    capabilities = Capabilities(multi_node=True)

    def __init__(self) -> None:
        self._made: Client | None = None
        self._volumes: dict[tuple[str, str | None], Volume] = {}
        self._markets: dict[str, Market] = {}
        "Run id -> what was looked up for it."
        self._pauses: dict[str, ApiError] = {}
        "Run id -> RunPod's wish not to be asked for a while."
        self._last: dict[Path, tuple[float, Status]] = {}
        self._looks = Looks(lambda: self.client, self.copy)
        self._renewal = Renewal(self._looks)

    @classmethod
    def at(cls, cluster: Mapping[str, Any]) -> RunPodScheduler:
        return cls()

    @classmethod
    def place(cls, cluster: Mapping[str, Any]) -> Hashable:
        volume = (cluster.get("runpod") or {}).get("volume_id")
        return volume, (cluster.get("paths") or {}).get("runs")

    def handle(self, run: RunDir) -> str:
        return str(handle_of(run))

    @property
    def client(self) -> Client:
        if self._made is None:
            from launcher.schedulers.runpod.api import Client

            self._made = Client()
        return self._made

    def prepare(self, request: Request) -> PodPrepared:
        """With what it costs, where there is a key to ask RunPod with. Raises RenderError, SchedulerError,
        OSError."""
        from launcher.schedulers.runpod import prepared as preparing
        from launcher.schedulers.runpod.keys import has_api_key

        ready = preparing.prepare(request)
        if not has_api_key():
            return preparing.with_prices(
                ready, ["prices and stock are shown where there is a RunPod API key"]
            )
        try:
            found = self._markets[request.run_id] = preparing.market(self.client, ready)
        except SchedulerError as error:
            if isinstance(error, ApiError) and error.wait is not None:
                self._pauses[request.run_id] = error
            return preparing.with_prices(ready, [f"prices and stock are not known: {error}"])
        lines = preparing.told(found, ready.section.budget)
        return replace(preparing.with_prices(preparing.first(ready, found), lines), offered=found.offered)

    @classmethod
    def scripts(cls, target: Target) -> tuple[RenderedFile, ...]:
        from launcher.render.pod import scripts

        return scripts(target)

    @classmethod
    def notes(cls, target: Target) -> tuple[str, ...]:
        from launcher.render.pod import notes

        return notes(target)

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        """Raises SchedulerError."""
        from launcher.render.pod import CHANGE_ME, NO_VOLUME_YET
        from launcher.schedulers.runpod.lease import secret_values
        from launcher.schedulers.runpod.offers import s3_refusal
        from launcher.schedulers.runpod.prepared import PodPrepared, told
        from launcher.schedulers.runpod.volume import named_endpoint

        assert isinstance(prepared, PodPrepared)  # of this scheduler
        run_id, section = prepared.request.run_id, prepared.section
        secret_values(prepared.request.job)
        if section.volume_id == CHANGE_ME:
            raise SchedulerError(NO_VOLUME_YET)
        if section.volume_id is None and (why := s3_refusal(None, None, None)):
            raise SchedulerError(why)
        if (pause := self._pauses.pop(run_id, None)) is not None:
            if pause.wait is None or pause.wait > PAUSE_SECONDS:
                raise pause
            time.sleep(pause.wait)
        known = run_id in self._markets
        market = self._markets[run_id] = self._markets.get(run_id) or self._market(prepared)
        if why := s3_refusal(market.data_center, named_endpoint(), section.volume_id):
            raise SchedulerError(why)
        prefix = folder_on_volume(section.model_dump(), prepared.run_dir)
        if prefix is None:
            raise SchedulerError(
                f"paths.runs: {prepared.run_dir} is not below {section.volume_path}, the volume"
            )
        self._volume(str(section.volume_id), market.data_center).walk(prefix)
        if not market.offers:
            raise SchedulerError("nothing can be rented:\n" + "\n".join(market.left_out))
        return () if known else told(market, section.budget)

    def submit(self, prepared: Prepared) -> RunDir:
        """Raises SchedulerError; where there is certainly no pod, nothing is left behind."""
        from launcher.schedulers.runpod.create import NotRentedError
        from launcher.schedulers.runpod.lease import lease
        from launcher.schedulers.runpod.prepared import PodPrepared

        assert isinstance(prepared, PodPrepared)  # of this scheduler
        market = self._markets.get(prepared.request.run_id) or self._market(prepared)
        root = copies_of(prepared.section.model_dump(), str(Path(prepared.run_dir).parent))
        by_gpu = {
            one.gpu_id: replace(
                one,
                run_dir=str(root / prepared.request.run_id),
                about={**one.about, "runpod": {"data_center": market.data_center}},
            )
            for one in (prepared, *prepared.others)
        }
        chosen = market.offers[0].need.gpu_id if market.offers else prepared.gpu_id
        try:
            for_us_alone(root)
            run = write_run(by_gpu[chosen])
        except OSError as error:
            raise SchedulerError(f"cannot write {root}: {error.strerror}") from None
        remember_root(root)
        copy = self.copy(run)

        def planned_for(offer: Offer) -> None:
            nonlocal chosen
            if offer.need.gpu_id != chosen:
                chosen = offer.need.gpu_id
                rewrite_run(run, by_gpu[chosen])
                copy.push()

        try:
            with renting(run):
                self._send_code(prepared, copy.volume)
                lease(self.client, copy, "submitted", market, planned_for)
                return run
        except NotRentedError:
            self._withdraw(run, copy)
            raise

    def resume(self, run: RunDir, again: Prepared | None = None) -> None:
        """A new pod for the run, which goes on from its last checkpoint."""
        if run.path in self._renewal.renewed:  # the look at its state has just done it
            return
        with renting(run):
            self._resume(run, again)

    def _resume(self, run: RunDir, again: Prepared | None) -> None:
        from launcher.schedulers.runpod.lease import lease, leased, market_again, told_again
        from launcher.schedulers.runpod.owner import adopt, other_than
        from launcher.schedulers.runpod.prepared import PodPrepared

        status = self._looks.state(run)
        if not status.ended:
            raise SchedulerError(f"{run.id} is still {status.state}")
        if status.state == "succeeded":
            raise SchedulerError(f"{run.id} has succeeded: there is nothing to go on with")
        if status.state != "cancelled" and (owner := other_than(handle_of(run), self.copy(run), self.client)):
            adopt(self.copy(run), owner)
            raise SchedulerError(f"{run.id} goes on in {owner.path.strip('/')}: nothing is rented")
        self._looks.end(handle_of(run))
        self.copy(run).fetch(Wanted())
        if isinstance(again, PodPrepared) and again.doubt is not None and not again.section.unplanned:
            raise SchedulerError(f"nothing is rented: {again.gpu_id}: {again.doubt}")
        if again is not None:  # where its volume is does not change
            again = replace(again, about={**again.about, "runpod": run.read_about().get("runpod", {})})
        with in_force(run, again):
            run.cancel.unlink(missing_ok=True)
            if isinstance(again, PodPrepared):
                self._send_code(again, self.copy(run).volume)
            self._last.pop(run.path, None)
            market = market_again(self.client, leased(run))
            for line in told_again(run, market):
                print(line, file=sys.stderr)
            lease(self.client, self.copy(run), "resubmitted", market)

    def status(self, run: RunDir) -> Status:
        """Where an interruptible pod was taken away, this rents another one."""
        if (last := self._last.get(run.path)) is not None and last[0] > time.monotonic():
            return last[1]
        found = self._renewal.state(run)
        self._last[run.path] = (time.monotonic() + LOOK_SECONDS * pace(), found)
        return found

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        """Of many: nothing is rented by looking at them."""
        return [self._looks.state(run) for run in runs]

    def logs(self, run: RunDir, since: int) -> bytes:
        """What the pods' own scripts and the supervisors printed, from byte `since` on."""
        parts = [file.read_bytes() for file in sorted(run.path.glob("pod-node-*.log"))]
        return b"".join(parts)[since:]

    def stream(self, run: RunDir) -> Iterator[bytes]:
        """The log of the run's first pod, image pulls included, until the run ends."""
        from launcher.schedulers.runpod.stream import follow

        told: str | None = None
        while True:
            pod = self._first_pod(handle_of(run))
            if pod is not None and pod != told:
                told = pod
                for line in follow(self.client, pod, lambda: self.status(run).ended):
                    yield f"{line.ts} {line.source}: {line.line}\n".encode()
            if self.status(run).ended:
                return
            time.sleep(LOOK_SECONDS * pace())

    def cancel(self, run: RunDir) -> None:
        """A checkpoint is asked for; a second call ends the ranks. Where the volume says that the run has not
        begun, its pod is ended."""
        from launcher.schedulers.runpod.doubt import ended_before_it_began

        status = self._looks.state(run)
        if status.ended:
            raise SchedulerError(f"{run.id} is not running: {status.state}")
        self._last.pop(run.path, None)
        copy = self.copy(run)
        with asking_to_stop(run, lambda: copy.has_sent(run.cancel)):
            ask_to_stop(copy)  # first: a pod that nobody knows of may begin yet
        try:
            if not waits(run) and copy.has_begun():
                copy.fetch(Wanted())
                return
            self._looks.end(handle_of(run))
            done = ended_before_it_began(run)
        except SchedulerError as error:
            raise SchedulerError(
                f"{error}; {run.id} is asked to stop all the same, also when it begins later: "
                f"`launcher status {run.id}` shows when it has; if it does not, cancel it again"
            ) from None
        kept = {"state": "cancelled", "failure": "cancelled", "reason": done}
        run.event("finished", **kept, by="runpod")
        replace_json(run.state, {**kept, "time": now()})

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self._looks.wanted = wanted or Wanted()
        self._last.pop(run.path, None)
        self._looks.fetch(run)

    def where(self, run: RunDir) -> str:
        section = run.read_about()["cluster"]["runpod"]
        return f"{PREFIX}{section['volume_id']}:{self._there(run)}"

    def remove(self, runs: Sequence[RunDir]) -> None:
        from launcher.schedulers.runpod.doubt import refuse_to_forget

        for run in runs:
            refuse_to_forget(run)
        for run in runs:
            self._looks.end(handle_of(run))
            self.copy(run).remove()
            shutil.rmtree(run.path)

    def copy(self, run: RunDir) -> Copy:
        """Raises SchedulerError."""
        from launcher.schedulers.runpod.mirror import Copy

        about = run.read_about()
        section = about["cluster"]["runpod"]
        prefix = folder_on_volume(section, self._there(run))
        if prefix is None or section["volume_id"] is None:
            raise SchedulerError(f"{run.id} is on no network volume")
        centre = about.get("runpod", {}).get("data_center")
        return Copy(run, self._volume(section["volume_id"], centre), prefix)

    def _there(self, run: RunDir) -> str:
        cluster: dict[str, Any] = run.read_about()["cluster"]
        runs = cluster.get("paths", {}).get("runs") or f"{cluster['runpod']['volume_path'].rstrip('/')}/runs"
        return f"{runs.rstrip('/')}/{run.id}"

    def _volume(self, volume_id: str, centre: str | None) -> Volume:
        from launcher.schedulers.runpod.volume import Volume

        if (volume_id, centre) not in self._volumes:
            self._volumes[volume_id, centre] = Volume(volume_id, centre)
        return self._volumes[volume_id, centre]

    def _market(self, prepared: PodPrepared) -> Market:
        from launcher.schedulers.runpod.prepared import market

        return market(self.client, prepared)

    def _send_code(self, prepared: PodPrepared, volume: Volume) -> None:
        from launcher.schedulers.runpod.volume import GoneError

        code = prepared.target.code
        if prepared.archive is None or code is None:
            return
        folder = folder_on_volume(prepared.section.model_dump(), prepared.target.workdir)
        assert folder is not None  # code_folder is below the mount point
        key = f"{folder.rstrip('/')}.tar.gz"
        with suppress(GoneError):
            if volume.look(key).size == len(prepared.archive):
                return
        volume.write(key, prepared.archive)

    def _withdraw(self, run: RunDir, copy: Copy) -> None:
        with suppress(SchedulerError):  # then it stays there
            copy.remove()
        shutil.rmtree(run.path)

    def _first_pod(self, handle: Handle) -> str | None:
        """Of a cluster the one that leads; None while there is none."""
        from launcher.schedulers.runpod.answers import Pods, read

        if not handle.cluster:
            return handle.id
        try:
            pods = read(Pods, self.client.get(f"{handle.path}/pods"), f"GET {handle.path}/pods").pods
        except ApiError:
            return None
        return next((pod.id for pod in pods if pod.cluster is not None and pod.cluster.rank == 0), None)
