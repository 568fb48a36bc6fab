"""Versions of installed packages, without importing them."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def version_of(package: str) -> str | None:
    """None where it is not installed. Kept: a sweep asks for each of its runs."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
