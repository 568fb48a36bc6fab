"""Every file of a run directory: who writes it, how it changes, and where it goes if there are copies.

`copies`: the local copies of runs on other machines (login nodes, SSH hosts, RunPod's volumes). `nodes`: the
run directories of one job's nodes if they share no folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

Writer = Literal["submission", "verbs", "job script", "supervisor", "worker", "rank", "doctor"]
"`worker`: the process that starts one rank and reads its output."

Change = Literal["once", "grows", "replaced", "request", "withdrawn"]
"""`request`: written once, and deleted when the run is resumed. `withdrawn`: written once, and deleted if the
run could not be resumed with it."""

Copies = Literal["sent", "both", "record", "log", "name", "never"]
"""`sent`: written in the copy. `both`: written on both sides. `record`: copied with every update. `log`:
copied when logs are requested. `name`: only its name is copied."""

Nodes = Literal["", "to node 0", "from node 0"]


class RunFile(NamedTuple):
    path: str
    """Below the run directory. `*` is any text within one name; a path that ends with a slash is a whole
    folder."""
    writer: Writer
    change: Change
    copies: Copies
    nodes: Nodes = ""


ATTEMPT = "attempts/*"
# In the order in which nodes exchange them: a reader of one file expects those above it to be complete.
FILES = (
    RunFile("run.json", "submission", "once", "sent"),
    RunFile("plan.json", "submission", "once", "sent"),
    RunFile("scripts/*.sh", "submission", "once", "sent"),
    RunFile("scripts/*.sbatch", "submission", "once", "sent"),
    RunFile("scripts/*.json", "submission", "once", "sent"),
    RunFile("plans/*/*.json", "submission", "withdrawn", "sent"),
    RunFile("plans/*/scripts/*.sh", "submission", "withdrawn", "sent"),
    RunFile("plans/*/scripts/*.sbatch", "submission", "withdrawn", "sent"),
    RunFile("plans/*/scripts/*.json", "submission", "withdrawn", "sent"),
    RunFile("events.jsonl", "supervisor", "grows", "both", "to node 0"),
    RunFile("state.json", "supervisor", "replaced", "both"),
    RunFile("metrics.jsonl", "rank", "grows", "record"),
    RunFile("supervisor.lock", "supervisor", "replaced", "never"),
    RunFile("supervisor.log", "supervisor", "grows", "record"),
    RunFile("supervisor.{node}.log", "supervisor", "grows", "record", "to node 0"),
    RunFile("slurm-*.out", "job script", "grows", "record"),
    RunFile("slurm-*.exit", "job script", "once", "record"),
    RunFile("slurm-excluded", "job script", "request", "both"),
    RunFile("slurm-unfit", "job script", "request", "both"),
    RunFile("pod-node-*.log", "job script", "grows", "record"),
    RunFile("pod-*.stop", "job script", "once", "record"),
    RunFile("pod-*.done", "job script", "once", "record"),
    RunFile("cancel", "verbs", "request", "sent", "from node 0"),
    RunFile("closed.json", "supervisor", "once", "record", "from node 0"),
    RunFile(f"{ATTEMPT}/recipe.json", "supervisor", "once", "record", "from node 0"),
    RunFile(f"{ATTEMPT}/snapshot.json", "verbs", "replaced", "sent", "from node 0"),
    RunFile(f"{ATTEMPT}/logs/node-{{node}}/rank-*.out", "worker", "grows", "log", "to node 0"),
    RunFile(f"{ATTEMPT}/logs/node-{{node}}/rank-*.err", "worker", "grows", "log", "to node 0"),
    RunFile(f"{ATTEMPT}/logs/node-{{node}}/torchrun.err", "supervisor", "grows", "log", "to node 0"),
    RunFile(f"{ATTEMPT}/memory/rank-*.jsonl", "rank", "grows", "log", "to node 0"),
    RunFile(f"{ATTEMPT}/memory/rank-*.json", "rank", "once", "log"),
    RunFile(f"{ATTEMPT}/stop", "supervisor", "request", "record", "to node 0"),
    RunFile(f"{ATTEMPT}/errors/rank-*.json", "rank", "once", "record", "to node 0"),
    RunFile(f"{ATTEMPT}/exits/rank-*.json", "worker", "once", "record", "to node 0"),
    RunFile(f"{ATTEMPT}/first-step.json", "worker", "once", "record"),
    RunFile(f"{ATTEMPT}/verdict.json", "supervisor", "once", "record"),
    RunFile(f"{ATTEMPT}/nodes/node-{{node}}.alive.json", "supervisor", "replaced", "never", "to node 0"),
    RunFile(f"{ATTEMPT}/nodes/node-{{node}}.ended.json", "supervisor", "once", "never", "to node 0"),
    RunFile(f"{ATTEMPT}/nodes/node-{{node}}.checked.json", "supervisor", "once", "never", "to node 0"),
    RunFile(f"{ATTEMPT}/nodes/node-00.alive.json", "supervisor", "replaced", "never", "from node 0"),
    RunFile(f"{ATTEMPT}/nodes/abort.json", "supervisor", "once", "never", "from node 0"),
    RunFile(f"{ATTEMPT}/next.json", "supervisor", "once", "record", "from node 0"),
    RunFile(f"{ATTEMPT}/doctor/order-*.json", "doctor", "once", "record", "from node 0"),
    RunFile(f"{ATTEMPT}/doctor/node-{{node}}-*.json", "doctor", "once", "record", "to node 0"),
    RunFile(f"{ATTEMPT}/doctor/pulse-{{node}}.json", "doctor", "replaced", "record", "to node 0"),
    RunFile(f"{ATTEMPT}/doctor/rank-*.json", "rank", "once", "record", "to node 0"),
    RunFile(f"{ATTEMPT}/open.json", "supervisor", "once", "record", "from node 0"),
    RunFile("report.html", "supervisor", "replaced", "never"),
    RunFile("checkpoints/", "rank", "once", "name"),
    RunFile("tensorboard/", "rank", "grows", "never"),
    RunFile("wandb/", "rank", "grows", "never"),
    RunFile("submitit/", "submission", "once", "never"),
)


def _suffixes(files: Iterable[RunFile]) -> tuple[str, ...]:
    """Return the suffixes of these files, such as `.jsonl`, sorted. Files without a suffix are left out."""
    return tuple(sorted({PurePosixPath(file.path).suffix for file in files} - {""}))


GROWING = _suffixes(file for file in FILES if file.change == "grows")
"Only files with these endings grow; a copy needs only their new end. All others are replaced as a whole."

LOG_FOLDERS = tuple(sorted({PurePosixPath(file.path).parts[2] for file in FILES if file.copies == "log"}))
"Folders of an attempt that are copied only when logs are asked for."

COPIED_FILES = tuple(file for file in FILES if file.copies not in ("never", "name"))

NOT_COPIED_FOLDERS = tuple(
    sorted(
        {file.path[:-1] for file in FILES if file.path.endswith("/")}
        | {PurePosixPath(file.path).parent.name for file in FILES if file.copies == "never"} - {""}
    )
)
"Names of folders from which no file is copied."

COPIED_NAMES = tuple(
    sorted(
        {
            f"*{path.suffix}" if path.suffix else path.name
            for path in map(PurePosixPath, (f.path for f in COPIED_FILES))
        }
    )
)
"Patterns of the names of all files that are copied."

REPLACED = _suffixes(file for file in COPIED_FILES if file.change != "grows")
"The endings of files that are copied and do not grow."

REQUESTS = tuple(file.path for file in FILES if file.writer == "verbs")
"Files by which a user asks something of a run."

SENT = tuple(file.path for file in FILES if file.copies in ("sent", "both"))
"Files that are sent to the run directory after they were written in a copy."

SUBMITTED = tuple(
    dict.fromkeys(
        PurePosixPath(file.path).parts[0]
        for file in FILES
        if file.writer == "submission" and file.copies == "sent"
    )
)
"Files and folders that only a submission writes."

DELETED = tuple(file.path for file in FILES if file.change in ("request", "withdrawn") and file.path in SENT)
"Files that are deleted in the run directory after they were deleted in a copy."


def expression(path: str, node: int | None = None) -> str:
    """Return the regular expression of a row's path. `node`: only the files of this node. Names that begin
    with a dot never match: such files are not finished, or lead out of the directory."""
    number = r"\d+" if node is None else f"{node:02d}"
    names = (re.escape(name).replace(r"\{node\}", number).replace(r"\*", "[^/]*") for name in path.split("/"))
    return "/".join(rf"(?!\.){name}" for name in names)
