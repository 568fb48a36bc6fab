"""A run directory made by hand, and real ranks in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from launcher.rundir.files import read_json, read_json_lines
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec import variables
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import EXIT_STOPPED
from launcher.supervise.local_ranks import KILL_SECONDS, SETTLE_SECONDS, shared_environment
from launcher.supervise.ports import hold_port
from launcher.train.rank import Rank
from tests import warm

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
    environ = {
        **_environ(run),
        "LAUNCHER_ATTEMPT": str(attempt.number),
        "LAUNCHER_STOP_FILE": str(attempt.stop),
        **(env or {}),
    }
    codes = _run(["launcher.train"], ranks, environ, output, timeout=240, module=True, fresh=fresh)
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
    environ = {**_environ(run), "PYTHONPATH": os.pathsep.join(paths), **pretended, **(env or {})}
    codes = _run([str(HERE / script), str(out)], ranks, environ, output, timeout, fresh=fresh)
    print(output.read_text(errors="replace"))
    assert not any(codes.values()), (script, codes)
    return json.loads(out.read_text())


def _run(
    argv: list[str],
    ranks: int,
    environ: dict[str, str],
    output: Path,
    timeout: float,
    *,
    module: bool = False,
    fresh: bool = False,
) -> dict[int, int]:
    """Run a program on each rank; return the exit code of each, which is 128 + n if signal n ended it.

    Several ranks, or one of launcher.train, get the variables that torchrun sets; `environ` has
    LOCAL_WORLD_SIZE if the ranks pretend to be on several nodes. As under torchrun, a rank that fails ends
    the others. Ranks that exit with EXIT_STOPPED do not: all were asked to stop, and each leaves by itself.
    Raises subprocess.TimeoutExpired.
    """
    codes: dict[int, int] = {}
    due, number, failed = time.monotonic() + timeout, signal.SIGKILL, False
    with hold_port() as holder, output.open("ab") as log:
        together = {}
        if module or ranks > 1:
            given = {variables.RUN_ID: "test", **environ}
            together = shared_environment(given, ranks, holder.getsockname()[1])
        left = {}
        for rank in range(ranks):
            own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) if together else {}
            of_all = {**environ, **together, **own}
            if "LOCAL_WORLD_SIZE" in environ:
                of_all["LOCAL_WORLD_SIZE"] = environ["LOCAL_WORLD_SIZE"]
            program = warm.Program(module, argv, of_all, Path.cwd(), fresh)
            left[rank] = warm.start(program, log.fileno(), log.fileno())
        timed_out = False
        while left:
            wait([process.sentinel for process in left.values()], max(0.0, due - time.monotonic()))
            for rank, process in list(left.items()):
                if (code := warm.exit_code(process)) is None:
                    continue
                del left[rank]
                codes[rank] = code if code >= 0 else 128 - code
                if codes[rank] not in (0, EXIT_STOPPED) and not failed:
                    failed, due, number = True, time.monotonic() + SETTLE_SECONDS, signal.SIGTERM
            if left and time.monotonic() >= due:
                timed_out = timed_out or not failed
                for process in left.values():
                    warm.signal_session(process, number)
                due, number = time.monotonic() + KILL_SECONDS, signal.SIGKILL
    if timed_out:
        raise subprocess.TimeoutExpired(argv, timeout, output.read_bytes())
    return codes


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
