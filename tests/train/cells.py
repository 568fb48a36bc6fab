"""Cells of the OOM matrix: one model of the zoo, one place in which memory runs out, on ranks of one group.

    python cells.py [OUT.json] [--model NAME] [--representative] [--only TEXT]

Ranks are forked from this process, which has imported torch and the model's file, and meet over gloo. A group
goes through one cell after the other. A rank that leaves a cell by an exception ends, and so do the others:
a new group takes the cells that are left.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.rundir.files import read_json, read_json_lines, replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.events import CouplesSamples, Downgrade
from launcher.spec.recipe import Recipe
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks
from launcher.train.recovery.current_recipe import CurrentRecipe
from observed import observed
from runs import HERE, job, one_rank, recipe
from saves import Bits
from zoo import MODELS, Model
from zoo.failing import Fails, Place, arm

PLACES: tuple[Place, ...] = ("forward", "backward", "recomputation")
WHO: tuple[Literal["last", "all"], ...] = ("last", "all")
STEPS = 3
FAILING = {"first": 1, "middle": 2, "last": STEPS}
MICRO, ACCUMULATION = 4, 2
SHARDINGS = {"one device": "none", "ddp": "ddp", "fsdp": "fsdp"}
MOST = 8
"Differences of a cell that are told."
UNKNOWN = "changed for the first time"
"Why a step is not repeated whose model first writes a large tensor in it: there is no copy yet."
SECONDS = 60.0
"A cell that takes longer hangs."


@dataclass(frozen=True)
class Cell:
    model: str
    sharding: str
    place: Place
    who: Literal["last", "all"]
    step: str
    probe: Literal["always", "never"]

    def __str__(self) -> str:
        return " / ".join((self.model, self.sharding, self.place, self.who, self.step, f"probe {self.probe}"))

    @property
    def folder(self) -> str:
        return str(self).replace("/", "-")

    @property
    def world(self) -> int:
        return 1 if self.sharding == "one device" else 2

    @property
    def asked(self) -> Recipe:
        activations = "checkpoint" if self.place == "recomputation" else "keep"
        return recipe(SHARDINGS[self.sharding], MICRO, ACCUMULATION, activations=activations)

    @property
    def fits(self) -> Recipe:
        return recipe_that_fits(self.asked)

    @property
    def fails(self) -> Fails:
        return Fails(self.place, self.who, FAILING[self.step], MICRO, MODELS[self.model].fails_in or "")

    @property
    def restarts(self) -> str | None:
        """Why the documentation says that this is a restart; None: it is repeated in process."""
        model = MODELS[self.model]
        if self.sharding == "ddp":
            return "DDP on several ranks"
        if self.sharding == "fsdp" and model.sends:
            return "the task calls collectives"
        if self.sharding == "fsdp" and self.probe == "never" and self.step == "first":
            return "the first micro-batch without a probe"
        if model.coupled:
            return "the loss couples samples"
        return None


def recipe_that_fits(asked: Recipe) -> Recipe:
    half = {"micro_batch_size": asked.micro_batch_size // 2, "grad_accum": 2 * asked.grad_accum}
    return asked.model_copy(update=half)


def cells_of(model: str) -> list[Cell]:
    """Every cell of a model; those that end by an exception come last."""
    found = [
        Cell(model, sharding, place, who, step, probe)
        for sharding, place, who, step, probe in itertools.product(
            SHARDINGS, PLACES, WHO, FAILING, ("always", "never")
        )
        if not (sharding == "one device" and who == "last")
        and not (sharding == "one device" and MODELS[model].sends)
        and not (place == "recomputation" and MODELS[model].changes_large)
    ]
    return sorted(found, key=lambda cell: cell.restarts is not None)


def representative(model: str) -> list[Cell]:
    """The cells of `make test`."""
    wanted = {
        ("one device", "forward", "all", "middle", "never"),
        ("fsdp", "backward", "last", "middle", "always"),
    }
    if MODELS[model].checks:  # the other rank computes with what the failing one sends in its stead
        wanted.add(("fsdp", "forward", "last", "last", "never"))
    return [
        cell
        for cell in cells_of(model)
        if (cell.sharding, cell.place, cell.who, cell.step, cell.probe) in wanted
    ]


class Trained:
    """What one training of a cell's model has left on this rank."""

    def __init__(
        self,
        rank: Rank,
        folder: Path,
        model: Model,
        asked: Recipe,
        probe: str,
        fails: Fails | None = None,
        change: tuple[int, Recipe] | None = None,
    ) -> None:
        """`change`: the recipe from that step on, without a failure: the run that knew."""
        if rank.first:
            folder.mkdir(parents=True)
        if rank.world > 1:
            dist.barrier()
        fields = {"batch": {"global": MICRO * ACCUMULATION * rank.world}, "steps": STEPS, "task": model.task}
        asked_job = job(**{**model.job, **fields, "train": {**model.job.get("train", {}), "probe": probe}})
        changes = {
            "run": RunDir(folder),
            "attempt": RunDir(folder).attempt(0),
            "recipe": asked,
            "job": asked_job,
        }
        rank, self.where = Rank(**{**vars(rank), **changes}), Where()
        trainer = Trainer(rank, self.where, Unlimited())
        if change is not None:
            trainer.current.check_first_step = lambda *_: None  # type: ignore[method-assign]
            trainer.current.climb = partial(_change, trainer.current, *change)  # type: ignore[method-assign]
        if fails is not None:
            arm(trainer, fails)
        trainer._save = lambda *_, **__: None  # type: ignore[method-assign]  # what is compared is in memory
        trainer.train()
        self.bits: Bits = observed(trainer)
        self.recipe = trainer.current.recipe
        if rank.world > 1:
            dist.barrier()
        self.steps = [line["step"] for line in read_json_lines(rank.run.metrics)]
        self.events = rank.run.read_events()
        self.trainer = trainer

    def whole(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers as a checkpoint has them."""
        state = self.trainer.model.state_dict()
        return {
            name.removeprefix("module."): value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for name, value in state.items()
        }


def _change(current: CurrentRecipe, at: int, recipe: Recipe, step: int) -> None:
    if step == at:
        current._take(recipe)


def tried(rank: Rank, folder: Path, cell: Cell) -> dict[str, Any]:
    """One cell, on this rank. What is raised passes."""
    model, at = MODELS[cell.model], FAILING[cell.step]
    began = time.perf_counter()
    expected = knew(rank, folder, cell)
    ours = Trained(rank, folder / cell.folder, model, cell.asked, cell.probe, cell.fails)
    problems = []
    if ours.recipe != cell.fits:
        problems.append(f"ended with micro-batch {ours.recipe.micro_batch_size}")
    if ours.steps != list(range(1, STEPS + 1)):
        problems.append(f"metrics have steps {ours.steps}")
    turns = [one for one in ours.events if isinstance(one, Downgrade)]
    phase = "forward" if cell.place == "forward" else "backward"
    if [(one.step, one.phase, one.in_process) for one in turns] != [(at, phase, True)]:
        problems.append(f"downgrades {[(one.step, one.phase, one.in_process) for one in turns]}")
    if model.coupled and not any(isinstance(one, CouplesSamples) for one in ours.events):
        problems.append("a loss that couples samples had another micro-batch, and nothing says so")
    problems += differences(ours.bits, expected)
    if cell.sharding == "ddp":
        problems += replicas(ours.bits)
    return {"way": "in process", "problems": problems, "seconds": round(time.perf_counter() - began, 3)}


def knew(rank: Rank, folder: Path, cell: Cell) -> Bits:
    """What the run has left that changed its recipe before the step, kept in a file for the next group.

    It is never probed nor looked at for coupled samples: neither leaves a trace.
    """
    name = f"knew {cell.sharding} {cell.asked.activations} {cell.step}"
    kept = folder / f"{name} {rank.number}.pt"
    if kept.exists():
        return torch.load(kept)
    change = (FAILING[cell.step], cell.fits)
    shutil.rmtree(folder / name, ignore_errors=True)
    found = Trained(rank, folder / name, MODELS[cell.model], cell.asked, "never", change=change)
    torch.save(found.bits, kept.with_suffix(".part"))
    kept.with_suffix(".part").rename(kept)
    return found.bits


def differences(ours: Bits, theirs: Bits) -> list[str]:
    """In words, with the largest distance: first what is the model's own, then what came of it."""
    found = [f"{name} is there in one run only" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        if one.shape != other.shape:
            found.append(f"{name} has shape {tuple(one.shape)}, not {tuple(other.shape)}")
        elif not torch.equal(one, other) and not _both_nan(one, other):
            apart = f" by {(one - other).abs().max():.2g}" if one.dtype.is_floating_point else ""
            found.append(f"{name} differs{apart}")
    trained = {name for name in ours if f"{name.partition(' ')[0]} exp_avg" in ours}
    found.sort(key=lambda one: (one.split(" differs")[0] in trained, one))
    return found[:MOST] + ([f"and {len(found) - MOST} more"] if len(found) > MOST else [])


def _both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype.is_floating_point
        and torch.equal(one.nan_to_num(), other.nan_to_num())
        and bool((one.isnan() == other.isnan()).all())
    )


def replicas(ours: Bits) -> list[str]:
    """Under DDP every rank has the same parameters and states."""
    own = {
        name: value
        for name, value in ours.items()
        if not name.startswith(("buffer", "random", "attribute", "task"))
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return [f"ranks differ: {problem}" for problem in differences(everyones[0], own)]


# The ranks of a group, and the process that forks them.


def group(folder: Path, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """The rows of cells of one world size, as they are done."""
    left = list(cells)
    while left:
        for row in _one_group(folder, list(left)):
            cell = left.pop(0)
            yield {"cell": str(cell), "model": cell.model, "documented": cell.restarts, **row}


def _one_group(folder: Path, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Until all cells are done, or one has ended by an exception."""
    world, port = cells[0].world, _free_port()
    context = multiprocessing.get_context("fork")
    ours: list[Connection] = []
    processes = []
    for number in range(world):
        here, there = context.Pipe(duplex=False)
        body = partial(_cells, folder=folder, cells=list(cells), out=there)
        process = context.Process(target=_rank, args=(number, world, port, folder, body))
        process.start()
        there.close()
        ours.append(here)
        processes.append(process)
    try:
        for cell in cells:
            rows, raised = _rows_of(cell, ours, folder)
            yield _together(cell, rows, raised)
            if raised or len(rows) < world:
                return
    finally:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def _rows_of(cell: Cell, ranks: list[Connection], folder: Path) -> tuple[dict[int, Any], dict[int, Any]]:
    """What the ranks say of a cell: rows, and exceptions. Whoever says nothing hangs, or was waiting for one
    that raised."""
    rows: dict[int, Any] = {}
    raised: dict[int, Any] = {}
    seconds = SECONDS
    while len(rows) + len(raised) < len(ranks):
        waiting = [one for number, one in enumerate(ranks) if number not in rows and number not in raised]
        ready = wait(waiting, seconds)
        if not ready:
            break
        for one in ready:
            number = ranks.index(one)
            try:
                kind, content = one.recv()
            except (EOFError, OSError):
                kind, content = "raised", _of_error_file(folder, cell, number)
            (rows if kind == "row" else raised)[number] = content
        if raised and cell.who == "last":
            seconds = 0.5  # for what the others have to say, who may wait for ever
        elif raised:
            seconds = 15.0
    return rows, raised


def _of_error_file(folder: Path, cell: Cell, number: int) -> dict[str, Any]:
    """Of a rank that launcher itself has ended, from a thread."""
    written = read_json(RunDir(folder / cell.model / cell.folder).attempt(0).error(number)) or {}
    return {
        "text": written.get("exception", "the process ended and wrote no error"),
        "oom": written.get("failure") == "gpu-oom",
        "why_not": written.get("why_not_in_process"),
    }


def _together(cell: Cell, rows: dict[int, Any], raised: dict[int, Any]) -> dict[str, Any]:
    if raised:
        return _of_exceptions(cell, raised)
    if len(rows) < cell.world:
        missing = sorted(set(range(cell.world)) - rows.keys())
        return {"way": "hang", "problems": [f"ranks {missing} hang"], "seconds": SECONDS}
    problems = [f"rank {number}: {one}" for number, row in rows.items() for one in row["problems"]]
    if cell.restarts is not None and not MODELS[cell.model].coupled:
        problems.append(f"repeated in process, though it is documented as a restart: {cell.restarts}")
    seconds = max(row["seconds"] for row in rows.values())
    return {"way": rows[0]["way"], "problems": problems, "seconds": seconds}


def _of_exceptions(cell: Cell, raised: dict[int, Any]) -> dict[str, Any]:
    """A restart is fine where it is documented, when the failing ranks raised the memory's own exception."""
    failing = {cell.world - 1} if cell.who == "last" else set(range(cell.world))
    problems = [
        f"rank {number}: {one['text']}"
        for number, one in sorted(raised.items())
        if not one["oom"] and (number in failing or not _peer_left(one["text"]))
    ]
    if (
        not problems
        and cell.restarts is None
        and not any(UNKNOWN in str(one["why_not"]) for one in raised.values())
    ):
        one = next(iter(raised.values()))
        problems.append(f"ended the attempt: {one['why_not'] or one['text']}")
    if not problems and not any(one["why_not"] for one in raised.values()):
        problems.append("nothing says why the step is not repeated in process")
    if not failing <= raised.keys():
        problems.append(f"ranks {sorted(failing - raised.keys())} did not raise")
    because = next((one["why_not"] for one in raised.values() if one["why_not"]), None)
    return {"way": "restart", "because": because, "problems": problems, "seconds": 0.0}


def _peer_left(text: str) -> bool:
    return "Connection closed by peer" in text or "Connection reset by peer" in text


def _rank(number: int, world: int, port: int, folder: Path, body: Callable[[Rank], None]) -> None:
    """A rank in a forked process, which leaves without destructors."""
    os.environ.update(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    with open(folder / f"log {number}", "a", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    code = 1
    try:
        rank = one_rank(RunDir(folder), number=number, local=number, world=world, per_node=world)
        join_ranks(rank)
        body(rank)
        if world > 1:
            dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    leave(code)


def _cells(rank: Rank, folder: Path, cells: Sequence[Cell], out: Connection) -> None:
    """One after the other, until one ends by an exception."""
    for cell in cells:
        print(f"== {cell}", flush=True)
        try:
            out.send(("row", tried(rank, folder / cell.model, cell)))
        except BaseException as error:
            where = _where_of(error)
            words = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            oom, why_not = isinstance(error, torch.OutOfMemoryError), where and where.why_not
            out.send(("raised", {"text": words, "oom": oom, "why_not": why_not}))
            raise


def _where_of(error: BaseException) -> Where | None:
    """Of the trainer that raised it: in the frame of its `train`."""
    trace = error.__traceback__
    while trace is not None:
        if isinstance(trainer := trace.tb_frame.f_locals.get("self"), Trainer):
            return trainer.where
        trace = trace.tb_next
    return None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _ready_to_fork(models: Sequence[str]) -> None:
    """Import here, once, what a rank would import, and keep it out of each rank's garbage collection."""
    for module in ("torch._dynamo", *(MODELS[model].task.partition(":")[0] for model in models)):
        importlib.import_module(module)  # an optimizer imports the first
    gc.collect()
    gc.freeze()


def results(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """A row for each cell: those of one device first, those that end by an exception last."""
    _ready_to_fork(sorted({cell.model for cell in cells}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in {cell.model for cell in cells}:
            (folder / model).mkdir()
        ordered = sorted(cells, key=lambda cell: (cell.world, cell.restarts is not None))
        for _, same in itertools.groupby(ordered, key=lambda cell: cell.world):
            yield from group(folder, list(same))


def whole_that_knew(folder: Path, cell: Cell, step: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the run that takes `recipe` from `step` on, as a checkpoint has them."""

    def body(rank: Rank) -> None:
        change = (step, recipe)
        trained = Trained(rank, folder / "knew", MODELS[cell.model], cell.asked, "never", change=change)
        whole = trained.whole()
        if rank.first:
            torch.save(whole, folder / "whole.pt")

    _ready_to_fork([cell.model])
    folder.mkdir(parents=True)
    port, context = _free_port(), multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(n, cell.world, port, folder, body)) for n in range(cell.world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    return torch.load(folder / "whole.pt")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--representative", action="store_true", help="few cells of each model")
    parser.add_argument("--only", default="", help="cells whose names hold this text")
    options = parser.parse_args()
    few, rows = options.representative, []
    cells = [
        one
        for model in options.model or MODELS
        for one in (representative(model) if few else cells_of(model))
    ]
    for row in results([one for one in cells if options.only in str(one)]):
        rows.append(row)
        print(
            f"{row['cell']:72} {row['way']:10} {row['seconds']:5.2f} s  {'; '.join(row['problems'])}"[:400],
            flush=True,
        )
    wrong = [row for row in rows if row["problems"]]
    print(f"{len(rows)} cells, {len(wrong)} with problems")
    if options.out:
        replace_json(options.out, rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    raise SystemExit(main())
