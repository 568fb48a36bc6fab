"""Measure whether a job can start on this node: its files, programs, imports, secrets and memory."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.doctor.job_needs import JobNeeds
from launcher.doctor.measure.gpus import visible_handles
from launcher.doctor.measure.guarded import guarded
from launcher.doctor.measure.host import free_memory
from launcher.doctor.values import Measured
from launcher.schedulers.missing_files import missing, script_of
from launcher.spec.job import Job

IMPORT_SECONDS = 120.0
"Time limit for importing a task's module. torch alone takes a second, or half a minute from a cold disk."
FIND = (
    "import importlib.util, json, sys; sys.path.insert(0, sys.argv[1]); "
    "print(json.dumps([name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]))"
)
"Program that prints which of the named modules this Python does not find, without importing them."
IMPORT = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])"


def measure_job(node: int, needs: JobNeeds, run: Path) -> Iterator[Measured]:
    """Yield values that show whether this node has what the job needs. Run it in the job's `workdir`."""
    job = Job.model_validate(needs.job)
    environ = _environ()
    if needs.image is not None:  # if containers are used, the doctor itself runs in the image
        error = "" if needs.contained else f"{needs.image} is not used."
        yield Measured("job-image", node, needs.image if needs.contained else None, error=error)
    problems = missing(job, Path.cwd(), needs.setup, python=True, files=True)
    yield guarded("job-files", node, lambda: [f"{field}: {message}" for field, message in problems])
    yield guarded("job-imports", node, lambda: _imports(job, environ))
    if needs.secrets:
        missing_secrets = [name for name in needs.secrets if not os.environ.get(name)]
        yield guarded("job-secrets", node, lambda: missing_secrets)
    if needs.checkpoints is not None:
        yield guarded("job-disk", node, lambda: _free_bytes(run / "checkpoints"))
    if needs.host is not None:
        yield guarded("job-host-memory", node, lambda: free_memory()["free"])
    if needs.gpu is not None:
        yield guarded("job-gpu-memory", node, lambda: min(_free_on_gpus()))


def _environ() -> dict[str, str]:
    """Return the environment of a rank, where `python` is launcher's own unless the job sets PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path}


def _imports(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return what cannot be started or imported: a task's module, or the modules that a script imports."""
    if job.task is not None:
        module, _, name = job.task.partition(":")
        done = _run([sys.executable, "-c", IMPORT, module, name], environ)
        return [f"{job.task}: {done.stderr.strip().splitlines()[-1]}"] if done.returncode else []
    command = job.command or ()
    if (program := shutil.which(command[0], path=environ["PATH"])) is None:
        return [f"{command[0]}: no such program"]
    script = script_of(command)
    if script is None or not script.endswith(".py") or not Path(script).exists():
        return []
    python = program if "python" in Path(program).name else sys.executable
    done = _run(
        [python, "-c", FIND, str(Path(script).parent), *sorted(_imported_packages(Path(script)))], environ
    )
    if done.returncode:
        return [f"{command[0]}: {(done.stderr.strip().splitlines() or ['it fails'])[-1]}"]
    return [f"no module {name}" for name in json.loads(done.stdout)]


def _imported_packages(script: Path) -> set[str]:
    """Return the packages that a script imports unconditionally, when it starts."""
    packages: set[str] = set()
    for node in ast.parse(script.read_bytes()).body:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return packages


def _run(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=IMPORT_SECONDS
    )


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _free_on_gpus() -> list[int]:
    """Return the free bytes of each GPU that this process may use. Not yet run on a GPU."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handles = visible_handles(nvml).values()
        return [nvml.nvmlDeviceGetMemoryInfo(handle).free for handle in handles]
    finally:
        nvml.nvmlShutdown()
