"""The names under which frameworks report, as launcher writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
_HELD_OUT = ("eval_", "test_")
_LEFT_OUT = ("epoch", "total_flos", "num_input_tokens_seen", "num_tokens", "train_loss")
_LEFT_OUT_ENDS = ("_runtime", "_per_second", "_steps")


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step under launcher's names: `val_loss` is `eval_loss`, `train_loss` is `loss`.

    Epochs, tokens so far, and what the framework measured or averaged over the whole training are left out;
    so is what is not a number.
    """
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        ours = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        left_out = ours in _LEFT_OUT or any(one.endswith(_LEFT_OUT_ENDS) for one in (name, ours))
        if not left_out and not isinstance(value, str):
            found[_RENAMED.get(ours, ours)] = value
    return found


def counts_batches(metrics: Mapping[str, Any]) -> bool:
    """Return whether Lightning logs these metrics under a number of held-out batches instead of a step.

    It logs an `epoch` with everything except what an evaluation logs with `on_step=True`, for which it counts
    the batches of all evaluations.
    """
    return "epoch" not in metrics and of_evaluation(numbers_of(metrics))


def of_evaluation(names: Iterable[str]) -> bool:
    """Return whether all metrics, under launcher's names, are of held-out data."""
    return all(name.startswith(_HELD_OUT) for name in names)


def is_summary(metrics: Mapping[str, Any]) -> bool:
    """Return whether these are what transformers' Trainer logs at the end: times and means of the whole
    training.

    With `include_num_input_tokens_seen` each line has a `train_runtime`.
    """
    return "train_runtime" in metrics and "train_loss" in metrics
