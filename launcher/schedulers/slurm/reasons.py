# ruff: noqa: E501
"""Explain Slurm's reasons for a pending job that are not limits of a QOS or account, from 20.11 to 25.x.

The list follows src/common/job_state_reason.c and its predecessor, slurm_protocol_defs.c.
"""

from __future__ import annotations

WAIT = "nothing to do but wait"
ADMIN = "ask the site's administrators"
RELEASE = "`scontrol release {id}` lets it go on"
SMALLER = "ask for less, or wait until your other jobs have ended"
UNKNOWN = "if it still waits for that in an hour, ask the site's administrators"
_NEVER = "it can never start: cancel it, set slurm.{0} or slurm.partition and submit again, or `scontrol update JobId={{id}} {1}=NAME`; yours are in `sacctmgr show assoc user=$USER format=account,qos`"
OTHER_ACCOUNT = _NEVER.format("account", "Account")
OTHER_QOS = _NEVER.format("qos", "QOS")
AGAIN = "cancel it, change the request and submit again"

# fmt: off
# Slurm's word -> (what it means, what to do).
REASONS: dict[str, tuple[str, str]] = {
    "None": ("the scheduler has not looked at it yet", "ask again in a minute"),
    "Priority": ("jobs of higher priority are before it", WAIT + "; a shorter time limit or fewer nodes let it be started in a gap"),
    "Resources": ("it is next, and waits for nodes to become free", WAIT + "; fewer nodes or GPUs may be free earlier"),
    "Dependency": ("it waits for other jobs ({dependency})", "see how those are with `squeue -j`"),
    "DependencyNeverSatisfied": ("it waits for a job that did not end as required ({dependency}), and would wait forever", AGAIN),
    "BeginTime": ("its earliest start time has not come yet", WAIT + "; a job that was put back into the queue waits some minutes"),
    "JobHeldUser": ("it is held", RELEASE),
    "JobHeldAdmin": ("an administrator, or Slurm after a failed start, holds it", "only an administrator can release it: " + ADMIN),
    "JobHoldMaxRequeue": ("it was put back into the queue too often (MaxBatchRequeue) and is held", "see why its starts failed, then " + RELEASE),
    "JobArrayTaskLimit": ("its array runs no more tasks at the same time (`--array=...%N`)", "`scontrol update JobId={id} ArrayTaskThrottle=N` raises that"),
    "PartitionNodeLimit": ("it asks for more or fewer nodes than its partition allows", AGAIN),
    "PartitionTimeLimit": ("its time limit is longer than its partition allows", "submit it again with a shorter resources.time: training continues in the next job by itself"),
    "PartitionDown": ("its partition starts no jobs at the moment", WAIT + ", or use another partition"),
    "PartitionInactive": ("its partition takes and starts no jobs at the moment", WAIT + ", or use another partition"),
    "PartitionConfig": ("its request does not fit its partition", AGAIN),
    "ReqNodeNotAvail": ("nodes that it needs are down, drained or reserved", "see `sinfo -R` and `scontrol show reservation`; a job that would end before a maintenance begins can still start: shorten resources.time"),
    "NodeDown": ("a node that it needs is down", WAIT + ", or leave that node out"),
    "FrontEndDown": ("no front end node is available", ADMIN),
    "BadConstraints": ("no node can ever fulfil its constraints", "correct slurm.constraint and the GPU request: `sinfo -o '%P %G %f'` shows what there is"),
    "Constraints": ("no node fulfils its constraints at the moment", "check slurm.constraint: `sinfo -o '%P %G %f'` shows what there is"),
    "Reservation": ("its reservation has not begun or is full", "see `scontrol show reservation`"),
    "ReservationDeleted": ("its reservation was deleted", AGAIN),
    "ReservationInvalid": ("its reservation cannot be used", AGAIN),
    "InvalidAccount": ("its account ({account}) is not valid here, or not yours any more", OTHER_ACCOUNT),
    "AccountNotAllowed": ("its account ({account}) may not use its partition ({partition})", OTHER_ACCOUNT),
    "InvalidQOS": ("its QOS ({qos}) is not valid here, or not yours any more", OTHER_QOS),
    "QOSNotAllowed": ("its QOS ({qos}) may not be used with its account or partition", OTHER_QOS),
    "QOSUsageThreshold": ("its QOS needs more of your fair share than is left", WAIT + ", or use another QOS"),
    "QOSJobLimit": ("its QOS runs no more jobs at the same time", SMALLER),
    "QOSResourceLimit": ("its QOS gives no more resources at the same time", SMALLER),
    "QOSTimeLimit": ("its QOS has used up its time", ADMIN),
    "AssociationJobLimit": ("your account runs no more jobs at the same time", SMALLER),
    "AssociationResourceLimit": ("your account gets no more resources at the same time", SMALLER),
    "AssociationTimeLimit": ("your account has used up its time", ADMIN),
    "AccountingPolicy": ("a limit of your account or QOS holds it back; Slurm does not say which one", "see `sacctmgr show assoc user=$USER` and `sacctmgr show qos`"),
    "MaxMemPerLimit": ("it asks for more memory than its partition allows on a node or CPU", "lower resources.memory_per_node"),
    "Licenses": ("licences that it asks for are in use", "see `scontrol show licenses`"),
    "BurstBufferResources": ("the burst buffer is full", WAIT),
    "BurstBufferStageIn": ("its files are being copied into the burst buffer", WAIT),
    "BurstBufferOperation": ("a burst buffer operation failed", ADMIN),
    "PowerNotAvail": ("there is not enough power for it", WAIT),
    "PowerReserved": ("the power that it needs is reserved", WAIT),
    "MaxPoweredUpNodes": ("the site has as many nodes switched on as it allows", WAIT),
    "MpiPortsBusy": ("the ports for MPI are taken on its nodes", WAIT),
    "Prolog": ("its nodes are being prepared (Prolog)", WAIT),
    "Cleaning": ("its nodes are being cleaned up after its last start", WAIT),
    "FedJobLock": ("another cluster of the federation may be starting it", WAIT),
    "SchedDefer": ("an immediate start was asked for, and the scheduler defers", WAIT),
    "JobLaunchFailure": ("its last start failed", "see the node's state with `sinfo -R`; " + ADMIN),
    "SystemFailure": ("Slurm, a file system or the network failed", ADMIN),
    "NonZeroExitCode": ("its last start ended with an error", "see `launcher why`, then " + RELEASE),
    "RaisedSignal": ("its last start was ended by a signal", "see `launcher why`, then " + RELEASE),
    "TimeLimit": ("its last start reached the time limit", WAIT),
    "InactiveLimit": ("its last start was inactive too long", ADMIN),
    "OutOfMemory": ("its last start ran out of host memory", "raise resources.memory_per_node and submit again"),
    "DeadLine": ("it cannot end before its deadline any more", AGAIN),
}
# fmt: on

# fmt: off
# Slurm also writes whole sentences. These are the first words of them.
SENTENCES: tuple[tuple[str, tuple[str, str]], ...] = (
    ("Nodes required for job are DOWN, DRAINED", ("nodes that it needs are down, drained or reserved for partitions of higher priority", "see `sinfo -R`; " + WAIT)),
    ("Job's account not", ("its account ({account}) may not use its partition ({partition})", OTHER_ACCOUNT)),
    ("Job's QOS not permitted", ("its QOS ({qos}) may not use its partition ({partition})", OTHER_QOS)),
    ("launch failed requeued held", ("Slurm could not start it on its nodes, put it back and holds it", "see `sinfo -R`, then " + RELEASE)),
    ("job requeued in held state", ("it was put back into the queue and is held", RELEASE)),
    ("job requeued in special exit state", ("it was put back into the queue, marked SPECIAL_EXIT, and is held", RELEASE)),
    ("user env retrieval failed requeued held", ("Slurm could not read your environment on the node, and holds it", "check your shell's start files, then " + RELEASE)),
    ("Prolog failure", ("the site's prolog failed on a node", ADMIN)),
)
# fmt: on
