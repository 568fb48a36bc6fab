"""Memory that others have published, beside what launcher says of the same model, recipe and ranks.

memory_published.json holds each figure with its source, and how the two runs differ. `complete` marks rows
whose recipe is published whole; only these judge the estimate. Rows without a recipe here give the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memory_tables import budget, filled, markdown  # noqa: E402

from launcher.memory import accuracy  # noqa: E402
from launcher.memory.estimate import Estimate  # noqa: E402
from launcher.memory.states import Ranks, states_of  # noqa: E402
from launcher.spec.cluster import Gpu  # noqa: E402
from launcher.spec.job import Job  # noqa: E402
from launcher.spec.mesh import Part  # noqa: E402
from launcher.spec.quantities import GIB  # noqa: E402
from launcher.spec.recipe import Recipe  # noqa: E402
from launcher.tasks.llama import LanguageModel  # noqa: E402
from launcher.train import loss  # noqa: E402
from launcher.train.activations import selective  # noqa: E402
from launcher.train.tracing.compiled import compiled  # noqa: E402
from launcher.train.tracing.task_source import TaskSource  # noqa: E402
from tests.memory.predicted import peaks, predicted  # noqa: E402

DATA = Path(__file__).with_suffix(".json")
BUDGET = (
    "The terms of each estimate, in GiB: categories of tensors at the highest peak, `allocator` for what "
    "PyTorch's allocator holds beside them (workspaces, gaps, memory of other streams), and what is outside "
    "of PyTorch, which the published figures do not contain."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--save",
        action="store_true",
        help="write benchmarks/results/memory-published.json and .md, and the error band of the estimate",
    )
    options = parser.parse_args()
    data = json.loads(DATA.read_text())
    rows = [_row(entry, data) for entry in data["entries"]]
    found = errors()
    parts = [abs(error) for error in found.values()]
    judged = (
        f"Published whole: {len(parts)} rows, error {statistics.median(parts):.1%} in the median, "
        f"{max(parts):.1%} at most."
    )
    terms = filled([_budget(entry, data) for entry in data["entries"] if "recipe" in entry])
    text = f"{markdown(rows)}\n\n{judged}\n\n{BUDGET}\n\n{markdown(terms)}\n\n{_notes(data)}"
    print(text)
    if options.save:
        result = {"command": "python benchmarks/memory_published.py --save", "rows": rows, "budgets": terms}
        accuracy.save("others", found)
        target = ROOT / "benchmarks" / "results" / "memory-published.json"
        target.write_text(json.dumps(result, indent=1) + "\n")
        page = target.with_suffix(".md")
        page.write_text(page.read_text().partition("| run |")[0] + f"{text}\n")
    return 0


def _row(entry: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    states = said = "-"
    if "recipe" in entry:
        job, recipe, ranks = _case(entry, data)
        shapes = TaskSource(job, ROOT).shapes(recipe.precision, None, Part.of(recipe, 0))
        states = f"{states_of(shapes, recipe, ranks).gpu.total / GIB:.1f}"
        said = _said(entry, job, recipe, ranks)
    return {
        "run": entry["name"],
        "published GiB": entry["published"],
        "which is": entry["what"],
        "states GiB": states,
        "launcher GiB": said,
        "notes": " ".join(f"[{note}]" for note in entry["notes"]),
    }


def _budget(entry: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    return {"run": entry["name"], **budget(_estimate(entry, *_case(entry, data)))}


def errors() -> dict[str, float]:
    """Return estimate / published - 1 of each row whose recipe is published whole."""
    found = {}
    data = json.loads(DATA.read_text())
    for entry in data["entries"]:
        if entry.get("complete"):
            estimate = _estimate(entry, *_case(entry, data))
            published = float(entry["published"]) * GIB
            found[entry["name"]] = estimate.reserved / published - 1
    return found


def _said(entry: dict[str, Any], job: Job, recipe: Recipe, ranks: Ranks) -> str:
    try:
        estimate = _estimate(entry, job, recipe, ranks)
    except RuntimeError as error:
        return f"not traced: {error}"
    allocated = max(max(phases.values()) for phases in peaks(estimate).values())
    size = allocated if entry["what"].startswith("allocated") else estimate.reserved
    try:
        return f"{size / GIB:.1f} ({size / GIB / float(entry['published']) - 1:+.0%})"
    except ValueError:  # it says that it did not fit
        return f"{size / GIB:.1f}"


def _estimate(entry: dict[str, Any], job: Job, recipe: Recipe, ranks: Ranks) -> Estimate:
    # torch's own contexts keep the last product of a block as well.
    all_products = patch.object(selective, "contexts", selective.compiled_contexts)
    # torchtitan before pytorch/torchtitan#1094 gathered the embedding and the head in the root.
    in_root = patch.object(LanguageModel, "outer_units", lambda *_: [])
    # torchtitan also compiles the loss since pytorch/torchtitan#1033; launcher compiles blocks only.
    fused = patch.object(loss, "cross_entropy", compiled(loss.cross_entropy, "cuda"))
    with (
        all_products if entry.get("keeps_last_product") else nullcontext(),
        in_root if entry.get("units_in_root") else nullcontext(),
        fused if entry.get("compiled_loss") else nullcontext(),
    ):
        return predicted(job, recipe, ranks.world, "cuda", Gpu(type=entry["gpu"], count=8, memory=80 * GIB))


def _case(entry: dict[str, Any], data: dict[str, Any]) -> tuple[Job, Recipe, Ranks]:
    recipe = Recipe.model_validate({"grad_accum": 1, "optimizer": "adamw", **entry["recipe"]})
    job = Job.model_validate(
        {
            "name": "published",
            "task": "launcher.tasks.llama:LanguageModel",
            "args": {**data["shapes"][entry["shape"]], "context": entry["context"]},
            "batch": {"global": recipe.micro_batch_size * entry["ranks"]},
            "steps": 2,
            "adapter": entry.get("adapter"),
        }
    )
    return job, recipe, Ranks(entry["ranks"], min(entry["ranks"], 8), on_gpu=True)


def _notes(data: dict[str, Any]) -> str:
    sources = [f"- {name}: {where}" for name, where in data["sources"].items()]
    return "\n".join(
        [
            "Sources:",
            "",
            *sources,
            "",
            "Notes:",
            "",
            *(f"- [{key}] {note}" for key, note in data["notes"].items()),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
