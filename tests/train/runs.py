"""A run directory made by hand, and real ranks in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.rundir.files import read_json, read_json_lines
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import EXIT_STOPPED
from launcher.train.rank import Rank

HERE = Path(__file__).parent
# Two nodes on one machine: all that a rank sees of them is how many ranks its own has.
PRETEND = 'LOCAL_WORLD_SIZE="${PRETEND_PER_NODE:-$LOCAL_WORLD_SIZE}"; '
# Each rank leaves its exit code behind: torchrun shows only the first failing one. Ranks that were stopped
# wait for each other, because torchrun would end a rank that takes longer over its last words.
RANK = (
    PRETEND
    + 'trap : TERM; "$1" -m launcher.train; code=$?; echo $code > "$CODES/$RANK"; '
    + f'while [ $code = {EXIT_STOPPED} ] && [ $(ls "$CODES" | wc -l) -lt $WORLD_SIZE ]; do sleep 0.05; done; '
    + "exit $code"
)


@dataclass(frozen=True)
class Ended:
    """How the ranks of one attempt ended."""

    codes: dict[int, int]
    output: str


def recipe(sharding: str = "fsdp", micro: int = 4, accumulation: int = 1, **fields: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "precision": "fp32",
            "optimizer": "adamw",
            "sharding": sharding,
            "micro_batch_size": micro,
            "grad_accum": accumulation,
            **fields,
        }
    )


def job(**fields: Any) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "task": "ragged:Ragged",
            "batch": {"global": 8},
            "steps": 6,
            "resources": {"gpus_per_node": 0},
            **fields,
        }
    )


def prepare(path: Path, job: Job, **about: Any) -> RunDir:
    path.mkdir(parents=True, exist_ok=True)
    run = RunDir(path)
    content = {"id": run.id, "job": job.model_dump(mode="json", by_alias=True), "workdir": str(HERE), **about}
    run.run.write_text(json.dumps(content))
    return run


def one_rank(run: RunDir, **fields: Any) -> Rank:
    """A rank on the CPU, for what needs no other process."""
    values: dict[str, Any] = {
        "run": run, "attempt": run.attempt(0), "number": 0, "node": 0, "job": job(), "recipe": recipe(),
        "workdir": str(HERE), "local": 0, "world": 1, "per_node": 1, "device": torch.device("cpu"),
        "stop_file": run.attempt(0).stop,
    }  # fmt: skip
    return Rank(**{**values, **fields})


def start(run: RunDir, recipe: Recipe, ranks: int = 2, env: dict[str, str] | None = None) -> Ended:
    """The next attempt, to its end. Two minutes are a hang, even on a busy machine."""
    attempt = run.attempt(len(run.attempts()))
    codes = attempt.path / "codes"
    codes.mkdir(parents=True)
    attempt.recipe.write_text(recipe.model_dump_json())
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "--no-python"),
            *("bash", "-c", RANK, "rank", sys.executable),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CODES": str(codes),
            "LAUNCHER_RUN_DIR": str(run.path),
            "LAUNCHER_ATTEMPT": str(attempt.number),
            "LAUNCHER_STOP_FILE": str(attempt.stop),
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(
        codes={int(file.name): int(file.read_text()) for file in codes.iterdir()},
        output=process.stdout + process.stderr,
    )


def measure(
    script: str,
    folder: Path,
    ranks: int,
    per_node: int | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 280,
    **about: Any,
) -> Any:
    """What a script of this folder writes when it runs on every rank."""
    run = prepare(folder / "run", job(), **about)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    attempt.recipe.write_text(recipe().model_dump_json())
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"),
        *("bash", "-c", PRETEND + 'exec "$@"', "rank", sys.executable),
    ]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [
            sys.executable,
            *(torchrun if ranks > 1 else []),
            *(str(HERE / script), str(folder / "out.json")),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LAUNCHER_RUN_DIR": str(run.path),
            "PYTHONPATH": os.pathsep.join(paths),
            "PRETEND_PER_NODE": str(per_node or ""),
            **(env or {}),
        },
        check=True,
        timeout=timeout,
    )
    return json.loads((folder / "out.json").read_text())


def losses(run: RunDir, attempt: int | None = None) -> dict[int, float]:
    lines = read_json_lines(run.metrics)
    return {line["step"]: line["loss"] for line in lines if attempt in (None, line["attempt"])}


def error(attempt: AttemptDir, rank: int) -> dict[str, Any]:
    return read_json(attempt.error(rank)) or {}


def any_error(attempt: AttemptDir) -> dict[str, Any]:
    """Return the first rank's error: if every rank fails by itself, torchrun ends those that are later."""
    found = sorted((attempt.path / "errors").glob("rank-*.json"))
    return (read_json(found[0]) or {}) if found else {}
