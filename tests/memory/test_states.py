"""The closed form of the states against what real ranks hold: equal to the byte, on every rank."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import broken_rules
from tests.train.recipes import OPTIMIZER, PLAIN, setting
from tests.train.runs import measure

TASKS: tuple[dict[str, Any], ...] = (
    {"task": "launcher.tasks.gpt:PydocGPT", "args": {"layers": 1, "dim": 72, "heads": 2, "context": 16}},
    {
        "task": "launcher.tasks.brain:BrainAutoencoder",
        "args": {"shape": "tiny"},
        "model": {"batch_norm": True},
    },
    {"task": "models:Odd", "args": {"tied": True}, "model": {"batch_norm": True}},
    {"task": "models:Odd", "args": {"frozen": True}, "model": {"batch_norm": True}},
    {"task": "models:Unused", "model": {"batch_norm": True}, "train": {"find_unused_parameters": True}},
)
OFFLOADS = ("none", "cpu", "cpu-optimizer", "nvme-optimizer")
SHARDINGS = {1: ("none", "fsdp"), 2: ("fsdp", "ddp", "zero1", "fsdp-keep"), 4: ("hybrid", "zero1")}


def cases(ranks: int) -> list[dict[str, Any]]:
    """Every optimizer sharded, and every sharding with every offload; tasks and the other axes take turns."""
    names = [name for name in OPTIMIZER if not name.startswith("paged")]
    turns = zip(
        itertools.cycle(names),
        itertools.cycle(("fp32", "bf16", "bf16-mixed")),
        itertools.cycle(("each", "last")),
    )
    each = ("fsdp", "zero1") if ranks == 2 else ()
    fields = [{"sharding": sharding, "optimizer": name} for sharding in each for name in names]
    for sharding, offload in itertools.product(SHARDINGS[ranks], OFFLOADS):
        name, precision, sync = next(turns)
        more = {"optimizer": name, "precision": precision, "grad_sync": sync}
        fields.append({"sharding": sharding, "offload": offload, **more})
    made = [Recipe.model_validate({**PLAIN, **one, "micro_batch_size": 2, "grad_accum": 2}) for one in fields]
    runs = [one for one in made if not broken_rules(one, setting(ranks))]
    # The models differ in what 8-bit states depend on: row lengths, sizes, embeddings.
    return [
        {"task": task, "recipe": recipe.model_dump()}
        for number, recipe in enumerate(runs)
        for task in (
            TASKS[:3]
            if recipe.optimizer == "adamw-8bit" and recipe.offload == "none"
            else (TASKS[number % len(TASKS)],)
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 4))])
def test_the_states_of_every_rank_are_what_the_arithmetic_says(ranks: int, tmp_path: Path) -> None:
    asked = cases(ranks)
    (tmp_path / "cases.json").write_text(json.dumps(asked))
    here = Path(__file__).parent
    measure(str(here / "held.py"), tmp_path, ranks, 2 if ranks == 4 else None)
    wrong = []
    for rank in range(ranks):
        answers = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for case, (measured, computed) in zip(asked, answers, strict=True):
            if measured != computed:
                wrong.append(f"rank {rank}: {json.dumps(case)}\nmeasured {measured}\ncomputed {computed}")
    assert not wrong, f"{len(wrong)} of {len(asked) * ranks}\n" + "\n".join(wrong[:6])
