"""Every job state of Slurm 20.11 to 25.x: the launcher state it maps to, and its description in words."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.schedulers.slurm.records import RUNAWAY, JobRecord
from launcher.spec.signals import signal_name
from launcher.spec.verdict import EXIT_CODES, FailureClass


@dataclass(frozen=True)
class Meaning:
    """What a Slurm state means for the run."""

    state: str
    "A state of base.Status."
    failure: FailureClass | None
    words: str


# Used only if the supervisor could not write the run's own records, which are more precise.
SLURM_STATES: dict[str, Meaning] = {
    "PENDING": Meaning("submitted", None, "waits in the queue"),
    "CONFIGURING": Meaning("submitted", None, "has its nodes, which are being made ready or booted"),
    "POWER_UP_NODE": Meaning("submitted", None, "has its nodes, which are being switched on"),
    "REQUEUED": Meaning("submitted", None, "is back in the queue"),
    "REQUEUE_FED": Meaning("submitted", None, "is back in the queue of the federation"),
    "EXPEDITING": Meaning("submitted", None, "is back in the queue, before all others"),
    "REQUEUE_HOLD": Meaning("submitted", None, "is back in the queue and held there"),
    "SPECIAL_EXIT": Meaning("submitted", None, "is back in the queue and held there, marked SPECIAL_EXIT"),
    "RESV_DEL_HOLD": Meaning("submitted", None, "is held: its reservation was deleted"),
    "RUNNING": Meaning("running", None, "runs"),
    "RESIZING": Meaning("running", None, "runs, and its size is being changed"),
    "SIGNALING": Meaning("running", None, "runs, and a signal is being sent to it"),
    "UPDATE_DB": Meaning("running", None, "runs, and Slurm is updating the accounting database"),
    "SUSPENDED": Meaning(
        "running", None, "is suspended: it keeps its nodes' memory, and its processes are stopped"
    ),
    "STOPPED": Meaning(
        "running", None, "is stopped by SIGSTOP: it keeps its nodes, and its processes are stopped"
    ),
    "COMPLETING": Meaning("stopping", None, "is ending: some of its processes are still there"),
    "STAGE_OUT": Meaning("stopping", None, "has ended, and its files are being copied out"),
    "COMPLETED": Meaning("succeeded", "succeeded", "ended well"),
    "FAILED": Meaning("failed", "unknown", "failed"),
    "CANCELLED": Meaning("cancelled", "cancelled", "was cancelled"),
    "REVOKED": Meaning("cancelled", "cancelled", "was revoked: another cluster of the federation took it"),
    "TIMEOUT": Meaning("interrupted", "time-limit", "was ended at its time limit"),
    "DEADLINE": Meaning("failed", "time-limit", "was ended at its deadline"),
    "PREEMPTED": Meaning("interrupted", "preempted", "was preempted by a job of higher priority"),
    "NODE_FAIL": Meaning("failed", "node-failed", "lost a node"),
    "BOOT_FAIL": Meaning("failed", "node-failed", "never started: a node did not boot"),
    "LAUNCH_FAILED": Meaning(
        "failed", "node-failed", "never started: Slurm could not launch it on its nodes"
    ),
    "RECONFIG_FAIL": Meaning("failed", "node-failed", "never started: a node could not be configured"),
    "OUT_OF_MEMORY": Meaning("failed", "host-oom", "was ended for more host memory than it asked for"),
    RUNAWAY: Meaning("lost", "node-failed", "is running for accounting, but the controller does not know it"),
}


WITHOUT_SUPERVISOR = frozenset({"SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT"})
"States in which the supervisor is suspended too, or has ended, so that the run's records cannot show them."


def meaning(record: JobRecord) -> Meaning:
    """Return what the job's state means. A state that is not in the table means `lost` and is quoted."""
    known_state = SLURM_STATES.get(record.state)
    if known_state is None:
        return Meaning("lost", "unknown", f"is in the state {record.state}, which launcher does not know")
    if record.state == "FAILED":
        return _failed(record)
    if record.state == "CANCELLED" and record.cancelled_by == 0:
        return Meaning(
            known_state.state, known_state.failure, "was cancelled by an administrator or by Slurm itself"
        )
    return known_state


_CLASS_OF_EXIT = {code: failure for failure, code in EXIT_CODES.items()}

_NOT_SET_UP = 53
"The signal that Slurm reports if it could not open a job's input or output, or enter its directory."


def _failed(record: JobRecord) -> Meaning:
    """Return the meaning of FAILED.

    The batch script exits with the verdict's exit code, so accounting keeps the class.
    """
    if record.signal == _NOT_SET_UP:
        words = "could not be started: its working directory or its output file is not there or not writable"
        return Meaning("failed", "unknown", f"{words} on its node")
    if record.signal is not None:
        return Meaning("failed", "unknown", f"was ended by {signal_name(record.signal)}")
    if record.exit_code is None:
        return SLURM_STATES["FAILED"]
    failure = _CLASS_OF_EXIT.get(record.exit_code, "unknown")
    return Meaning("failed", failure, f"ended with exit code {record.exit_code}")
