"""Names of environment variables: which ones a job, a profile or a secret can set, and how they travel."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRAVELS_AS = "LAUNCHER_ENV_"
"""Before a variable of the job. No script, torchrun or worker reads a name that begins like this, so a job's
variables change none of them; the worker takes the prefix off for the rank alone."""

RESERVED_PREFIX = "LAUNCHER_"
# Each pattern with what is wrong with such a name.
_REFUSED = (
    (re.compile(r"LAUNCHER_.*"), f"names that begin with {RESERVED_PREFIX} are launcher's own"),
    (re.compile(r"_[a-z].*"), "names that begin with _ and a small letter are those of launcher's scripts"),
    # Documentation of torch 2.13, "torchrun", Environment Variables.
    (
        re.compile(r"RANK|(LOCAL|GROUP|ROLE)_RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME"
                   r"|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"),
        "launcher sets it for each rank",
    ),
    # bash sets these itself, does not export them, or obeys them in a way that breaks a script.
    (
        re.compile(
            r"BASH(_.*|OPTS|PID)?|SHELLOPTS|UID|EUID|PPID|RANDOM|SRANDOM|SECONDS|LINENO|FUNCNAME|GROUPS|DIRSTACK"
            r"|EPOCHSECONDS|EPOCHREALTIME|HISTCMD|COMP_.*|OPTIND|OPTARG|OPTERR|PIPESTATUS|POSIXLY_CORRECT|PWD"
            r"|OLDPWD|SHLVL|IFS|_|PS4|EXECIGNORE|FUNCNEST|GLOBIGNORE"
        ),
        "bash keeps this variable for itself",
    ),
)  # fmt: skip


def usable_name(name: str) -> str:
    """The name itself. Raises ValueError for one whose value would not arrive, or would break the start."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise ValueError(f"{name!r} is no name of a variable: write letters, digits and _, no digit first")
    for pattern, why in _REFUSED:
        if pattern.fullmatch(name):
            raise ValueError(f"{name} cannot be set: {why}")
    return name


def travelling(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of the job, named so that only the worker hands them on."""
    return {f"{TRAVELS_AS}{name}": value for name, value in variables.items()}


def split(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(what is for this process, what is for the rank by its own names)."""
    here = {name: value for name, value in environ.items() if not name.startswith(TRAVELS_AS)}
    job = {
        name.removeprefix(TRAVELS_AS): value for name, value in environ.items() if name.startswith(TRAVELS_AS)
    }
    return here, job
