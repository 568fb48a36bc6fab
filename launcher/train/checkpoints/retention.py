"""Which checkpoints are kept and which are removed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from launcher.train.checkpoints.folder import complete_checkpoints, partial_path, read_marker


def remove_all_but(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep` >= 1 and the best, if a marker has a loss."""
    complete = complete_checkpoints(folder)
    for step in list(complete)[:-keep]:
        if step != best(complete):
            removed = partial_path(complete[step])  # if this process is killed now, the rest does not count
            with contextlib.suppress(OSError):
                complete[step].rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def best(complete: Mapping[int, Path]) -> int | None:
    """Return the step with the lowest held-out loss, the earliest if several are equal. None if no marker
    has a loss, as without `train.keep_best`."""
    losses = {step: read_marker(path).get("eval_loss") for step, path in complete.items()}
    known = {step: loss for step, loss in losses.items() if isinstance(loss, float)}
    return min(known, key=known.__getitem__, default=None)
