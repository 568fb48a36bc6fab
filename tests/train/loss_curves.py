"""The loss curves of many recipes, in real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.train.runs import measure


def curves(recipes: list[dict[str, Any]], folder: Path, ranks: int, **how: Any) -> list[Any]:
    """The loss curve of each, in real ranks, or the error it ended with. `how`: of `measure`."""
    (folder / "nvme").mkdir(parents=True)
    (folder / "recipes.json").write_text(json.dumps(recipes))
    env = {"RECIPES": str(folder / "recipes.json"), "NVME_DIR": str(folder / "nvme"), **how.pop("env", {})}
    per_node = 2 if ranks == 4 else None
    answer: list[Any] = measure("matrix.py", folder, ranks, per_node, env, **how)
    return answer


def distance(curve: list[float], expected: list[float]) -> float:
    """The largest relative difference of a loss."""
    return max(abs(ours - theirs) / theirs for ours, theirs in zip(curve, expected, strict=True))
