"""A run directory made by hand, and real ranks in it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from launcher.rundir.files import read_json, read_json_lines
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.rank import Rank
from tests.train import warm

HERE = Path(__file__).parent


T = TypeVar("T", dict[str, Any], list[dict[str, Any]])
ALL_CASES = {"ALL_CASES": "1"}
"Environment of a script that is to go through all of its cases."


def first_cases(cases: T, count: int) -> T:
    """Those that `make test` runs: together they touch all that the cases are about."""
    if "ALL_CASES" in os.environ:
        return cases
    if isinstance(cases, dict):
        return dict(list(cases.items())[:count])
    return cases[:count]


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


def start(
    run: RunDir, recipe: Recipe, ranks: int = 2, env: dict[str, str] | None = None, *, fresh: bool = False
) -> Ended:
    """The next attempt, to its end. It is given up when it hangs."""
    attempt = run.attempt(len(run.attempts()))
    attempt.path.mkdir(parents=True)
    attempt.recipe.write_text(recipe.model_dump_json())
    output = attempt.path / "output"
    codes = warm.run(
        warm.Request(
            argv=["launcher.train"],
            module=True,
            ranks=ranks,
            environ={
                **_environ(run),
                "LAUNCHER_ATTEMPT": str(attempt.number),
                "LAUNCHER_STOP_FILE": str(attempt.stop),
                **(env or {}),
            },
            together=True,
            fresh=fresh,
            output=str(output),
            timeout=240,
        )
    )
    return Ended(codes, output.read_text(errors="replace"))


def measure(
    script: str,
    folder: Path,
    ranks: int,
    per_node: int | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 800,
    *,
    fresh: bool = False,
    **about: Any,
) -> Any:
    """What a script of this folder writes when it runs on every rank.

    With `per_node`, the ranks of this machine pretend to be on several nodes: all that a rank sees of them is
    how many ranks its own has.
    """
    run = prepare(folder / "run", job(), **about)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    attempt.recipe.write_text(recipe().model_dump_json())
    output, out = folder / "output", folder / "out.json"
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    pretended = {"LOCAL_WORLD_SIZE": str(per_node)} if per_node else {}
    codes = warm.run(
        warm.Request(
            argv=[str(HERE / script), str(out)],
            module=False,
            ranks=ranks,
            environ={**_environ(run), "PYTHONPATH": os.pathsep.join(paths), **pretended, **(env or {})},
            together=ranks > 1,
            fresh=fresh,
            output=str(output),
            timeout=timeout,
        )
    )
    print(output.read_text(errors="replace"))
    assert not any(codes.values()), (script, codes)
    return json.loads(out.read_text())


def _environ(run: RunDir) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "LAUNCHER_RUN_DIR": str(run.path)}


def losses(run: RunDir, attempt: int | None = None) -> dict[int, float]:
    lines = read_json_lines(run.metrics)
    return {line["step"]: line["loss"] for line in lines if attempt in (None, line["attempt"])}


def error(attempt: AttemptDir, rank: int) -> dict[str, Any]:
    return read_json(attempt.error(rank)) or {}


def any_error(attempt: AttemptDir) -> dict[str, Any]:
    """Return the first rank's error: if every rank fails by itself, torchrun ends those that are later."""
    found = sorted((attempt.path / "errors").glob("rank-*.json"))
    return (read_json(found[0]) or {}) if found else {}
