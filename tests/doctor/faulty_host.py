"""A host with faults: namespaces and mounts, limits, and libraries that stand in for a faulty system."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def needs_root(*commands: str) -> None:
    """Skip the test unless it runs as root with these commands."""
    if os.getuid() != 0:
        pytest.skip("mounts and network namespaces need root")
    for command in ("unshare", *commands):
        if shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{command} is not installed")
    if subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no mount and network namespaces here")


def in_mounts(script: str, command: Sequence[str]) -> list[str]:
    """The command in a mount namespace of its own, after a shell script that mounts."""
    needs_root()
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "bash",
        "-ec",
        f'{script}\nexec "$@"',
        "-",
        *command,
    ]


def stub(name: str, folder: Path) -> Path:
    """A library for LD_PRELOAD, built from a file beside this one."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build a library that stands in for a fault")
    library = folder / f"{name}.so"
    source = Path(__file__).parent / f"{name}.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library
