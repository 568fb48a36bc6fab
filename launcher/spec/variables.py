"""Names of environment variables: launcher's own, those that a job can set, and how these travel."""

from __future__ import annotations

import re
from collections.abc import Mapping

RUNS = "LAUNCHER_RUNS"
"The user's: the folder for runs."

# Set by the supervisor for start.sh, torchrun, workers and ranks.
RUN_DIR = "LAUNCHER_RUN_DIR"
RUN_ID = "LAUNCHER_RUN_ID"
ATTEMPT = "LAUNCHER_ATTEMPT"
NODES = "LAUNCHER_NODES"
NODE_RANK = "LAUNCHER_NODE_RANK"
STOP_FILE = "LAUNCHER_STOP_FILE"
"Appears when the ranks are to save and end."
SECRETS = "LAUNCHER_SECRETS"
"Names of the variables to mask, with commas between."
SUPERVISED = "LAUNCHER_SUPERVISED"
"The pid of the supervisor."
WORKER = "LAUNCHER_WORKER"
"The pid of the worker that watches the rank: the rank and what it starts have it."
ONLY_SAVE = "LAUNCHER_ONLY_SAVE"
"Ranks that have it write what they find in shared memory as a checkpoint and do not train."
RENDEZVOUS_HOST = "LAUNCHER_RENDEZVOUS_HOST"
RENDEZVOUS_PORT = "LAUNCHER_RENDEZVOUS_PORT"
APART = "LAUNCHER_APART"
"The nodes share no folder."

# Set by scripts.
CPU_BIND = "LAUNCHER_CPU_BIND"
"`node.cpu_bind`: a list of CPUs for each rank of the node, with blanks between."
SETUP_DONE = "LAUNCHER_SETUP_DONE"
"The batch script has run the profile's `setup:`."

# Set by the request for a pod.
SUBMISSION = "LAUNCHER_SUBMISSION"
MAX_SECONDS = "LAUNCHER_MAX_SECONDS"
DEADLINE = "LAUNCHER_DEADLINE"
"When the pod ends, in seconds since the epoch."

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
