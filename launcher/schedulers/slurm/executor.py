"""submitit's executor, job folder and job objects on top of launcher's batch script and job records."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm import slurm

from launcher.rundir.layout import RunDir
from launcher.schedulers.login import LocalLogin, Login, LoginError, ask
from launcher.schedulers.slurm.jobs import jobs_of, sbatch_command, submission_of, submit
from launcher.schedulers.slurm.records import look_up
from launcher.spec.verdict import Verdict

FOLDER = "submitit"
"Folder of submitit's own files in the run directory."


@dataclass(frozen=True)
class Supervise:
    """The payload that submitit stores next to the job: what the batch script starts on each node."""

    run_dir: str

    def __call__(self) -> int:
        return subprocess.call([sys.executable, "-m", "launcher.supervise", self.run_dir])


class RecordWatcher(slurm.SlurmInfoWatcher):
    """A submitit watcher that queries all jobs in one round trip and works without accounting."""

    def __init__(self) -> None:
        super().__init__(delay_s=30)

    def update(self) -> None:
        ids = sorted(self._registered - self._finished)
        if not ids:
            return
        self._num_calls += 1
        try:
            records = look_up(partial(ask, LocalLogin()), ids)
        except LoginError:
            return
        for job in ids:
            if (record := records.get(job)) is not None:
                self._info_dict[job] = {"JobID": job, "State": record.state, "NodeList": record.nodes}
        self._last_status_check = time.time()
        self._finished |= {job for job in ids if self.is_done(job, mode="cache")}


class RunJob(slurm.SlurmJob[Verdict]):
    """A run that spans one or more Slurm jobs. `result` is its Verdict."""

    watcher = RecordWatcher()
    _waited = False

    @property
    def run(self) -> RunDir:
        payload: Any = self.submission().function
        return RunDir(Path(payload.run_dir))

    @property
    def state(self) -> str:
        """Slurm's state of the job. After `result()`, Slurm is queried instead of the cache."""
        return self.watcher.get_state(self.job_id, mode="force" if self._waited else "standard")

    def wait(self) -> None:
        super().wait()
        self._waited = True

    def done(self, force_check: bool = False) -> bool:
        """Return whether the run has ended. A run that goes back into the queue has not."""
        state = self.run.read_state()
        if state.ended and not state.requeue:
            return True
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def _get_logs_string(self, name: str) -> str | None:
        """Return for `stdout` the output of all jobs' batch scripts. The ranks' output is elsewhere."""
        files = sorted(self.run.path.glob("slurm-*.out")) if name == "stdout" else []
        return "".join(file.read_text(errors="replace") for file in files) or None

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        state = self.run.read_state()
        attempts = self.run.attempts()
        judged = attempts[-1].read_verdict() if attempts else None
        if state.failure is None or judged is None:
            raise utils.UncompletedJobError(
                f"run {self.run.id} (job {self.job_id}, {self.state}) has no verdict; its state: {state}"
            )
        verdict = judged.verdict
        return ("success", verdict) if verdict.ok else ("error", f"{verdict.failure}: {verdict.reason}")


class ScriptExecutor(slurm.SlurmExecutor):
    """Submits a rendered batch script in place of submitit's own. The job is found again by its `comment`."""

    job_class = RunJob

    def __init__(
        self, folder: Path, script: Path, comment: str, submission: int = 1, login: Login | None = None
    ) -> None:
        super().__init__(folder / FOLDER)
        self.login = login or LocalLogin()
        self.script, self.comment, self.submission = script, comment, submission
        self.earlier: set[str] = set()

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Refuse all parameters: job and profile are already rendered."""
        raise ValueError(f"{', '.join(sorted(kwargs))}: set it in the job or the cluster profile")

    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> core.Job[Any]:
        if not isinstance(fn, Supervise):
            raise TypeError(
                f"{type(self).__name__} submits a run that exists already; submit a function, such as "
                f"{fn!r:.80}, with launcher.slurm.Executor"
            )
        return super().submit(fn, *args, **kwargs)

    def _submit_command(self, command: str) -> core.Job[Any]:
        """Submit like submitit, but never create a second job after an unclear answer from sbatch."""
        script = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        shutil.copyfile(self.script, script)
        job_id = submit(
            self.login, sbatch_command(script, self.submission), self.comment, earlier=self.earlier
        )
        job = self.job_class(self.folder, job_id)
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job


class RunExecutor(ScriptExecutor):
    """Submits one run."""

    def __init__(self, run: RunDir, login: Login | None = None) -> None:
        super().__init__(run.path, run.scripts / "job.sbatch", run.id, submission_of(run), login)
        self.earlier = jobs_of(run)


class ArrayExecutor(ScriptExecutor):
    """Submits the runs of a sweep as tasks of one array."""

    def __init__(self, folder: Path, sweep_id: str, script: str, login: Login | None = None) -> None:
        super().__init__(folder, folder / script, sweep_id, login=login)

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        array = self._submit_command("")
        jobs: list[core.Job[Any]] = []
        for task, delayed in enumerate(delayed_submissions):
            job = RunJob(self.folder, f"{array.job_id}_{task}")
            delayed.dump(job.paths.submitted_pickle)
            jobs.append(job)
        return jobs
