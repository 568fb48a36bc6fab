"""Environment variables: launcher's own, those a job may set, and how a job's values reach its ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

RUNS = "LAUNCHER_RUNS"
"Set by the user: the folder for runs."

# Set by the supervisor for start.sh, the program that starts the ranks, the workers and the ranks.
RUN_DIR = "LAUNCHER_RUN_DIR"
RUN_ID = "LAUNCHER_RUN_ID"
ATTEMPT = "LAUNCHER_ATTEMPT"
NODES = "LAUNCHER_NODES"
NODE_RANK = "LAUNCHER_NODE_RANK"
STOP_FILE = "LAUNCHER_STOP_FILE"
"File that appears when the ranks should save and end."
SECRETS = "LAUNCHER_SECRETS"
"Names of the variables to mask, separated by commas."
SUPERVISED = "LAUNCHER_SUPERVISED"
"Pid of the supervisor."
WORKER = "LAUNCHER_WORKER"
"Pid of the worker that watches the rank. Set for the rank and its children."
ONLY_SAVE = "LAUNCHER_ONLY_SAVE"
"Set if the ranks only write the state in shared memory as a checkpoint and do not train."
ONLY_CHECK = "LAUNCHER_ONLY_CHECK"
"Set if start.sh only runs the doctor's checks of the node."
RENDEZVOUS_HOST = "LAUNCHER_RENDEZVOUS_HOST"
RENDEZVOUS_PORT = "LAUNCHER_RENDEZVOUS_PORT"
APART = "LAUNCHER_APART"
"Set if the nodes share no folder."

# Set by scripts.
CPU_BIND = "LAUNCHER_CPU_BIND"
"`node.cpu_bind`: a list of CPUs for each rank of the node, separated by spaces."
SETUP_DONE = "LAUNCHER_SETUP_DONE"
"Set if the batch script has run the profile's `setup:`."

# Set by the request for a pod.
SUBMISSION = "LAUNCHER_SUBMISSION"
MAX_SECONDS = "LAUNCHER_MAX_SECONDS"
DEADLINE = "LAUNCHER_DEADLINE"
"When the pod ends, in seconds since the epoch."
SECRETS_BY_NAME = "LAUNCHER_SECRETS_BY_NAME"
"Set if the environment has the values of the job's secrets under their names, wherever they come from."

# Set by the user, or by the sandbox, to use a different service than RunPod's.
RUNPOD_API = "LAUNCHER_RUNPOD_API"
RUNPOD_GRAPHQL = "LAUNCHER_RUNPOD_GRAPHQL"
RUNPOD_S3 = "LAUNCHER_RUNPOD_S3"
RUNPOD_PAUSE = "LAUNCHER_RUNPOD_PAUSE"
"Seconds before the first retry; each further pause is twice as long."

TRAVELS_AS = "LAUNCHER_ENV_"
"""Prefix of a job's variable until it reaches the rank. No script, torchrun or worker reads such a name, so a
job's variables do not affect them. The worker removes the prefix for the rank only."""

RESERVED_PREFIX = "LAUNCHER_"
# (pattern of refused names, reason)
_REFUSED = (
    (re.compile(r"LAUNCHER_.*"), f"names that begin with {RESERVED_PREFIX} are launcher's own"),
    (re.compile(r"_[a-z].*"), "names that begin with _ and a small letter are those of launcher's scripts"),
    # Documentation of torch 2.13, "torchrun", Environment Variables.
    (
        re.compile(r"RANK|(LOCAL|GROUP|ROLE)_RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME"
                   r"|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"),
        "launcher sets it for each rank",
    ),
# bash sets these itself, does not export them, or interprets them in a way that breaks a script.
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
    """Return the name. Raises ValueError if its value would not reach the rank or would break the start."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise ValueError(f"{name!r} is not a variable name: write letters, digits and _, no digit first")
    for pattern, why in _REFUSED:
        if pattern.fullmatch(name):
            raise ValueError(f"{name} cannot be set: {why}")
    return name


def travelling(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the job's variables, renamed so that only the worker passes them on."""
    return {f"{TRAVELS_AS}{name}": value for name, value in variables.items()}


def split(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return (variables for this process, variables for the rank under their own names)."""
    here = {name: value for name, value in environ.items() if not name.startswith(TRAVELS_AS)}
    job = {
        name.removeprefix(TRAVELS_AS): value for name, value in environ.items() if name.startswith(TRAVELS_AS)
    }
    return here, job
