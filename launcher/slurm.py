"""submitit's executor on a cluster profile of launcher's: `from launcher.slurm import Executor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.schedulers.slurm.functions import Executor, FunctionJob

__all__ = ["Executor", "FunctionJob"]


def __getattr__(name: str) -> Any:
    """submitit is imported when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from launcher.schedulers.slurm import functions

    return getattr(functions, name)
