"""Warn the code that calls the Python API."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable


def warn_caller(lines: Iterable[str]) -> None:
    """Attribute a UserWarning for each line to the line outside of launcher that called it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("launcher."):
        level, frame = level + 1, frame.f_back
    for line in lines:
        warnings.warn(line, stacklevel=level)
