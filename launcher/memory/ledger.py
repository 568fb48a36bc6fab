"""The ledger: memory that earlier runs measured, which corrects later estimates.

Each run writes one small JSON file to a folder. The file is written whole under a unique name and never
changes, so any number of runs on any number of machines can share the folder. A file that is torn, foreign or
of another version is skipped.
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
from launcher.spec.cluster import Cluster
from launcher.spec.fire_drill import BUDGET, parse_budget
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.value import Value

NEWEST = 200
"Newest entries of one family that are read: enough for a median, and a bound on the time to read them."
NEAREST = 9
"Maximum number of entries that a correction uses."
SIZE_FIELDS = frozenset({"micro_batch_size", "grad_accum"})


class Family(Value):
    """The properties that runs must share before one run's measurement can correct another's estimate."""

    task: str
    "`package.module:Class`, without its arguments."
    gpu: str
    "The vendor's name, or `cpu`."
    torch: str
    "Major and minor version."

    @property
    def prefix(self) -> str:
        """The start of the names of this family's files."""
        text = "\0".join((self.task, self.gpu, self.torch))
        return hashlib.sha256(text.encode()).hexdigest()[:16] + "-"


class Entry(Value):
    """The measured and the predicted memory of one run, in bytes, for the rank that needed the most."""

    family: Family
    args: dict[str, JsonValue]
    "What determines the shapes of the model and of the batch: the arguments of the task and the adapter."
    parameters: PositiveInt | None = None
    "Number of the model's parameters, if the plan knew it."
    recipe: Recipe
    ranks: PositiveInt
    ranks_per_node: PositiveInt
    measured: dict[str, PositiveInt]
    "Peak bytes of tensors in the `first step` (or `resume`), and in `steady state`."
    predicted: dict[str, PositiveInt] = {}
    "The same peaks as estimated before the run, if this recipe was estimated."
    reserved: PositiveInt | None = None
    "Peak bytes that PyTorch's CUDA allocator held; None on a CPU."
    retries: NonNegativeInt = 0
    "How often that allocator freed its cache to satisfy a request. `reserved` was then at its limit."
    ran_out: tuple[Recipe, ...] = ()
    "Recipes that ran out of memory in this run before it continued with `recipe`."
    capacity: PositiveInt | None = None
    "Memory of each rank's device, if known."
    versions: dict[str, str] = {}
    time: str = ""
    "UTC time of the record."
    run: str = ""

    @property
    def ratio(self) -> float | None:
        """Highest measured / highest predicted peak, over peaks that have both; None if no peak has both."""
        both = self.measured.keys() & self.predicted.keys()
        if not both:
            return None
        return max(self.measured[name] for name in both) / max(self.predicted[name] for name in both)


class Correction(Value):
    """A factor for the estimated bytes of tensors."""

    factor: float
    "Median of measured / predicted."
    entries: int
    "Number of entries behind the factor."
    band: float | None
    "Largest relative distance of an entry from the factor; None for a single entry."
    differs: tuple[str, ...]
    "Fields of the recipe, except batch sizes, in which at least one entry differs."


def family_of(job: Job, cluster: Cluster, torch: str | None, *, on_gpu: bool) -> Family | None:
    """Return the family of the job's runs; None for a command, or if torch's version is unknown.

    `torch`: the version, such as `2.13.0+cpu`.
    """
    if job.task is None or torch is None:
        return None
    gpu = cluster.node.gpu
    kind = gpu.type if on_gpu and gpu is not None else "cpu"
    return Family(task=job.task, gpu=kind, torch=".".join(torch.split(".")[:2]))


def default_folder(runs_root: Path) -> Path:
    """Return `ledger/`, next to the folder that holds the run directories."""
    return runs_root.absolute().parent / "ledger"


def record(folder: Path, entry: Entry) -> Path:
    """Write an entry and return its path. Raises OSError if the folder cannot be made or written."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = entry if entry.time else entry.model_copy(update={"time": now()})
    stamp = "".join(char for char in entry.time if char.isalnum())
    path = folder / f"{entry.family.prefix}{stamp}-{secrets.token_hex(4)}.json"
    replace_json(path, entry.model_dump(mode="json"))
    return path


def entries(folder: Path, family: Family) -> tuple[Entry, ...]:
    """Return the newest entries of a family, oldest first; empty if there is no folder."""
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


def correction(earlier: Sequence[Entry], recipe: Recipe) -> Correction | None:
    """Return the correction for `recipe`, or None if no entry has a prediction for its measurement.

    Uses the nearest entries: fewest changed fields first, then the nearest micro-batch, then the newest.
    """
    usable = [
        (
            _changed(entry.recipe, recipe),
            abs(log2(entry.recipe.micro_batch_size / recipe.micro_batch_size)),
            ratio,
        )
        for entry in reversed(earlier)
        if (ratio := entry.ratio) is not None
    ]
    if not usable:
        return None
    fewest = min(len(changed) for changed, _, _ in usable)
    near = sorted((row for row in usable if len(row[0]) == fewest), key=lambda row: row[1])[:NEAREST]
    ratios = [ratio for _, _, ratio in near]
    factor = median(ratios)
    return Correction(
        factor=factor,
        entries=len(near),
        band=max(abs(ratio / factor - 1) for ratio in ratios) if len(near) > 1 else None,
        differs=tuple(sorted(set().union(*(changed for changed, _, _ in near)))),
    )


def too_large(
    earlier: Sequence[Entry], recipe: Recipe, ranks: int, capacity: int | None
) -> tuple[Entry, ...]:
    """Return one entry of each run that shows this recipe to be too large, the newest first.

    Such a run had as many devices of the same capacity. It ran out of memory under this recipe with this
    micro-batch or a smaller one; or with a larger one, and continued with a micro-batch below this one.
    Entries that a later run contradicts are left out. A single entry may be due to a transient failure.
    """
    same_device = [e for e in earlier if capacity and (e.capacity, e.ranks) == (capacity, ranks)]
    if all(_changed(failed, recipe) for entry in same_device for failed in entry.ran_out):
        return ()  # the common case, found early
    by_run: dict[str, Entry] = {}
    largest_fit = 0  # largest micro-batch that a later run could hold
    for entry in reversed(same_device):
        for failed in entry.ran_out:
            fits = 0 if _changed(failed, entry.recipe) else entry.recipe.micro_batch_size
            least = max(largest_fit, fits) + 1 if fits else max(largest_fit + 1, failed.micro_batch_size)
            counts = failed.micro_batch_size > largest_fit and recipe.micro_batch_size >= least
            if counts and not _changed(failed, recipe):
                by_run.setdefault(entry.run, entry)
        if not _changed(entry.recipe, recipe):
            largest_fit = max(largest_fit, entry.recipe.micro_batch_size)
    return tuple(by_run.values())


def is_useful(entry: Entry, earlier: Sequence[Entry]) -> bool:
    """Return whether later plans can learn from an entry.

    They can if it has a prediction or an OOM, or if its recipe ran although it was known to be too large.
    """
    same_args = [e for e in earlier if e.args == entry.args]
    was_too_large = too_large(same_args, entry.recipe, entry.ranks, entry.capacity)
    return bool(entry.predicted or entry.ran_out or was_too_large)


def capacity_of(job: Job, cluster: Cluster, *, on_gpu: bool) -> int | None:
    """Return the bytes of each rank's device, or on a CPU the budget of a trial; None if unknown."""
    if on_gpu:
        return cluster.node.gpu.memory if cluster.node.gpu is not None else None
    return parse_budget(job.env.get(BUDGET, ""))


def _changed(one: Recipe, other: Recipe) -> set[str]:
    return one.changes_from(other).keys() - SIZE_FIELDS
