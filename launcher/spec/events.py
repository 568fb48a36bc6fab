"""The events of a run: a class for each kind of line in events.jsonl, with the fields that readers use.

Unknown kinds and fields are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from launcher.spec.json_forms import STAMP, fits
from launcher.spec.json_object import Record

E = TypeVar("E", bound="Event")
KINDS: dict[str, type[Event]] = {}


class Event(Record):
    """A line of events.jsonl. Lines of an unknown kind are instances of this class itself."""

    _kind: ClassVar[str] = ""
    time: str = ""
    "When the event was written."
    handle: str | None = None
    "The job, process or pod that the event is about."

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            cls._kind, KINDS[kind] = kind, cls

    def __init__(self, **fields: Any) -> None:
        super().__init__(event=self._kind, **fields)

    @property
    def kind(self) -> str:
        """The kind's name in the file."""
        return str(self._data["event"])


def read_event(line: object) -> Event | None:
    """Return the event, or None if `line` is not an event or lacks a field that its kind requires."""
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        return None
    return KINDS.get(line["event"], Event).read(line) if fits(line.get("time"), STAMP) else None


def latest(events: Sequence[Event], *kinds: type[E]) -> E | None:
    """Return the latest event of one of these kinds."""
    return next((event for event in reversed(events) if isinstance(event, kinds)), None)


# Submission: written by schedulers and by the scripts that they run.


class Submitting(Event, kind="submitting"):
    """The scheduler is about to be asked to start the run."""

    submission: int | None = None
    seconds: int | None = None
    "RunPod: time limit of a pod."
    limits: dict[str, float] | None = None
    "RunPod: name of the GPU -> maximum price that is paid for it."


class Rental(Event):
    """An event that describes a pod if RunPod runs the run."""

    gpu: str | None = None
    "GPU type, or None for a pod without GPUs."
    cloud: str | None = None
    data_center: str | None = None
    usd_per_hour: float | None = None
    "Price of all pods of the run together."
    seconds: int | None = None
    "Time limit."
    since: str | None = None
    "When the pod was requested, if that was before this event; it costs money from then on."


class Submitted(Rental, kind="submitted"):
    """A user started the run. Retry budgets count from here."""

    command: list[str] | None = None


class Resubmitted(Submitted, kind="resubmitted"):
    """A user resumed the run."""


def since_submission(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events since a user last submitted or resumed the run."""
    last = max((at for at, event in enumerate(events) if isinstance(event, Submitted)), default=-1)
    return events[last + 1 :]


class Refused(Event, kind="refused"):
    """The scheduler refused the run."""

    reason: str | None = None


class Replanned(Event, kind="replanned"):
    """The run was resumed with another job or profile."""

    changed: Any = None
    set: list[str]
    "The texts of `--set`."


class Withdrawn(Event, kind="withdrawn"):
    """The new plan was taken back, because the scheduler refused it."""


class Starting(Event, kind="starting"):
    """A supervisor is being started on this machine."""

    command: list[str] | None = None


class SlurmJob(Event, kind="job"):
    """A Slurm job began to run."""


class Requeued(Rental, kind="requeued"):
    """The scheduler will start the run again."""

    reason: str | None = None


class Waiting(Event, kind="waiting"):
    """No pod is available now, or it is not the run's turn in its sweep."""

    reason: str
    queued: bool | None = None
    "Whether the run waits for its turn in its sweep."


class SecondEnded(Event, kind="twin"):
    """A second job or pod of the same run ended itself."""


class Found(Rental, kind="found"):
    """A pod was found whose creation was not confirmed."""


class DuplicateEnded(Event, kind="duplicate-ended"):
    """A second pod of one submission was ended."""

    pod: str | None = None
    usd: float | None = None
    "Its cost."


class Rejected(Rental, kind="rejected"):
    """A pod was rejected but could not be ended yet."""

    reason: str | None = None
    limit: float | None = None
    "Maximum price, in USD per hour."


class RejectedEnded(Event, kind="rejected-ended"):
    """The rejected pod has ended."""


# Attempts: written by the supervisor.


class SupervisorStarted(Event, kind="started"):
    """A supervisor has started."""

    host: str | None = None
    pid: int | None = None
    nodes: int | None = None


class _Sizes(Record):
    micro_batch_size: int
    grad_accum: int


class AttemptStarted(Event, kind="attempt"):
    """All workers are being started with one recipe."""

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
    "Whether its ranks were killed while stopping and had written no checkpoint."


class RecipeChange(Event):
    """The recipe changes from here on."""

    attempt: int | None = None
    in_process: bool | None = None
    changes: dict[str, tuple[Any, Any]] | None = None
    "Field -> [before, after]."
    reason: str | None = None
    because: str | None = None
    phase: str | None = None
    step: int | None = None
    rank: int | None = None
    why_not_in_process: str | None = None
    left_out: list[str] | None = None
    seconds: float | None = None


class Downgrade(RecipeChange, kind="downgrade"):
    """An OOM led to a recipe that needs less memory."""


class Climb(RecipeChange, kind="climb"):
    """A larger recipe that fitted before is used again."""


class Retry(Event, kind="retry"):
    """The same recipe is tried again."""

    reason: str


class Stopping(Event, kind="stopping"):
    """The ranks are asked to save and end."""

    reason: str


class Stalled(Event, kind="stalled"):
    """The ranks printed nothing for too long and are ended."""

    attempt: int | None = None
    seconds: float | None = None


class _LastState(Record):
    step: int
    reason: str
    checkpoint: int


class Finished(Event, kind="finished"):
    """No attempt follows, unless a user or the scheduler starts the run again."""

    state: str | None = None
    failure: str | None = None
    reason: str | None = None
    last_state: Annotated[dict[str, Any], _LastState] | None = None
    "What became of the last complete step."
    by: str | None = None
    "Source if no supervisor wrote this: `slurm` or `runpod`."


# Training: written by the ranks.


class Probed(Event, kind="probe"):
    """The probe found the micro-batch that fits on every rank."""

    attempt: int | None = None
    planned: int | None = None
    micro_batch_size: int
    asked: int | None = None
    "Number of micro-batches tried."
    seconds: float


class ProbeSkipped(Event, kind="probe-skipped"):
    attempt: int | None = None
    reason: str | None = None


class RecoveryOff(Event, kind="recovery-off"):
    """Recovery within the process is off, so an OOM leads to a restart."""

    attempt: int | None = None
    reason: str | None = None


class BatchNorm(Event, kind="batch-norm"):
    """The model has BatchNorm, but the job does not declare it."""


class CouplesSamples(Event, kind="couples-samples"):
    """The loss couples samples, but the job does not declare it."""

    attempt: int | None = None


class Resumed(Event, kind="resumed"):
    """Training continues after this step."""

    step: int
    from_: str | None = None
    "`shared-memory`, `checkpoint`, or `nothing` with step 0."


class AdapterWarning(Event, kind="adapter-warning"):
    """Layers whose adapters do not change in training, or that peft does not apply after an export."""

    names: list[str]
    reason: str


class DataChanged(Event, kind="data-changed"):
    step: int | None = None
    reason: str


class StateNotSaved(Event, kind="state-not-saved"):
    """Attributes of the task change but are not in any checkpoint."""

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
    """A rank's peak memory exceeded `train.memory_alert`."""

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
