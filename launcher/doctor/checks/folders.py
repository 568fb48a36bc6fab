"""Checks of the folders that a run writes to."""

from __future__ import annotations

from launcher.doctor.checks.row import Check, must_be
from launcher.doctor.values import Expected, Measured, Opinion
from launcher.spec.quantities import GIB, format_bytes

SPACE, SPACE_LEAST = 10 * GIB, 64 * 2**20
INODES, INODES_LEAST = 10_000, 100
SPEED = 50e6
"Bytes/s. A checkpoint of 8 billion parameters with AdamW, 96 GB, takes half an hour at this speed."


def space(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"at least {format_bytes(SPACE)}"
    if measured.value >= SPACE:
        return Opinion("good", wanted)
    full = measured.value < SPACE_LEAST
    cause = "The disk or quota is full." if full else "Little space is left for checkpoints and logs."
    cure = "Delete old runs with `launcher clean`, raise the quota, or set paths.runs to another folder."
    return Opinion("broken" if full else "poor", wanted, cause, cure)


def inodes(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"at least {INODES}"
    if measured.value >= INODES:
        return Opinion("good", wanted)
    cause = 'The file system has few inodes left: "No space left on device" with space left.'
    cure = "Delete many small files (caches, environments), or set paths.runs to another folder."
    return Opinion("broken" if measured.value < INODES_LEAST else "poor", wanted, cause, cure)


def write(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"at least {SPEED / 1e6:.0f} MB/s"
    if measured.value >= SPEED:
        return Opinion("good", wanted)
    return Opinion(
        "poor",
        wanted,
        "Checkpoints take long to write.",
        "Use a parallel file system for paths.runs, or a higher train.checkpoint_every.",
    )


_NO_REPLACE = Opinion(
    "broken",
    "replaces",
    "A rename does not replace the file of that name, so that records cannot be updated.",
    "Set paths.runs to a POSIX file system.",
)
_NO_LOCKS = Opinion(
    "poor",
    "excludes",
    "File locks (flock) do not work here. launcher then learns up to three minutes late that a "
    "supervisor has died, and two supervisors of one run do not notice each other.",
    "Mount NFS without `nolock` (NFS 4, or rpc.statd for NFS 3) and Lustre with `flock`, or set "
    "paths.runs to another folder.",
)
_OTHER_FILES = Opinion(
    "broken",
    "seen",
    "A node does not see the files that another one writes there: it has another folder of that name, or "
    "an old copy. Checkpoints of several nodes are then incomplete.",
    "Mount the same file system on every node, and set paths.runs to a folder in it.",
)
_NO_SHARED_LOCKS = Opinion(
    "poor",
    "excludes",
    "A file lock (flock) of one node is not seen on another one. launcher then learns up to three "
    "minutes late that a supervisor has died.",
    "Mount NFS without `nolock` or `local_lock`, and Lustre with `flock` instead of `localflock`.",
)
_UNWRITABLE = Opinion(
    "broken",
    "writable",
    "Files cannot be written here.",
    "Mount the folder writable for this user, free space, or set paths.runs or TMPDIR to another folder.",
)


def _speed(value: float) -> str:
    return f"{value / 1e6:.0f} MB/s"


ROWS = (
    Check(
        "folder", "folder", "node",
        unmeasured=Opinion(
            "broken", "answers", "Reading or writing in this folder hangs or fails.",
            "Look at the mount (`dmesg`, `mount`) and its server: a hard NFS mount waits forever.",
        ),
    ),
    Check("space", "free space", "node", space, format_bytes),
    Check("inodes", "free inodes", "node", inodes, lambda value: f"{value:,}"),
    Check("write", "write and sync", "node", write, _speed, unmeasured=_UNWRITABLE),
    Check("read", "read", "node", write, _speed, unmeasured=_UNWRITABLE),
    Check("rename", "rename", "node", must_be("replaces", _NO_REPLACE), unmeasured=_UNWRITABLE),
    Check(
        "workdir", "working directory", "node", alike="broken",
        alike_cure="Put the job's code where every node sees the same files.",
    ),
    Check("same-files", "files of other nodes", "network", must_be("seen", _OTHER_FILES), of_node=False),
    Check(
        "shared-locks", "file locks of other nodes", "network", must_be("excludes", _NO_SHARED_LOCKS),
        of_node=False, unmeasured=_NO_SHARED_LOCKS,
    ),
    Check("flock", "file locks", "node", must_be("excludes", _NO_LOCKS), unmeasured=_NO_LOCKS),
)  # fmt: skip
