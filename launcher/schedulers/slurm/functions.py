"""Run Python functions on Slurm through submitit's interface: `launcher.slurm.Executor`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from submitit.core import core, utils

from launcher.logs.read import TEXT_START
from launcher.planning.plan import make_plan
from launcher.render.shipped import clusters_dir
from launcher.rundir.find import default_root
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, Request, SchedulerError
from launcher.schedulers.prepare import new_run_id
from launcher.schedulers.registry import of_cluster
from launcher.schedulers.slurm.executor import RunJob
from launcher.schedulers.slurm.handle import job_in, job_of
from launcher.schedulers.slurm.scheduler import SlurmScheduler
from launcher.spec.cluster import Cluster
from launcher.spec.find_cluster import cluster_folders, find_cluster
from launcher.spec.job import Job
from launcher.spec.load import from_record, load_cluster
from launcher.spec.quantities import GIB

SLURM = ("partition", "account", "qos", "constraint", "reservation", "exclusive")
"Parameters that are fields of the profile's `slurm:` section."
NUMBERS = ("nodes", "tasks_per_node", "ntasks_per_node", "cpus_per_task", "mem_gb")
"Parameters that must be numbers, because launcher computes with them."
OPTIONS = ("dependency", "exclude", "nodelist", "mail_type", "mail_user", "mem_per_gpu", "mem_per_cpu")
"Parameters that are passed to sbatch as options."
RESOURCES = (
    *("timeout_min", "time", "nodes", "gpus_per_node", "tasks_per_node", "ntasks_per_node"),
    *("cpus_per_task", "mem_gb"),
)
PARAMETERS = frozenset(
    {"name", "job_name", "setup", "additional_parameters", "signal_delay_s", "array_parallelism"}
    | {*SLURM, *OPTIONS, *RESOURCES}
)
NO_LIMIT = 10**6
"Minutes that submitit gets for a job without a time limit."


class FunctionPaths(utils.JobPaths):
    """submitit's files of one call, named by its run id. Script and logs are the run's own."""

    def __init__(self, folder: Path, run: RunDir, task: int | None) -> None:
        super().__init__(folder, run.id, task)
        self.run = run

    @property
    def submission_file(self) -> Path:
        return self.run.scripts / "job.sbatch"

    @property
    def stdout(self) -> Path:
        return self.logs("out")[-1]

    @property
    def stderr(self) -> Path:
        return self.logs("err")[-1]

    def logs(self, stream: str) -> list[Path]:
        """Return the task's log of each attempt."""
        node = self.task_id // max(1, self.run.read_about().ranks_per_node)
        attempts = self.run.attempts() or [self.run.attempt(0)]
        return [attempt.rank_log(node, self.task_id, stream) for attempt in attempts]


class FunctionJob(RunJob):
    """A call of a function, or one call per rank. `result` is what it returned."""

    _run: RunDir | None = None
    _paths: FunctionPaths

    def __init__(
        self, folder: Path, job_id: str, tasks: Sequence[int] = (0,), run: RunDir | None = None
    ) -> None:
        super().__init__(folder, job_id, tasks)
        if run is not None:
            for job in (self, *cast("Sequence[FunctionJob]", self._sub_jobs)):
                job._run = run
                job._paths = FunctionPaths(folder, run, job.task_id)

    @property
    def run(self) -> RunDir:
        if self._run is None:
            raise AttributeError(f"job {self._job_id} was not made by launcher.slurm.Executor")
        return self._run

    @property
    def job_id(self) -> str:
        """Id of the run's latest job. If Slurm does not requeue, a run continues in a new job."""
        return (job_of(self._run) if self._run is not None else None) or str(self._job_id)

    def _get_logs_string(self, name: str) -> str | None:
        """Return the output of all attempts, without time stamps."""
        lines: list[bytes] = []
        for path in self._paths.logs({"stdout": "out", "stderr": "err"}[name]):
            if path.is_file():
                lines += [line[TEXT_START:] for line in path.read_bytes().splitlines(keepends=True)]
        return b"".join(lines).decode(errors="replace") if lines else None

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        deadline = time.monotonic() + self._results_timeout_s
        while not (exists := self.paths.result_pickle.exists()) and time.monotonic() < deadline:
            state = self.run.read_state()
            if state.ended and state.state != "succeeded":
                break  # it has no result; after a success the file may still be late on a slow file system
            time.sleep(0.5)
        if exists:
            return cast("tuple[str, Any]", utils.pickle_load(self.paths.result_pickle))
        state = self.run.read_state()
        why = f"{state.state} ({state.reason or self.state})"
        printed = f"; its last output:\n{error[-4000:]}" if (error := self.stderr()) else ""
        raise utils.UncompletedJobError(
            f"run {self.run.id} (job {self.job_id}, task {self.task_id or 0}) has no result: {why}; "
            f"`launcher why {self.run.path}` shows more{printed}"
        )


class Executor(core.Executor):
    """Calls functions on a cluster, through the interface of submitit's executors.

    Each call is a launcher run, with the cluster's profile, container, requeueing, logs and verdict.

    `folder` holds pickled functions and results; it must be on a file system that the nodes share. `cluster`
    is the name or the file of a profile with `scheduler: slurm`. `job` holds fields of a job file, such as
    `image`, `env`, `secrets` or `retries`. `max_num_timeout` is how often a function with `checkpoint`
    continues after a time limit. Raises SpecError, SchedulerError.
    """

    job_class = FunctionJob

    def __init__(
        self,
        folder: Path | str,
        *,
        cluster: str,
        job: Mapping[str, Any] | None = None,
        max_num_timeout: int = 3,
    ) -> None:
        super().__init__(folder)
        self.cluster = load_cluster(find_cluster(cluster, cluster_folders(clusters_dir())))
        if self.cluster.scheduler != "slurm" or self.cluster.runs_elsewhere:
            raise SchedulerError(
                f"{self.cluster.name}: submit functions on a host of a Slurm cluster; this profile has "
                + ("a login node: run your program there" if self.cluster.login else self.cluster.scheduler)
            )
        self.job, self.max_num_timeout = dict(job or {}), max_num_timeout
        self._warned: set[str] = set()

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(PARAMETERS)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Accept submitit's parameters, and Slurm's with or without the prefix `slurm_`.

        Raises ValueError.
        """
        given = {name.removeprefix("slurm_"): value for name, value in kwargs.items()}
        if unknown := sorted(set(given) - PARAMETERS):
            raise ValueError(f"unknown parameters: {unknown}; there are {', '.join(sorted(PARAMETERS))}")
        numbers = {name: given[name] for name in NUMBERS if given.get(name) is not None}
        if wrong := {name: value for name, value in numbers.items() if not isinstance(value, int | float)}:
            raise ValueError(f"these parameters must be numbers: {wrong}")
        before = self.parameters
        self.parameters = {**before, **{name: value for name, value in given.items() if value is not None}}
        try:
            self._job("check", has_checkpoint=True)
            self._profile()
        except Exception:
            self.parameters = before
            raise

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        first = new_run_id(_name(delayed_submissions[0]))
        count = len(delayed_submissions)
        names = [first] if count == 1 else [f"{first}-{n:0{len(str(count - 1))}}" for n in range(count)]
        scheduler = cast("SlurmScheduler", of_cluster(self.cluster))
        ready: list[Prepared] = []
        try:
            for name, delayed in zip(names, delayed_submissions, strict=True):
                ready.append(self._prepared(scheduler, name, delayed))
            for warning in scheduler.check(ready[0]):
                if warning not in self._warned:
                    self._warned.add(warning)
                    warnings.warn(warning, stacklevel=4)
            if count == 1:
                runs = [scheduler.submit(ready[0])]
            else:
                at_once = self.parameters.get("array_parallelism")
                runs = scheduler.submit_sweep(
                    scheduler.prepare_sweep(first, [(prepared, ()) for prepared in ready], at_once)
                )
        except BaseException:
            for name in names:
                utils.JobPaths(self.folder, name).submitted_pickle.unlink(missing_ok=True)
            raise
        tasks = range(ready[0].request.plan.layout.ranks)
        return [
            FunctionJob(self.folder, job_in(scheduler.handle(run)), tasks, RunDir(Path(prepared.run_dir)))
            for run, prepared in zip(runs, ready, strict=True)
        ]

    def _prepared(self, scheduler: SlurmScheduler, run_id: str, delayed: utils.DelayedSubmission) -> Prepared:
        """Pickle the call as it is now, and prepare its run."""
        cluster, has_checkpoint = self._profile(), hasattr(delayed.function, "checkpoint")
        job = self._job(_name(delayed), has_checkpoint)
        folder = Path.cwd()
        limit = job.resources.time
        delayed.set_timeout(NO_LIMIT if limit is None else max(1, limit // 60), self.max_num_timeout)
        pickled = utils.JobPaths(self.folder, run_id).submitted_pickle
        pickled.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        delayed.dump(pickled)
        root = Path(cluster.paths.runs).expanduser() if cluster.paths.runs else default_root()
        return scheduler.prepare(
            Request(
                job=job,
                job_file=folder / "job.yaml",
                cluster=cluster,
                plan=make_plan(job, cluster),
                run_id=run_id,
                runs_root=root,
                project_dir=folder,
            )
        )

    def _job(self, name: str, has_checkpoint: bool) -> Job:
        """Return the job of a call.

        A function without `checkpoint` does not continue after a time limit, because it would start afresh.
        """
        given = self.parameters
        nodes, tasks = given.get("nodes", 1), given.get("tasks_per_node", given.get("ntasks_per_node", 1))
        cpus, minutes = given.get("cpus_per_task"), given.get("timeout_min", given.get("time"))
        memory = given.get("mem_gb")
        resource_fields = {
            "nodes": nodes,
            "ranks_per_node": tasks,
            "gpus_per_node": given.get("gpus_per_node", 0),
            "cpus_per_node": cpus and cpus * tasks,
            "memory_per_node": memory and int(memory * GIB),
            "time": minutes if isinstance(minutes, str) or minutes is None else int(minutes * 60),
        }
        fields = {
            "name": given.get("name", given.get("job_name", name)),
            "batch": {"global": nodes * tasks},
            "command": ["python", "-u", "-m", "launcher.schedulers.slurm.call", str(self.folder)],
            "retries": {"lower": 0, "time_limits": self.max_num_timeout if has_checkpoint else 0},
            **self.job,
        }
        resources = {name: value for name, value in resource_fields.items() if value is not None}
        fields["resources"] = {**resources, **self.job.get("resources", {})}
        return from_record(Job, fields, "Executor")

    def _profile(self) -> Cluster:
        given = self.parameters
        data = self.cluster.model_dump(mode="json", by_alias=True)
        slurm = {**(data["slurm"] or {}), **{name: given[name] for name in SLURM if name in given}}
        options = {name.replace("_", "-"): given[name] for name in OPTIONS if name in given}
        slurm["extra"] = {**slurm.get("extra", {}), **options, **given.get("additional_parameters", {})}
        if "signal_delay_s" in given:
            slurm["signal_seconds"] = given["signal_delay_s"]
        setup = [*data["setup"], *given.get("setup", [])]
        return from_record(Cluster, {**data, "slurm": slurm, "setup": setup}, "Executor")


def _name(delayed: utils.DelayedSubmission) -> str:
    function = delayed.function
    return str(getattr(function, "__name__", type(function).__name__))
