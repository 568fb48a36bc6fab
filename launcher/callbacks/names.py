"""The names under which frameworks report, as launcher writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RENAMED = {"learning_rate": "lr"}
_PREFIXES = {
    "train_": "",
    "train/": "",
    "val_": "eval_",
    "val/": "eval_",
    "valid_": "eval_",
    "eval/": "eval_",
}
_LEFT_OUT = ("epoch", "total_flos", "num_input_tokens_seen")
_LEFT_OUT_ENDS = ("_runtime", "_per_second", "_steps")


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step under launcher's names: `val_loss` is `eval_loss`, `train_loss` is `loss`.

    Epochs, and speeds that the framework measured itself, are left out; so is what is not a number.
    """
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if name in _LEFT_OUT or name.endswith(_LEFT_OUT_ENDS) or isinstance(value, str):
            continue
        for prefix, ours in _PREFIXES.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
                break
        found[_RENAMED.get(name, name)] = value
    return found
