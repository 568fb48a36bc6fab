"""The built-in training entrypoint: `python -m launcher.train`, started once per rank.

Importing this package does not import torch; accessing `Task` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.train.task import Task

__all__ = ["Task"]


def __getattr__(name: str) -> Any:
    if name == "Task":
        from launcher.train.task import Task

        return Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
