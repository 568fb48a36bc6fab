"""Trackers that also receive the lines of metrics.jsonl: TensorBoard, Weights & Biases. Rank 0 only."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from launcher.spec.errors import first_line
from launcher.train.rank import Rank, SetupError

_BOOKKEEPING = ("time", "attempt", "step")


class Tracker(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Writes event files to `tensorboard/` of the run, one per attempt; TensorBoard shows one curve."""

    def __init__(self, rank: Rank) -> None:
        self._folder = str(rank.run.tensorboard)
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides the steps of an earlier attempt that this one repeats. The rank may be killed
            # at any time; flush_secs limits the loss to five seconds.
            self._writer = SummaryWriter(self._folder, purge_step=step, flush_secs=5)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One W&B run for all attempts. The API key and other settings come from WANDB_* variables."""

    def __init__(self, rank: Rank) -> None:
        import wandb

        job = rank.job
        # W&B does not allow / \ # ? % : in a project's name, nor more than 128 characters.
        project = os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "-", job.name)
        try:
            self._run = wandb.init(
                project=project,
                id=rank.run.id,
                name=rank.run.id,
                resume="allow",
                dir=str(rank.run.path),
                tags=list(job.tags),
                config={
                    "recipe": rank.recipe.model_dump(),
                    **job.model_dump(mode="json", by_alias=True, include=_SENT_FIELDS),
                },
                # Output of the ranks may contain secrets: launcher masks them in its logs, W&B would not.
                settings=wandb.Settings(console="off"),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise SetupError(f"train.trackers: wandb: {error}; WANDB_MODE=offline needs no key") from None
        # W&B's own step only increases and drops repeated steps, so curves use this one instead.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


# Fields of the job that are sent to W&B. `env` and `workdir` are private.
_SENT_FIELDS = {"name", "task", "args", "batch", "steps", "epochs", "resources", "train", "tags"}
_OPEN: dict[str, Callable[[Rank], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_trackers(names: Sequence[str]) -> None:
    """Raise SetupError if a tracker's package is not installed."""
    # A folder `wandb` with files of W&B looks like a package without an origin.
    specs = {name: importlib.util.find_spec(name) for name in names}
    if missing := [name for name, spec in specs.items() if spec is None or spec.origin is None]:
        raise SetupError(
            f"train.trackers: {', '.join(missing)} not installed on this node: "
            "install launcher's checkout with the extra `track` (pip install '.[track]' in it), "
            "or remove it from train.trackers"
        )


class Trackers:
    """The job's trackers. A tracker that fails is reported and not used any more."""

    def __init__(self, rank: Rank) -> None:
        """Open the trackers on rank 0. Raises SetupError for a tracker that is set up wrongly."""
        self.rank = rank
        self._open: dict[str, Tracker] = {}
        for name in rank.job.train.trackers if rank.first else ():
            try:
                self._open[name] = _OPEN[name](rank)
            except SetupError:
                raise
            except Exception as error:
                self._drop(name, error)

    def write(self, line: Mapping[str, Any]) -> None:
        """Send the numbers in a line of metrics.jsonl to the trackers."""
        if not self._open:
            return
        values = {
            name: value
            for name, value in line.items()
            if isinstance(value, int | float) and name not in _BOOKKEEPING
        }
        self._each(lambda tracker: tracker.write(line["step"], values))

    def close(self, failed: bool) -> None:
        self._each(lambda tracker: tracker.close(failed))
        self._open.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        """Stop using a tracker after an exception. Training continues, whatever a tracker raises."""
        self._open.pop(name, None)
        reason = first_line(error)
        self.rank.say(f"tracker {name} failed and is not used any more; training continues: {reason}")
