"""The task and its data. They are opened before the first call to CUDA, because this forks the workers."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.spec.recipe import WHOLE_LOSS
from launcher.train.checkpoints.folder import complete_checkpoints
from launcher.train.data.data import EvaluationData, TrainingData
from launcher.train.phase import Where
from launcher.train.rank import Rank
from launcher.train.rng import seed_all
from launcher.train.seeds import derive_seed
from launcher.train.task import Task, TaskError, load_task


@dataclass(frozen=True)
class Feed:
    task: Task
    training: TrainingData
    held_out: EvaluationData | None
    steps: int
    "Steps of the whole run."


def open_feed(rank: Rank, where: Where) -> Feed:
    """Load the task and its data, and fork the workers, without talking to other ranks.

    The workers begin with the step after the newest checkpoint that this rank sees. If the ranks agree on
    another checkpoint, the workers begin anew. Raises TaskError and SetupError.
    """
    seed_all(derive_seed("model", rank.job.train.seed))
    with where.during("init", users=True):
        task = load(rank)
        training, held_out = _training(task, rank), _held_out(task, rank)
        training.start(max(complete_checkpoints(rank.run.checkpoints), default=0) + 1)
    steps = rank.job.steps or (rank.job.epochs or 0) * training.order.steps_per_epoch
    return Feed(task, training, held_out, steps)


def check_lengths(feed: Feed, rank: Rank) -> None:
    """Raise TaskError if the ranks have different numbers of samples, because each would have its own order.

    Every rank must call this.
    """
    held_out = feed.held_out.samples if feed.held_out is not None else 0
    lengths = rank.all_values((feed.training.order.samples, held_out))
    for split, counts in zip(("train", "eval"), zip(*lengths, strict=True), strict=True):
        other = next((number for number, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            raise TaskError(
                f'data("{split}") has {counts[0]} samples on rank 0, but {counts[other]} on rank {other}. '
                "Return all samples on every rank, because launcher takes each rank's part; if data() does, "
                "the files differ between the nodes"
            )


def load(rank: Rank) -> Task:
    """Return the job's task, without its data. Raises TaskError."""
    assert rank.job.task is not None
    task = load_task(rank.job.task, rank.job.args, rank.workdir)
    task.adapter = rank.job.adapter
    task.loss_chunks = rank.recipe.loss_chunks
    if task.loss_chunks > 1 and not task.uses_loss_chunks:
        raise TaskError(f"loss_chunks: {task.loss_chunks}: {WHOLE_LOSS}")
    return task


def _training(task: Task, rank: Rank) -> TrainingData:
    share = rank.coordinates.data, rank.mesh.data
    data = TrainingData(task.data("train"), task.collate, rank.job, rank.recipe, *share)
    if data.order.left_out:
        rank.say(
            f"each epoch of {data.order.steps_per_epoch} steps skips {data.order.left_out} of "
            f"{data.order.samples} samples: they do not fill a batch of {data.order.batch}"
        )
    return data


def _held_out(task: Task, rank: Rank) -> EvaluationData | None:
    if rank.job.train.eval_every is None:
        return None
    micro = rank.recipe.micro_batch_size
    return EvaluationData(task.data("eval"), task.collate, micro, rank.coordinates.data, rank.mesh.data)
