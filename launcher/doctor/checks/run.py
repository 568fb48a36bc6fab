"""Checks of the doctor's own run, which starts like any other run."""

from __future__ import annotations

from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Measured, Opinion

CONNECT_SECONDS = 20.0
"Usual upper limit for torch's rendezvous and the first collective, even with hundreds of ranks."


SILENT = Opinion(
    "broken",
    "answers",
    "The node did not examine itself: start.sh failed or did not run there, or the run folder is not the "
    "same folder or not writable on this node.",
    "Look at what the node printed: `launcher logs RUN --supervisor`. Mount the folder of paths.runs on "
    "every node.",
)


UNCONNECTED = Opinion(
    "broken",
    "all",
    "The ranks did not connect as those of a job do.",
    "`launcher why RUN` shows the first rank that failed, and `launcher logs RUN` its output.",
)


def connected(measured: Measured, expected: Expected) -> Opinion:
    if measured.value < expected.ranks:
        return UNCONNECTED._replace(expected=str(expected.ranks))
    return Opinion("good", str(expected.ranks))


def seconds(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"below {CONNECT_SECONDS:g} s"
    if measured.value < CONNECT_SECONDS:
        return Opinion("good", wanted)
    return Opinion("poor", wanted, "The ranks take long to connect.", "See the checks of the network below.")


ROWS = (
    Check(
        "answers", "node examined itself", "run", lambda measured, expected: Opinion("good", "answers"),
        lambda value: "answers", unmeasured=SILENT,
    ),
    Check(
        "alive", "node stays alive", "run",
        unmeasured=Opinion(
            "broken", "answers", "The node stopped answering: it crashed, was taken away, or a device or "
            "folder hangs there.",
            "Look at its console, `dmesg` and the scheduler's reason; leave it out (slurm.extra.exclude or "
            "ssh.hosts).",
        ),
    ),
    Check(
        "run-folder", "run folder", "run",
        unmeasured=Opinion(
            "broken", "writable", "This node cannot write into the run directory.",
            "Mount the folder of paths.runs writable on every node, for this user, with free space.",
        ),
    ),
    Check(
        "ranks", "ranks that connected", "run", connected, of_node=False, unmeasured=UNCONNECTED,
    ),
    Check("connect", "time to connect", "run", seconds, lambda value: f"{value:.2f} s", of_node=False),
)  # fmt: skip
