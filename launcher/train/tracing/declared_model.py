"""Traces of a command job's declared model, as if the built-in entrypoint trained it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.memory.peaks import Like
from launcher.spec.job import Job
from launcher.train.task import TaskError
from launcher.train.tracing.task_source import TaskSource
from launcher.train.tracing.tracer import Tracer

TASK = "launcher.tasks.huggingface:CausalLM"
FIELD_OF = {"path": "plan.model", "context": "plan.length"}
"Arguments of the task, each with the job's field that gives it."


class DeclaredSource(TaskSource):
    """Traces the model of `plan.model: hf:PATH` with `plan.length`. Reads no weights, data or command."""

    def __init__(self, job: Job, workdir: Path, like: Like = "cuda") -> None:
        assert job.plan.model is not None
        self._path = workdir / job.plan.model.removeprefix("hf:")
        if not (self._path.is_file() or (self._path / "config.json").is_file()):
            raise TaskError(
                f"plan.model: {self._path} is neither a config.json of transformers nor a directory with one"
            )
        args = {"path": str(self._path), "context": job.plan.length, "pretrained": False}
        super().__init__(job.model_copy(update={"task": TASK, "args": args, "command": None}), workdir, like)

    def files(self) -> list[Path]:
        """Return the model's config, or its folder if it has none."""
        config = self._path / "config.json"
        return [config if config.is_file() else self._path]

    def _tracer(self, args: Mapping[str, Any] | None) -> Tracer:
        try:
            return super()._tracer(args)
        except TaskError as error:
            argument, colon, message = str(error).partition(": ")
            raise TaskError(f"{FIELD_OF.get(argument, argument)}{colon}{message}") from error
