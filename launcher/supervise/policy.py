"""Choose what follows an attempt, from its failure class and the table of spec/failures.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.diagnosis.patterns import PORT_TAKEN
from launcher.diagnosis.remedies import remedy_of
from launcher.planning.oom_fallback import STATES_ALONE, less_for_states, lower, ways_to_save
from launcher.spec.events import (
    AttemptEnded,
    CheckpointFailed,
    CheckpointSaved,
    Downgrade,
    Event,
    Finished,
    HandedOver,
    Requeued,
    Retry,
    SlurmJob,
    SupervisorStarted,
    since_submission,
)
from launcher.spec.failures import FAILURES, Action, Budget
from launcher.spec.job import Job, Retries
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting
from launcher.spec.verdict import Verdict
from launcher.supervise.ignored_micro_batch import Earlier, ignores_micro_batch

SHARED_MEMORY = (
    "give the container more shared memory (docker run --shm-size=16g or --ipc=host; in Kubernetes an "
    "emptyDir with medium: Memory at /dev/shm), or use fewer DataLoader workers"
)


COMMAND_OOM_ADVICE = (
    "let the command itself need less: read the micro-batch ({micro_batch_size} in command:, or "
    "LAUNCHER_MICRO_BATCH_SIZE of its environment), checkpoint activations, shard or offload; or larger GPUs"
)
"Advice for a GPU OOM of a `command:`. launcher builds neither its model nor its optimizer."


PORT_ADVICE = (
    "another program listens at the rendezvous port of the ranks: `launcher resume RUN` takes another port, "
    "unless the script sets its own"
)


THEN = ", then `launcher"
"Start of the part of an advice that says what to do after the remedy."


SENT_CODE = "; `resume` uses the code that was sent, and sends it again only with `--set FIELD=VALUE`"
"Added to an advice to fix the code, if the run uses a copy of it."


def advice(verdict: Verdict, *, command: bool, recipe: Recipe | None = None, sent: bool = False) -> str:
    """Return what the user can do. RUN stands for the run. `command`: the job has a `command:`. `recipe`: the
    attempt's, if it is known. `sent`: the job's code was sent to another machine."""
    if verdict.memory is not None and verdict.memory.kind == "shared":
        return SHARED_MEMORY
    if verdict.failure == "gpu-oom" and command:
        return COMMAND_OOM_ADVICE
    if verdict.failure == "gpu-oom" and verdict.phase in STATES_ALONE:
        return less_for_states(verdict)
    if verdict.failure == "gpu-oom" and recipe is not None:
        return ways_to_save(recipe)
    texts = [verdict.exception or "", *(seen.text for seen in verdict.seen[:1])]
    if verdict.failure == "rendezvous-failed" and any(map(PORT_TAKEN.search, texts)):
        return PORT_ADVICE
    usual, then, rest = FAILURES[verdict.failure].advice.partition(THEN)
    copied = SENT_CODE if sent and verdict.failure == "user-error" else ""
    return f"{remedy_of(verdict.failure, texts) or usual}{then}{rest}{copied}"


@dataclass(frozen=True)
class Decision:
    """What follows an attempt. `recipe` is the next attempt's recipe, or None if no attempt follows."""

    action: Action
    recipe: Recipe | None
    reason: str
    left_out: tuple[str, ...] = ()
    "Planned rungs that need a restart and are skipped, each with the reason."
    leaves: tuple[int, ...] = ()
    "Nodes that the run leaves: it continues in a new submission without them."


def decide(
    verdict: Verdict,
    job: Job,
    recipe: Recipe,
    setting: Setting,
    spent: dict[Budget, int],
    planned: Sequence[Recipe] = (),
    earlier: Earlier = (),
) -> Decision:
    """Return the decision after an attempt.

    `spent` counts this run's earlier restarts by budget. `planned` is the plan's recipe and its ladder.
    """
    policy = FAILURES[verdict.failure]
    if verdict.confidence == "guess":
        policy = FAILURES["unknown"]  # too uncertain to change the recipe or to give up
    if policy.action == "retry-lower":
        return _lower(verdict, job, recipe, setting, spent.get("lower", 0), planned, earlier)
    if policy.action in ("done", "stop"):
        return Decision(policy.action, None, verdict.reason)
    if policy.budget is not None and spent.get(policy.budget, 0) >= _limit(job.retries, policy.budget):
        limit = _limit(job.retries, policy.budget)
        return Decision("stop", None, f"no retry is left (retries.{policy.budget}: {limit})")
    if policy.action == "requeue":
        return Decision("requeue" if job.requeue else "stop", None, verdict.reason)
    return Decision("retry-same", recipe, "retry with the same recipe")


def after_check(decision: Decision, unfit: Mapping[int, str], nodes: int, leaves: bool) -> Decision:
    """Return the decision after the nodes have examined themselves, before another attempt.

    `unfit` maps nodes to why they should start no rank. `leaves`: whether the run can continue without them.
    If all of several nodes are unfit, the run stays: the cause is the cluster, and other nodes would have it
    as well.
    """
    if not unfit:
        return decision
    faults = "; ".join(unfit.values())
    if leaves and (len(unfit) < nodes or nodes == 1):
        which = "it" if len(unfit) == 1 else "them"
        return Decision("requeue", None, f"{faults}: going on without {which}", leaves=tuple(sorted(unfit)))
    return replace(decision, reason=f"{decision.reason}, although {faults}")


def _lower(
    verdict: Verdict,
    job: Job,
    recipe: Recipe,
    setting: Setting,
    spent: int,
    planned: Sequence[Recipe],
    earlier: Earlier,
) -> Decision:
    """Return the next rung, or a decision to stop that says why there is none."""
    if verdict.memory is not None and verdict.memory.kind == "shared":
        return Decision("stop", None, "shared memory ran out; no recipe needs less of it")
    if job.command is not None and (why := ignores_micro_batch(job.command, recipe, verdict, earlier)):
        return Decision("stop", None, why)
    rung = lower(recipe, verdict, setting, planned)
    limit = _limit(job.retries, "lower")
    if rung.recipe is None or spent < limit:
        return Decision("retry-lower" if rung.recipe else "stop", rung.recipe, rung.reason, rung.left_out)
    why = (
        f"no retry is left (retries.lower: {limit})"
        if limit
        else "a downgrade is forbidden (retries.lower: 0 or --no-downgrade)"
    )
    return Decision("stop", None, f"{why}; next would have been: {rung.reason}")


_REQUEUED: dict[str, Budget] = {
    "preempted": "preemptions",
    "time-limit": "time_limits",
    "node-failed": "same",
    "unhealthy-node": "same",
}


def spent_budgets(events: Sequence[Event]) -> dict[Budget, int]:
    """Return the number of restarts by budget since a user last submitted or resumed the run.

    All supervisors of the run count. A scheduler's `requeued` counts if no supervisor wrote `finished` before
    it. Otherwise `finished` counts, unless the supervisor ended after its job was requeued.
    """
    spent: dict[Budget, int] = {}
    counted = requeued = False
    for event in since_submission(events):
        budget: Budget | None = None
        if isinstance(event, Downgrade):
            budget = "lower"
        elif isinstance(event, Retry):
            budget = "same"
        elif isinstance(event, Finished) and event.state == "interrupted":
            late = requeued and event.by is None
            # After any other failure, the run left a node that failed.
            budget, counted = None if late else _REQUEUED.get(event.failure or "", "same"), True
        elif isinstance(event, Requeued):
            budget, requeued = None if counted else _REQUEUED.get(event.reason or ""), True
        elif isinstance(event, SlurmJob | SupervisorStarted):
            counted, requeued = False, requeued and isinstance(event, SlurmJob)
        if budget is not None:
            spent[budget] = spent.get(budget, 0) + 1
    return spent


MAX_FRUITLESS = 3
"Starts in a row without a saved step, after which the run is not requeued."

FRUITLESS = (
    f"{MAX_FRUITLESS} starts in a row ended before a step was saved: allow the ranks more time to save "
    "(`stop_timeout`, `slurm.signal_seconds`), save more often, or ask for a longer time limit"
)


def fruitless_starts(events: Sequence[Event], *, command: bool) -> int:
    """Return how many supervisors in a row, up to the last one, ended without a new checkpoint.

    The count begins when a user last submitted or resumed the run. With `command`, a supervisor counts only
    if its ranks were killed because they did not end in time and had written nothing into the run's folder of
    checkpoints.
    """
    fruitless, begun, progress, handed_over = 0, False, command, False
    for event in since_submission(events):
        if isinstance(event, SupervisorStarted):
            fruitless = fruitless + 1 if begun and not (progress or handed_over) else 0
            begun, progress, handed_over = True, command, False
        elif isinstance(event, CheckpointSaved):
            progress = True
        elif isinstance(event, HandedOver):  # saved as a checkpoint when the run ends
            handed_over = True
        elif isinstance(event, CheckpointFailed) and event.from_ is not None:
            handed_over = False
        elif isinstance(event, AttemptEnded) and event.in_vain:
            progress = not command and progress
    return fruitless + 1 if begun and not (progress or handed_over) else 0


def downgrade_reasons(events: Sequence[Event]) -> list[str]:
    """Return the reason of every downgrade since a user last submitted or resumed the run."""
    return [str(event.reason) for event in since_submission(events) if isinstance(event, Downgrade)]


def _limit(retries: Retries, budget: Budget) -> int:
    return int(getattr(retries, budget))
