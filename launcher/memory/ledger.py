"""What was measured is kept, and corrects later estimates.

One small JSON file per run in one folder, written whole and never changed, under a name that nobody else
makes: any number of runs on any number of machines may share the folder. A file that is torn, foreign or of
another version is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Sequence
from math import log2
from pathlib import Path
from statistics import median

from pydantic import JsonValue, NonNegativeInt, PositiveInt

from launcher.rundir.files import replace_json
from launcher.rundir.time import now
from launcher.rundir.versions import version_of
from launcher.spec.base import Value
from launcher.spec.cluster import Cluster
from launcher.spec.drill import BUDGET, parse_budget
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe

NEWEST = 200
"Entries of one family that are read, the newest: enough for a median, and a bound on the time it takes."
NEAREST = 9
"Entries that a correction rests on, at most."
SIZE_FIELDS = frozenset({"micro_batch_size", "grad_accum"})


class Family(Value):
    """What must be alike for one run's measurement to tell something of another's memory."""

    task: str
    "`package.module:Class`, whatever its arguments."
    gpu: str
    "As the vendor writes it; `cpu`."
    torch: str
    "Major and minor version."

    @property
    def prefix(self) -> str:
        """How the names of its files begin."""
        text = "\0".join((self.task, self.gpu, self.torch))
        return hashlib.sha256(text.encode()).hexdigest()[:16] + "-"


class Entry(Value):
    """One run: what it needed, and what had been predicted. All sizes in bytes, of the rank with the most."""

    family: Family
    args: dict[str, JsonValue]
    "Of the task: the model's and the batch's shapes follow from them."
    parameters: PositiveInt | None = None
    "How many the model has, where the plan knew."
    recipe: Recipe
    ranks: PositiveInt
    ranks_per_node: PositiveInt
    measured: dict[str, PositiveInt]
    "The most that tensors held in the `first step` (or `resume`), and in `steady state`."
    predicted: dict[str, PositiveInt] = {}
    "The same before the run, where it was estimated for this recipe."
    reserved: PositiveInt | None = None
    "The most that PyTorch's allocator held; only a GPU has one."
    retries: NonNegativeInt = 0
    "How often that allocator freed its cache to satisfy a request: `reserved` was at its limit."
    ran_out: tuple[Recipe, ...] = ()
    "Under which memory ran out in this run, before it went on with `recipe`."
    capacity: PositiveInt | None = None
    "Of each rank's device, where known."
    versions: dict[str, str] = {}
    time: str = ""
    "UTC, of the record."
    run: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured / predicted, the highest of the peaks that are known as both; None when there is none."""
        both = self.measured.keys() & self.predicted.keys()
        if not both:
            return None
        return max(self.measured[name] for name in both) / max(self.predicted[name] for name in both)


class Correction(Value):
    """By what to multiply an estimate of what tensors hold."""

    factor: float
    "The median of measured / predicted."
    entries: int
    "How many it rests on."
    band: float | None
    "The largest relative distance of one of them from the factor; None for a single entry, which has none."
    differs: tuple[str, ...]
    "Fields of the recipe, other than the sizes of batches, in which any of them differs."


def family_of(job: Job, cluster: Cluster, *, on_gpu: bool) -> Family | None:
    """None for a foreign command, and where torch's version is not known."""
    if job.task is None or (version := version_of("torch")) is None:
        return None
    gpu = cluster.node.gpu
    kind = gpu.type if on_gpu and gpu is not None else "cpu"
    return Family(task=job.task, gpu=kind, torch=minor(version))


def minor(version: str) -> str:
    """`"2.13.0+cpu"` -> `"2.13"`."""
    return ".".join(version.split(".")[:2])


def default_folder(runs_root: Path) -> Path:
    """`ledger/` beside the folder that holds the run directories."""
    return runs_root.absolute().parent / "ledger"


def record(folder: Path, entry: Entry) -> Path:
    """Write an entry; its file. Raises OSError where the folder cannot be made or written."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = entry if entry.time else entry.model_copy(update={"time": now()})
    stamp = "".join(char for char in entry.time if char.isalnum())
    path = folder / f"{entry.family.prefix}{stamp}-{secrets.token_hex(4)}.json"
    replace_json(path, entry.model_dump(mode="json"))
    return path


def entries(folder: Path, family: Family) -> tuple[Entry, ...]:
    """The newest of a family, the oldest of them first; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    ours = sorted(name for name in names if name.startswith(family.prefix) and name.endswith(".json"))
    found = []
    for name in ours[-NEWEST:]:
        with contextlib.suppress(OSError, ValueError):  # pydantic's ValidationError is a ValueError
            entry = Entry.model_validate_json((folder / name).read_bytes())
            if entry.family == family:
                found.append(entry)
    return tuple(found)


def correction(known: Sequence[Entry], recipe: Recipe) -> Correction | None:
    """From the entries nearest to `recipe`: fewest fields changed, then the micro-batch, then the newest.

    None when no entry has a prediction beside its measurement.
    """
    usable = [
        (
            _changed(entry.recipe, recipe),
            abs(log2(entry.recipe.micro_batch_size / recipe.micro_batch_size)),
            ratio,
        )
        for entry in reversed(known)
        if (ratio := entry.ratio) is not None
    ]
    if not usable:
        return None
    fewest = min(len(changed) for changed, _, _ in usable)
    near = sorted((one for one in usable if len(one[0]) == fewest), key=lambda one: one[1])[:NEAREST]
    ratios = [ratio for _, _, ratio in near]
    factor = median(ratios)
    return Correction(
        factor=factor,
        entries=len(near),
        band=max(abs(ratio / factor - 1) for ratio in ratios) if len(near) > 1 else None,
        differs=tuple(sorted(set().union(*(changed for changed, _, _ in near)))),
    )


def too_large(known: Sequence[Entry], recipe: Recipe, ranks: int, capacity: int | None) -> tuple[Entry, ...]:
    """An entry of each run on as many devices of the same capacity that ran out of memory under this recipe
    or a smaller micro-batch of it; or under a larger one, and went on with a smaller one. The newest first;
    none that a later run contradicts. One alone may have met a failure that passed."""
    alike = [one for one in known if capacity and (one.capacity, one.ranks) == (capacity, ranks)]
    if all(_changed(one, recipe) for entry in alike for one in entry.ran_out):
        return ()  # soon: most recipes are of no entry
    found: dict[str, Entry] = {}
    held = 0  # samples at once, by a later run
    for entry in reversed(alike):
        for one in entry.ran_out:
            fits = 0 if _changed(one, entry.recipe) else entry.recipe.micro_batch_size
            least = max(held, fits) + 1 if fits else max(held + 1, one.micro_batch_size)
            told = one.micro_batch_size > held and recipe.micro_batch_size >= least
            if told and not _changed(one, recipe):
                found.setdefault(entry.run, entry)
        if not _changed(entry.recipe, recipe):
            held = max(held, entry.recipe.micro_batch_size)
    return tuple(found.values())


def tells_more(entry: Entry, known: Sequence[Entry]) -> bool:
    """Whether later plans can learn from it: a prediction beside its measurement, what ran out of memory, or
    that its recipe held, which was known to be too large."""
    alike = [one for one in known if one.args == entry.args]
    holds = too_large(alike, entry.recipe, entry.ranks, entry.capacity)
    return bool(entry.predicted or entry.ran_out or holds)


def capacity_of(job: Job, cluster: Cluster, *, on_gpu: bool) -> int | None:
    """Bytes that each rank has on its device; on the CPU the budget of a trial. None: not known."""
    if on_gpu:
        return cluster.node.gpu.memory if cluster.node.gpu is not None else None
    return parse_budget(job.env.get(BUDGET, ""))


def _changed(one: Recipe, other: Recipe) -> set[str]:
    return one.changes_from(other).keys() - SIZE_FIELDS
