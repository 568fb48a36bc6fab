"""Describe an image from inside: `python -m launcher.images.inside MODULE...` prints JSON.

With --health, check only what can change while a container runs, and give an exit code and a line for `docker
inspect`. It runs with the image's own Python and the standard library.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

SHM = Path("/dev/shm")
SHM_LEAST_FREE = 8 * 2**20
"Bytes. With less free space, a DataLoader worker is killed by a bus error."
SBOM = Path("/opt/launcher/sbom.cdx.json")


def report(modules: list[str]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "uid": os.getuid(),
        "first_process": Path("/proc/1/comm").read_text().strip(),
        "shm": os.statvfs(SHM).f_frsize * os.statvfs(SHM).f_blocks if SHM.is_dir() else 0,
        "distributions": distributions(),
        "imports": {name: _import(name) for name in modules},
        "cuda": getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None),
        "listed": _listed(),
        "commands": {name: _on_path(name) for name in ("launcher", "dumb-init", "gcc", "sshd")},
    }


def distributions() -> dict[str, str]:
    """Return name -> version of the packages that are installed for this Python."""
    versions = {
        item.metadata["Name"].lower().replace("_", "-"): item.version for item in metadata.distributions()
    }
    return dict(sorted(versions.items()))


def _import(name: str) -> str | None:
    """Return the error, or None if the import succeeds."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _listed() -> dict[str, str]:
    """Return name -> version of the Python packages in the image's own list of parts."""
    try:
        parts = json.loads(SBOM.read_text(encoding="utf-8"))["components"]
    except OSError:
        return {}
    return {part["name"]: part["version"] for part in parts if part["purl"].startswith("pkg:pypi/")}


def _on_path(name: str) -> bool:
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/sbin"]
    return any(os.access(f"{folder}/{name}", os.X_OK) for folder in folders)


def health() -> str | None:
    """Return the problem, or None if there is none."""
    if not SHM.is_dir():
        return f"{SHM} is missing"
    free = os.statvfs(SHM).f_frsize * os.statvfs(SHM).f_bavail
    if free < SHM_LEAST_FREE:
        return (
            f"{SHM} has {free / 2**20:.1f} MiB left: DataLoader workers die; start with a larger --shm-size"
        )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.images.inside")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="to import")
    parser.add_argument("--health", action="store_true")
    arguments = parser.parse_args()
    if arguments.health:
        problem = health()
        print(problem or "ok")
        return 0 if problem is None else 1
    print(json.dumps(report(arguments.modules)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
