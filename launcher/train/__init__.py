"""The built-in training entrypoint: `python -m launcher.train`, started once per rank.

Importing this package does not import torch; accessing `Task` or `Pipeline` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.train.pipeline_parts import Pipeline
    from launcher.train.task import Task

__all__ = ["Pipeline", "Task"]


def __getattr__(name: str) -> Any:
    if name == "Task":
        from launcher.train.task import Task

        return Task
    if name == "Pipeline":
        from launcher.train.pipeline_parts import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
