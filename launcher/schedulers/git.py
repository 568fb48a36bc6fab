"""Run git commands about a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_REPOSITORY_VARIABLES = frozenset(
    f"GIT_{name}"
    for name in (
        "DIR", "WORK_TREE", "INDEX_FILE", "PREFIX", "COMMON_DIR", "OBJECT_DIRECTORY",
        "ALTERNATE_OBJECT_DIRECTORIES",
    )
)  # fmt: skip
"Variables of `git rev-parse --local-env-vars`. In hooks they may name another repository."


def git(folder: Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a git command, which finds the repository by the folder and answers in English.

    Raises OSError if there is no git, and subprocess.TimeoutExpired.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    command, environment = ["git", "-C", str(folder), *arguments], {**kept, "LC_ALL": "C"}
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
    )
