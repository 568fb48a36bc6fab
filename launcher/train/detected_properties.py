"""Properties of a model that the plan has to know, whether the job file declares them or not."""

from __future__ import annotations

from torch import nn

from launcher.spec.recipe_rules import Setting, broken_rules
from launcher.train.batch_norm_modules import first_batch_norm
from launcher.train.rank import Rank, SetupError
from launcher.train.task import Task

_FIELDS = {
    "batch-norm-needs-two": "batch_norm",
    "compiled-batch-norm-is-not-recomputed": "batch_norm",
    "coupled-samples-need-two": "couples_samples",
}
"Rule -> the property it is about, a field of the job's `model`."


def setting_of(model: nn.Module, task: Task, rank: Rank) -> Setting:
    """Return the setting of this model and task.

    Raises SetupError for a recipe that cannot train them: the plan may have been made without them.
    """
    declared, norm = rank.job.model, first_batch_norm(model)
    setting = rank.setting(
        batch_norm=norm is not None or declared.batch_norm,
        couples_samples=task.couples_samples or declared.couples_samples,
    )
    for broken in broken_rules(rank.recipe, setting):
        if (field := _FIELDS.get(broken.rule.name)) is not None:
            where = f"{norm} of the model: " if field == "batch_norm" and norm is not None else ""
            raise SetupError(
                f"{where}{broken}. With `model: {{{field}: true}}` in the job file the plan avoids this"
            )
    return setting
