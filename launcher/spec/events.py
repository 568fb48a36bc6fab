"""What happens to a run: a class for each kind of line in events.jsonl, with the fields that readers rely on.

A line of a kind or with fields that this version does not know is read all the same: as a mapping an event
has everything that its line says.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from launcher.spec.forms import STAMP, fits
from launcher.spec.record import Record

KINDS: dict[str, type[Event]] = {}


class Event(Record):
    """A line of events.jsonl. One of a kind that this version does not know is an instance of this class."""

    _kind: ClassVar[str] = ""
    time: str = ""
    "When it was written."

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            cls._kind, KINDS[kind] = kind, cls

    def __init__(self, **fields: Any) -> None:
        super().__init__(event=self._kind, **fields)

    @property
    def kind(self) -> str:
        """The name on disk."""
        return str(self["event"])


def read_event(line: object) -> Event | None:
    """None for what is no event, or lacks what every version tells of its kind."""
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        return None
    return KINDS.get(line["event"], Event).read(line) if fits(line.get("time"), STAMP) else None


# Submission, written by schedulers and by the scripts that they run. More fields say where.


class Submitting(Event, kind="submitting"):
    """A scheduler is being asked."""

    submission: int | None = None


class Submitted(Event, kind="submitted"):
    """Somebody started the run: budgets count from here on."""

    handle: str | None = None
    command: list[str] | None = None


class Resubmitted(Submitted, kind="resubmitted"):
    """Somebody resumed the run."""


class Refused(Event, kind="refused"):
    """The scheduler did not take it."""

    reason: str | None = None


class Replanned(Event, kind="replanned"):
    """The run was resumed with another job or profile."""

    changed: Any = None
    set: list[str]
    "Texts of `--set`."


class Withdrawn(Event, kind="withdrawn"):
    """The new plan was taken back: the scheduler refused it."""


class Starting(Event, kind="starting"):
    """A supervisor is being started on this machine."""

    command: list[str] | None = None


class SlurmJob(Event, kind="job"):
    """A Slurm job began to run."""


class Requeued(Event, kind="requeued"):
    """The scheduler will start the run again."""

    reason: str | None = None


class Waiting(Event, kind="waiting"):
    """No pod is to be had now."""

    reason: str


class Twin(Event, kind="twin"):
    """A second job or pod of the same run ended itself."""


class Found(Event, kind="found"):
    """A pod whose creation was not answered."""


class Rejected(Event, kind="rejected"):
    """A pod that could not be ended yet."""


class RejectedEnded(Event, kind="rejected-ended"):
    """That pod has ended."""


# Attempts, written by the supervisor.


class SupervisorStarted(Event, kind="started"):
    """A supervisor lives."""

    host: str | None = None
    pid: int | None = None
    nodes: int | None = None


class _Sizes(Record):
    micro_batch_size: int
    grad_accum: int


class AttemptStarted(Event, kind="attempt"):
    """All workers are started with one recipe."""

    attempt: int
    recipe: Annotated[dict[str, Any], _Sizes]


class AttemptEnded(Event, kind="ended"):
    """The attempt was judged."""

    attempt: int
    failure: str
    reason: str
    action: str | None = None
    then: str | None = None
    in_vain: bool | None = None
    "Its ranks were killed while they stopped, and had written no checkpoint."


class RecipeChange(Event):
    """The recipe is another one from here on."""

    attempt: int | None = None
    in_process: bool | None = None
    changes: dict[str, tuple[Any, Any]] | None = None
    "Field -> [before, now]."
    reason: str | None = None
    because: str | None = None
    phase: str | None = None
    step: int | None = None
    rank: int | None = None
    why_not_in_process: str | None = None
    left_out: list[str] | None = None
    seconds: float | None = None


class Downgrade(RecipeChange, kind="downgrade"):
    """Memory ran out."""


class Climb(RecipeChange, kind="climb"):
    """A larger recipe, which had fitted before, fits again."""


class Retry(Event, kind="retry"):
    """The same recipe again."""

    reason: str


class Stopping(Event, kind="stopping"):
    """The ranks are asked to save and end."""

    reason: str


class Stalled(Event, kind="stalled"):
    """The ranks have printed nothing for too long, and are ended."""

    attempt: int | None = None
    seconds: float | None = None


class _LastState(Record):
    step: int
    reason: str
    checkpoint: int


class Finished(Event, kind="finished"):
    """No attempt follows, unless somebody or the scheduler starts the run again."""

    state: str | None = None
    failure: str | None = None
    reason: str | None = None
    last_state: Annotated[dict[str, Any], _LastState] | None = None
    "What became of the last complete step."
    by: str | None = None
    "Who says so in the place of a supervisor: `slurm` or `runpod`."


# Training, written by the ranks.


class Probed(Event, kind="probe"):
    """The micro-batch that fits on every rank."""

    attempt: int | None = None
    planned: int | None = None
    micro_batch_size: int
    asked: int | None = None
    "How many were tried."
    seconds: float


class ProbeSkipped(Event, kind="probe-skipped"):
    attempt: int | None = None
    reason: str | None = None


class RecoveryOff(Event, kind="recovery-off"):
    """Running out of memory is a restart."""

    attempt: int | None = None
    reason: str | None = None


class BatchNorm(Event, kind="batch-norm"):
    """The model has BatchNorm, which the job does not declare."""


class CouplesSamples(Event, kind="couples-samples"):
    """The loss couples samples, which the job does not declare."""

    attempt: int | None = None


class Resumed(Event, kind="resumed"):
    """The training goes on after this step."""

    step: int
    from_: str | None = None
    "`shared-memory`, `checkpoint`, or `nothing` with step 0."


class DataChanged(Event, kind="data-changed"):
    step: int | None = None
    reason: str


class StateNotSaved(Event, kind="state-not-saved"):
    """Attributes of the task change, and no checkpoint has them."""

    names: list[str] | None = None
    reason: str | None = None


class StepLeftOut(Event, kind="step-left-out"):
    step: int | None = None
    reason: str | None = None


class CheckpointSaved(Event, kind="checkpoint"):
    step: int
    path: str | None = None
    from_: str | None = None
    attempt: int | None = None


class CheckpointFailed(Event, kind="checkpoint-failed"):
    step: int
    reason: str
    from_: str | None = None
    attempt: int | None = None


class HandedOver(Event, kind="handover"):
    """The last step's state is in shared memory."""

    attempt: int
    step: int
    bytes: int
    seconds: float | None = None


class HandoverSkipped(Event, kind="handover-skipped"):
    attempt: int | None = None
    step: int | None = None
    reason: str


class MemoryAlert(Event, kind="memory-alert"):
    """A rank's peak passed `train.memory_alert`."""

    rank: int | None = None
    step: int | None = None
    bytes: int | None = None
    threshold: int | None = None


class AllocationRetries(Event, kind="allocation-retries"):
    """The GPU's allocator had to empty its cache."""

    rank: int | None = None
    step: int | None = None
    num_alloc_retries: int | None = None


class MemoryInFragments(Event, kind="memory-in-fragments"):
    """The GPU's allocator holds much more than the tensors need."""

    rank: int | None = None
    step: int | None = None
    reserved: int | None = None
    bytes: int | None = None


class MemorySnapshot(Event, kind="memory-snapshot"):
    rank: int | None = None
    step: int | None = None
    path: str | None = None
