"""BatchNorm, whose statistics need two samples: found in the model, whatever the job file says."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.spec.rules import Setting, broken_rules
from launcher.train.rank import Rank, SetupError


def first_batch_norm(model: nn.Module) -> str | None:
    """The name of a BatchNorm that computes its statistics from one rank's micro-batch alone."""
    for name, module in model.named_modules():
        # SyncBatchNorm takes its samples from all ranks.
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            return str(name)
    return None


def check_batch_norm(model: nn.Module, rank: Rank) -> bool:
    """True when the model has BatchNorm that the job file does not declare. Raises SetupError for a recipe
    that cannot train it: the planner, which does not see the model, could not."""
    name = first_batch_norm(model)
    if name is None:
        return False
    setting = Setting(
        rank.world, rank.world // rank.per_node, rank.per_node, batch_norm=True, entrypoint=True
    )
    for broken in broken_rules(rank.recipe, setting):
        if broken.rule.name == "batch-norm-needs-two":
            raise SetupError(f"{name} of the model: {broken}. With `model: {{batch_norm: true}}` in the job "
                             "file the plan sees it")  # fmt: skip
    return not rank.job.model.batch_norm
