"""Writes a state from shared memory as a checkpoint after the run has ended."""

from __future__ import annotations

from launcher.train.checkpoints.checkpoints import Checkpoints
from launcher.train.checkpoints.folder import NotSavedError
from launcher.train.cpu_memory_budget import Budget
from launcher.train.data.feed import load
from launcher.train.handover.handover import Handover
from launcher.train.handover.progress import Progress
from launcher.train.mesh import meshes
from launcher.train.model import arranged, new_model
from launcher.train.optimizers.build import build_optimizer
from launcher.train.phase import Where
from launcher.train.rank import Rank
from launcher.train.rng import seed_all
from launcher.train.scaler import LossScaler
from launcher.train.seeds import derive_seed


def save_handover(rank: Rank, where: Where, budget: Budget) -> None:
    """Write the attempt's handover as an ordinary checkpoint. Call this on every rank.

    Reads no data and runs no step. If evaluation and metrics of the step are not done yet, the checkpoint's
    marker says so.

    Raises: NotSavedError.
    """
    seed_all(derive_seed("model", rank.job.train.seed))
    with where.during("init", users=True):
        with budget.host_side():
            task = load(rank)
            model = new_model(task, rank.recipe)
            mesh = meshes(rank)
        model = arranged(model, task, rank, budget, mesh)
    optimizer = build_optimizer(model, rank, budget, mesh.data)
    checkpoints = Checkpoints(model, optimizer, LossScaler(rank.recipe.grad_scaler), rank, task=task)
    handover = Handover(checkpoints, Progress(rank.device, budget))
    with where.during("checkpoint"), budget.host_side():
        resumed = handover.resume()
        if resumed.source != "shared-memory":
            raise NotSavedError(resumed.skipped or "the ranks found no state in shared memory")
        # The marker contains the number of samples. It comes from the handover: the data is not opened here.
        checkpoints.made_with = checkpoints.resumed_from
        if resumed.unrecorded is not None:
            checkpoints.made_with = {**checkpoints.resumed_from, "unrecorded": resumed.unrecorded}
        rank.say(f"writing the state of step {resumed.step} as a checkpoint")
        checkpoints.save_last(resumed.step)
