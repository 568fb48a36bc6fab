"""The states of a recipe as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from launcher.spec.base import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.planning.fitting import Fit

CATEGORIES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "copies": "parameters again, for the optimizer on the host",
}
NOT_YET = "activations and temporaries are not estimated yet"


def show_fit(console: Console, fit: Fit, ranks_per_node: int) -> None:
    """GPU and host memory of a rank by category, and the sums against what there is."""
    frozen = f", {fit.trained:,} of them trained" if fit.trained != fit.parameters else ""
    console.print(f"model of {fit.parameters:,} parameters{frozen}; its states:\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("PER RANK", no_wrap=True)
    for column in ("GPU", "HOST"):
        table.add_column(column, justify="right", no_wrap=True)
    gpu, host = fit.rank.gpu.model_dump(), fit.rank.host.model_dump()
    for name, words in CATEGORIES.items():
        if gpu[name] or host[name]:
            table.add_row(words, _size(gpu[name]), _size(host[name]))
    table.add_row("sum", _size(fit.rank.gpu.total), _size(fit.rank.host.total), style="bold")
    if fit.mean != fit.rank:
        table.add_row("mean of all ranks", _size(fit.mean.gpu.total), _size(fit.mean.host.total))
    if fit.card is not None:
        table.add_row("the card has", _size(fit.card), "")
    console.print(table)
    if fit.rank.managed:
        console.print(
            f"and {_size(fit.rank.managed)} paged: on the GPU while there is room, else on the host"
        )
    if fit.rank.nvme:
        console.print(f"and {_size(fit.rank.nvme)} in files on NVMe")
    there = f"which has {_size(fit.node)}" if fit.node is not None else "whose size the profile does not say"
    console.print(f"\nhost memory per node, {ranks_per_node} rank(s): {_size(fit.host_per_node)}, {there}")
    console.print(f"[yellow]note[/] {escape(NOT_YET)}")


def _size(size: int) -> str:
    return format_bytes(size) if size else "-"
