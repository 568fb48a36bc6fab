"""Scheduler for hosts without a batch system: it starts a detached supervisor on each over ssh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from launcher.rundir.files import replace_json
from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import (
    Prepared,
    PreparedSweep,
    Request,
    SchedulerError,
    Status,
    UnclearError,
)
from launcher.schedulers.login import LoginError
from launcher.schedulers.over_ssh.mirror import forget
from launcher.schedulers.over_ssh.remote_store import NotSentError, RemoteStore, absolute_runs_folder
from launcher.schedulers.over_ssh.snapshot import Snapshot, relay
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.rundir import in_force, status_of, writing
from launcher.schedulers.ssh.choose import (
    DEFAULT_PYTHON,
    Chosen,
    choose,
    distribute,
    hosts_of,
    python_of,
    runs_that_fit,
)
from launcher.schedulers.ssh.hosts import HostError, ask_host, in_parallel, results_or_raise
from launcher.schedulers.ssh.moves import LiveRun, next_move
from launcher.schedulers.ssh.no_shared_folder import check_resume, hosts_with_directory, notes
from launcher.schedulers.ssh.start import Start
from launcher.schedulers.ssh.state import corrected_state, locks_script, parse_locks
from launcher.schedulers.sweep_process import sweep_process_afterwards
from launcher.schedulers.sweeps_without_queue import OneByOne, remove_here
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.events import Refused, Submitting
from launcher.spec.records import ClusterRecord, RunRecord

if TYPE_CHECKING:
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
SPREAD = "launcher.schedulers.ssh.spread"


class SshHosts(OneByOne):
    """Runs a job with n nodes on the first n of `hosts` that can take it.

    The run directory is on the first of these, in the folder `runs`; run.json names the hosts. If the hosts
    do not share this folder, each has a run directory, and the first host's holds the records of all.

    The runs of a sweep are distributed over the hosts when they are submitted, and each waits for its turn
    there. While this machine is on, a process here moves waiting runs to hosts that have become free
    (`spread`).
    """

    multi_node = True

    def __init__(self, hosts: tuple[str, ...], runs: str | None) -> None:
        self.remote_root = absolute_runs_folder(runs, f"ssh.hosts {hosts[0]}")
        self.hosts = hosts
        self._stores: dict[tuple[str, Path | None], RemoteStore] = {}
        "Key: host, and the folder of the local copies if it is another host's."
        self._codes: dict[str, Snapshot] = {}
        self._chosen: dict[str, Chosen] = {}
        "Run id -> the hosts that `check` or `check_sweep` has chosen."

    @classmethod
    def at(cls, cluster: ClusterRecord) -> SshHosts:
        return cls(*cls.place(cluster))

    @classmethod
    def place(cls, cluster: ClusterRecord) -> tuple[tuple[str, ...], str | None]:
        return tuple(cluster.ssh.hosts if cluster.ssh is not None else ()), cluster.paths.runs

    @classmethod
    def is_here(cls, run: RunDir, cluster: ClusterRecord) -> bool:
        """Return whether `run` is the run directory itself, not a copy: this machine is the host."""
        return str(run.path) == f"{(cluster.paths.runs or '').rstrip('/')}/{run.id}"

    @classmethod
    def with_hardware(cls, cluster: Cluster, job: Job) -> Cluster:
        """Ask the hosts for their GPUs if the job may use any."""
        if cluster.node.gpu is not None or job.resources.gpus_per_node == 0:
            return cluster
        from launcher.schedulers.ssh.detect import with_gpus_of_hosts

        return with_gpus_of_hosts(cluster)

    def handle(self, run: RunDir) -> str:
        return f"ssh:{run.read_about().cluster.name or ''}:{run.id}"

    def prepare(self, request: Request) -> Prepared:
        """Render a run with the current code. Raises RenderError, SchedulerError, OSError."""
        from launcher.schedulers.prepare import ready

        _refuse_gpu_variable(request)
        place = self._store_on(self.hosts[0]).place(request)
        python = request.cluster.paths.python or DEFAULT_PYTHON
        either = "|".join(self.hosts)  # the host is chosen after the inspection
        command = ("ssh", either, python, "-m", "launcher.supervise", place.run_dir)
        return ready(self, request, place, python, command)

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        chosen = self._choose((), prepared.about)
        self._chosen[prepared.request.run_id] = chosen
        separate_notes = (
            notes([host.name for host in chosen.hosts], prepared.about) if chosen.separate_folders else ()
        )
        return (*chosen.notes, *separate_notes)

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        if any(prepared.about.nodes > 1 for prepared in sweep.runs):
            raise SchedulerError(
                "--sweep: a run that needs several ssh hosts cannot wait for GPUs; start them one after "
                "another, each with `launcher run JOB -c CLUSTER --set FIELD=VALUE`, which returns when the "
                "run has ended"
            )
        hosts = [self._store_on(host).login for host in self.hosts]
        largest = max((prepared.about for prepared in sweep.runs), key=lambda about: about.gpus_per_node)
        at_once = largest.sweep.at_once if largest.sweep is not None else None
        chosen, notes = distribute(hosts, largest, self.remote_root, len(sweep.runs), at_once)
        self._chosen |= zip((prepared.request.run_id for prepared in sweep.runs), chosen, strict=True)
        return notes

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        """Submit every run, and start the process that moves waiting runs.

        Raises SchedulerError. The runs submitted before the error continue.
        """
        runs = super().submit_sweep(sweep)
        self._look_after(sweep.id)
        return runs

    def _look_after(self, sweep: str) -> None:
        """Start the process that moves waiting runs of a sweep, unless it runs. Raises SchedulerError."""
        roots = [self._store_on(host).local_root for host in self.hosts]
        folders = [root / "sweeps" / sweep for root in roots if any(root.glob(f"{escape(sweep)}-*"))]
        if len(self.hosts) > 1:  # a single host has no other to move to
            with sweep_process_afterwards(folders[0], SPREAD, *map(str, folders[1:])):
                pass  # all runs are submitted

    def spread(self, runs: Sequence[RunDir]) -> Iterator[RunDir]:
        """Move waiting runs of a sweep to hosts of the profile that are free. Yield each moved run.

        Raises SchedulerError.
        """
        statuses = zip(runs, self.statuses(runs), strict=True)
        living = [_living(run, status) for run, status in statuses if not status.ended]
        at_once = _at_once(runs[0])
        for host in self.hosts:
            capacity: float | None = None
            while (move := next_move(host, living, at_once))[0]:
                moved, places = move
                if capacity is None:
                    capacity = runs_that_fit(
                        self._store_on(host).login, moved[0].run.read_about(), self.remote_root
                    )
                if capacity < 1:
                    break
                capacity -= 1
                for place, live_run in enumerate(moved):
                    changed = replace(live_run, waits=False)  # if it did not move, it has begun
                    if self._move(live_run.run, host, places):
                        yield live_run.run
                        changed = replace(live_run, host=host, waits=place > 0, places=places)
                    living[living.index(live_run)] = changed

    def _move(self, run: RunDir, host: str, places: float) -> bool:
        """Move a run to a host, unless it has begun. Return whether it was moved.

        Raises SchedulerError. The run is then on its old host, or lost if that host does not answer.
        """
        about = run.read_about()
        old_host, sweep = hosts_of(about)[0], about.sweep
        assert sweep is not None  # a run of its own does not move
        old_login = self._store_on(old_host).login
        relay(about.code_digest, old_login, self._store_on(host).login, self.remote_root)
        request = {"do": "withdraw", "run_dir": f"{self.remote_root}/{run.id}"}
        if not ask_host(old_login, python_of(about), request)["withdrawn"]:
            return False
        at_once = None if sweep.at_once is None else int(places)
        try:
            self._start_again(run, about.replace(hosts=[host], sweep=sweep.replace(at_once=at_once)))
        except (NotSentError, HostError):
            self._start_again(run, about)
            raise
        return True

    def _start_again(self, run: RunDir, about: RunRecord) -> None:
        """Send and start a run that is currently on no host. Raises SchedulerError."""
        replace_json(run.run, about.as_json())
        replace_json(run.state, {"state": "submitted", "time": now()})
        forget(run)
        login = self._store_on(hosts_of(about)[0]).login
        self._start(run, Chosen((login,)), "resubmitted")

    def submit(self, prepared: Prepared) -> RunDir:
        """Submit the run. Raises SchedulerError. If nothing was started, nothing is left over."""
        about = prepared.about
        chosen = self._chosen.pop(prepared.request.run_id, None) or self._choose((), about)
        if (sweep := about.sweep) is not None:
            sweep = sweep.replace(at_once=chosen.places, at_once_in_all=sweep.at_once)
            prepared = replace(prepared, about=about.replace(sweep=sweep))
        store = self._store_on(chosen.hosts[0].name)
        with writing(store.local_root):
            run = store.write(_on_hosts(prepared, chosen))
        remember_root(run.path.parent)
        try:
            self._start(run, chosen, "submitted")
        except (NotSentError, HostError):
            with suppress(SchedulerError):  # on errors, the run stays on both sides
                self.remove([run])
            raise
        return run

    def resume(self, run: RunDir, again: Prepared | None = None) -> None:
        """Start new supervisors for the run, which continues from its last checkpoint."""
        self.fetch(run)
        status = self.status(run)
        if not status.ended:
            raise SchedulerError(f"{run.id} is still {status.state}")
        earlier_state, hosts = run.read_state(), hosts_of(run.read_about())
        about = again.about if again is not None else run.read_about()
        chosen = self._choose(hosts, about)
        check_resume(run, hosts, about, chosen)
        with in_force(run, _on_hosts(again, chosen) if again is not None else None):
            run.cancel.unlink(missing_ok=True)
            replace_json(run.state, {"state": "submitted", "time": now()})
            try:
                self._start(run, chosen, "resubmitted")
            except (NotSentError, HostError) as error:
                run.append(Refused(reason=str(error)))
                replace_json(run.state, earlier_state.replace(reason=str(error)).as_json())
                with suppress(SchedulerError):
                    self.fetch(run)
                raise
        if (sweep := run.read_about().sweep) is not None:
            self._look_after(sweep.id)

    def status(self, run: RunDir) -> Status:
        return self._store_of(run).cached_status(run, lambda: self.statuses([run])[0])

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        """Query each host once for all runs that have not ended according to their records."""
        living: dict[RemoteStore, list[RunDir]] = {}
        for run in runs:
            if not run.read_state().ended:
                living.setdefault(self._store_of(run), []).append(run)
        locks: dict[str, tuple[str, str]] = {}
        for locks_of_host in results_or_raise(in_parallel(lambda item: self._locks(*item), living.items())):
            locks |= locks_of_host
        statuses = []
        for run in runs:
            lock, trouble = locks.get(run.id, ("", ""))
            state = corrected_state(run, lock, trouble, self.where(run))
            statuses.append(status_of(run, self.handle(run), state, resumable=lock != "lost"))
        return statuses

    def _locks(self, store: RemoteStore, runs: Sequence[RunDir]) -> dict[str, tuple[str, str]]:
        """Return run id -> (state of its lock, why the host could not be queried)."""
        store.select_runs(runs)
        try:
            done = store.run(locks_script(self.remote_root, [run.id for run in runs]))
        except LoginError as error:
            return {run.id: ("", str(error)) for run in runs}
        locks = parse_locks(done.stdout) | dict.fromkeys(store.lost, "lost")
        return {run: (lock, "") for run, lock in locks.items()}

    def cancel(self, run: RunDir) -> None:
        """Ask the run to write a checkpoint and stop. A second call kills the ranks."""
        if not (status := self.statuses([run])[0]).ended:
            store = self._store_of(run)
            store.ask_to_stop([run], run.id, store.sync, lambda: self._interrupt(run))
            status = status_of(run, self.handle(run), run.read_state())
        if status.ended:
            raise SchedulerError(f"{run.id} is not running: {status.state}")

    def _interrupt(self, run: RunDir) -> str:
        """Interrupt the run's supervisor. Return why that is not possible, or ""."""
        request = {"do": "interrupt", "run_dir": f"{self.remote_root}/{run.id}"}
        answer = ask_host(self._store_of(run).login, python_of(run.read_about()), request)
        return "" if answer["interrupted"] else "its supervisor cannot be interrupted"

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self._store_of(run).fetch(run, wanted)

    def where(self, run: RunDir) -> str:
        return self._store_of(run).where(run)

    def remove(self, runs: Sequence[RunDir]) -> None:
        by_host: dict[str, list[RunDir]] = {}
        for run in runs:
            for host in hosts_of(run.read_about()):
                by_host.setdefault(host, []).append(run)
        for host, ran in by_host.items():
            store = self._store_on(host)
            stored = [run for run in ran if host in hosts_with_directory(run.read_about())]
            leftovers = self._forget_text(ran)
            if stored:
                store.remove(stored, leftovers)
            else:
                with suppress(LoginError):
                    store.login.run(leftovers)
        for run in runs:
            remove_here(run)

    def _forget_text(self, removed: Sequence[RunDir]) -> str:
        """Return shell that removes shared memory that the ranks of a killed supervisor have left, and the
        folders of sweeps that have no runs left."""
        names = " ".join(quote(run.id) for run in removed)
        sweeps = {sweep.id for run in removed if (sweep := run.read_about().sweep) is not None}
        unused = (f"ls -d {name}-* >/dev/null 2>&1 || rm -rf sweeps/{name}" for name in map(quote, sweeps))
        return "\n".join(
            (
                f"(cd /dev/shm/launcher-$(id -u) && for r in {names}; do rm -rf $r-*; done) 2>/dev/null",
                f"cd {quote(self.remote_root)} 2>/dev/null || exit 0",
                *unused,
                ":",
            )
        )

    def _store_on(self, host: str, here: Path | None = None) -> RemoteStore:
        """Return the store on a host.

        `here` is the folder of the local copies of runs that have moved from another host.
        """
        if (host, here) not in self._stores:
            store = RemoteStore(SshLogin(host), self.remote_root, self._codes)
            if here is not None and here != store.local_root:
                store.local_root = here
            self._stores[host, here] = store
        return self._stores[host, here]

    def _store_of(self, run: RunDir) -> RemoteStore:
        """Return the store on the host that holds the run's directory."""
        about = run.read_about()  # empty if the run was deleted meanwhile
        host = (hosts_of(about) or self.hosts)[0]
        store = self._store_on(host)
        return store if store.local_root == run.path.parent else self._store_on(host, run.path.parent)

    def _choose(self, required: Sequence[str], about: RunRecord) -> Chosen:
        others = [self._store_on(host).login for host in self.hosts if host not in required]
        return choose([self._store_on(host).login for host in required], others, about, self.remote_root)

    def _start(self, run: RunDir, chosen: Chosen, event: str) -> None:
        """Start the supervisors.

        Raises NotSentError and HostError if nothing was started, and UnclearError if that is unknown.
        """
        run.append(Submitting())
        store = self._store_of(run)
        stores = [store, *(self._store_on(host.name) for host in chosen.hosts[1:])]
        start = Start(run, chosen, stores, event, self.handle(run))
        try:
            store.deliver([run], (), start.start_all)
        except LoginError as error:
            raise UnclearError(
                f"{error}; the run may or may not have started: run `launcher status {run.id}` when "
                f"{store.name} answers again"
            ) from None


def _living(run: RunDir, status: Status) -> LiveRun:
    about = run.read_about()
    places = about.sweep.at_once if about.sweep is not None else None
    return LiveRun(
        run, hosts_of(about)[0], status.state == "submitted", math.inf if places is None else places
    )


def _at_once(run: RunDir) -> float:
    """Return how many runs of the run's sweep run at the same time on all hosts together."""
    sweep = run.read_about().sweep
    return math.inf if sweep is None or sweep.at_once_in_all is None else sweep.at_once_in_all


def _on_hosts(prepared: Prepared, chosen: Chosen) -> Prepared:
    about = prepared.about.replace(hosts=[host.name for host in chosen.hosts])
    return replace(prepared, about=about.replace(apart=True) if chosen.separate_folders else about)


def _refuse_gpu_variable(request: Request) -> None:
    cluster, job = request.cluster, request.job
    for where, env in (
        ("job", job.env),
        ("cluster", cluster.env),
        ("cluster's network", cluster.network.env),
    ):
        if request.plan.layout.gpus_per_node and GPU_VARIABLE in env:
            raise SchedulerError(
                f"{where} env {GPU_VARIABLE}: launcher sets it on these hosts, to GPUs that are free; "
                "say how many with resources.gpus_per_node"
            )
