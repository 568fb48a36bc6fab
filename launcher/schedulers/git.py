"""The environment for git commands about a folder."""

from __future__ import annotations

import os

_REPOSITORY_VARIABLES = frozenset(
    f"GIT_{name}"
    for name in (
        "DIR", "WORK_TREE", "INDEX_FILE", "PREFIX", "COMMON_DIR", "OBJECT_DIRECTORY",
        "ALTERNATE_OBJECT_DIRECTORIES",
    )
)  # fmt: skip
"Variables of `git rev-parse --local-env-vars`. In hooks they may name another repository."


def environment() -> dict[str, str]:
    """Return our environment, in which git finds the repository by the folder and answers in English."""
    kept = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    return {**kept, "LC_ALL": "C"}
