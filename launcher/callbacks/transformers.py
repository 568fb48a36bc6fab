"""A callback for transformers' Trainer: `Trainer(..., callbacks=[LogCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from launcher.callbacks.names import is_summary, numbers_of
from launcher.rundir.metrics_log import record


class LogCallback(TrainerCallback):
    """Records what the Trainer logs, every `logging_steps` and after each evaluation."""

    def __init__(self) -> None:
        self._step = 0
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count from the checkpoint on with which a resumed training begins."""
        self._step, self._tokens = state.global_step, int(state.num_input_tokens_seen)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Record one line. The summary at the end of the training is left out."""
        if logs is None or is_summary(logs):
            return
        numbers = numbers_of(logs)
        if state.global_step > self._step:
            each = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            numbers["samples"] = (state.global_step - self._step) * each
            if state.num_input_tokens_seen > self._tokens:
                numbers["tokens"] = int(state.num_input_tokens_seen) - self._tokens
        self._step, self._tokens = state.global_step, int(state.num_input_tokens_seen)
        record(state.global_step, numbers, steps=state.max_steps)
