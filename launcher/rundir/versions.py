"""Versions of installed packages, found without importing them."""

from __future__ import annotations

import functools
import importlib.metadata

DISTRIBUTION = "gpu-launcher"
"Name of launcher's package for pip. Its wheel begins with this name, with an underscore."


@functools.cache
def version_of(package: str) -> str | None:
    """The version; None if the package is not installed.

    Cached, because a sweep asks for each of its runs.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
