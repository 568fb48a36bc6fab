"""A user's project folder on a host of a Slurm cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from launcher.rundir.layout import RunDir
from tests.lab import PATIENCE, Lab, wait_for
from tests.slurm.cluster import ROOT, Cluster

GPT = {
    "task": "launcher.tasks.gpt:PydocGPT",
    "args": {"layers": 1, "dim": 32, "heads": 2, "context": 32},
    "steps": 12,
    "train": {"checkpoint_every": 4, "lr": 1e-3},
}


class SlurmLab(Lab):
    """`lab.yaml` is the profile; what `options` say goes to sbatch."""

    def __init__(self, folder: Path, cluster: Cluster, options: dict[str, Any] | None = None) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.environ |= cluster.env()
        self.environ["PYTHONPATH"] = str(ROOT)
        # What a job inside another Slurm job would inherit.
        for name in [name for name in self.environ if name.startswith(("SBATCH_", "SRUN_"))]:
            del self.environ[name]
        self.profile(**(options or {}))

    @property
    def on_the_cluster(self) -> dict[str, str]:
        """The environment of Slurm's own commands."""
        return {**self.environ, **self.cluster.env()}

    def profile(self, **slurm: Any) -> None:
        fields = {
            "name": "lab",
            "scheduler": "slurm",
            "max_nodes": 9,
            "paths": {"python": sys.executable, "runs": str(self.folder / "runs")},
            "slurm": {"partition": "main", "gpu_request": "none", "signal_seconds": 30, **slurm},
        }
        YAML().dump(fields, self.folder / "lab.yaml")

    def job(self, file: str = "job.yaml", /, **fields: Any) -> Path:
        """Two nodes with two ranks each; `resources` are added to that."""
        base = {"nodes": 2, "gpus_per_node": 0, "ranks_per_node": 2}
        fields["resources"] = {**base, **fields.get("resources", {})}
        return super().job(file, **fields)

    def submit(self, *arguments: str) -> RunDir:
        return super().submit(*arguments, "-c", "lab.yaml")

    def slurm(self, *command: str, timeout: float = PATIENCE) -> str:
        """What one of Slurm's commands prints; fails the test when it fails."""
        done = subprocess.run(
            command, env=self.on_the_cluster, cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def sbatch(self, script: str, *options: str) -> str:
        """A job of somebody else's; gives its id."""
        return self.slurm("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script)

    def accounted(self, job: str, *fields: str) -> list[list[str]]:
        """Of each start of the job, once accounting knows that it has ended."""
        command = ["sacct", "-DnPX", "-j", job, "-o", ",".join(("State", *fields))]

        def ended() -> list[list[str]]:
            rows = [line.split("|") for line in self.slurm(*command).splitlines()]
            running = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING")
            return [] if not rows or rows[-1][0].startswith(running) else rows

        return wait_for(ended, f"end of job {job} in accounting")

    def queued(self, run: RunDir) -> str:
        """State of the run's latest job while Slurm's queue knows it."""
        command = ["squeue", "-h", "-t", "all", "-j", job_id(run), "-o", "%i %T %r"]
        done = subprocess.run(command, env=self.on_the_cluster, capture_output=True, text=True)
        return done.stdout

    def all_logs(self, run: RunDir) -> str:
        own = sorted(path for path in run.path.glob("slurm-*") if path.is_file())
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in own]
        return "\n".join([run.events.read_text(), *texts, super().all_logs(run)])


def handles(run: RunDir) -> list[str]:
    """Of each of the run's jobs, in order."""
    found = [event.handle for event in run.read_events() if event.handle]
    return list(dict.fromkeys(found))


def job_id(run: RunDir) -> str:
    scheduler, cluster, job = handles(run)[-1].split(":")
    assert (scheduler, cluster) == ("slurm", "lab") and re.fullmatch(r"\d+(_\d+)?", job)
    return job


def exported(lab: SlurmLab, run: RunDir) -> bytes:
    """The weights of the run's last checkpoint."""
    to = lab.folder / f"weights-{run.id}"
    done = lab.cli("export", str(run.path), "--to", str(to), "--json")
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    return Path(file).read_bytes()
