"""Print plans, runs and clusters on a terminal, with rich."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:  # values are only printed here
    from rich.console import Console

    from launcher.memory.estimate import Estimate
    from launcher.planning.cost import Offered
    from launcher.planning.fastest_recipe import Capacity
    from launcher.planning.plan import Plan
    from launcher.schedulers.base import Prepared
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job
    from launcher.spec.recipe import Recipe

STATE_STYLE = {
    "succeeded": "green",
    "running": "cyan",
    "submitted": "cyan",
    "stopping": "yellow",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "failed": "red",
    "lost": "red",
    "damaged": "red",
}


def recipe_line(recipe: Recipe) -> str:
    """Format a recipe on one line, without fields that have no effect."""
    parts = [recipe.precision, recipe.optimizer, f"sharding {recipe.sharding}"]
    if recipe.tensor > 1:
        parts.append(f"tensor {recipe.tensor}")
    if recipe.pipeline > 1:
        parts.append(f"pipeline {recipe.pipeline}")
    if recipe.virtual_stages > 1:
        parts.append(f"{recipe.virtual_stages} virtual stages")
    if recipe.pipeline > 1 and recipe.schedule != "1f1b":
        parts.append(f"schedule {recipe.schedule}")
    if recipe.offload != "none":
        parts.append(f"offload {recipe.offload}")
    if recipe.embedding_states == "8-bit":
        parts.append("8-bit states of embeddings")
    if recipe.optimizer_step == "backward":
        parts.append("optimizer step in the backward pass")
    if recipe.activations != "keep":
        parts.append(f"activations {recipe.activations}")
    if recipe.checkpoint_ratio < 1:
        parts.append(f"of {recipe.checkpoint_ratio:g} of the blocks")
    if recipe.activation_budget < 1:
        parts.append(f"of {recipe.activation_budget:g} of the activations")
    if recipe.loss_chunks > 1:
        parts.append(f"loss in {recipe.loss_chunks} chunks")
    if recipe.compile:
        parts.append("compiled")
    if recipe.gradients_wait:
        parts.append("gradients reduced after the last micro-batch")
    parts.append(f"micro-batch {recipe.micro_batch_size} x accumulation {recipe.grad_accum}")
    return ", ".join(parts)


def _rung(recipe: Recipe, above: Recipe) -> str:
    if recipe.micro_batch_size != above.micro_batch_size:
        return f"micro-batch {recipe.micro_batch_size}"
    return ", ".join(f"{name} {new}" for name, (_, new) in recipe.changes_from(above).items())


def ladder_line(plan: Plan) -> str:
    """Format the recipes below the chosen one; return "" if there are none."""
    steps = zip(plan.ladder, (plan.recipe, *plan.ladder), strict=False)
    below = " -> ".join(_rung(recipe, above) for recipe, above in steps)
    return f"{below}, the global batch unchanged" if below else ""


def plan_rows(job: Job, cluster: Cluster, plan: Plan) -> list[tuple[str, str]]:
    """Return the plan as (name, value) pairs in plain text."""
    from launcher.spec.mesh import data_ranks
    from launcher.spec.quantities import counted, format_bytes

    layout = plan.layout
    own_recipe = job.command is not None and not any(
        "{precision}" in a or "{optimizer}" in a for a in job.command
    )
    gpus = counted(layout.gpus_per_node, "GPU") if layout.gpus_per_node else "CPU"
    gpu = cluster.node.gpu
    kind = f" ({gpu.type}, {format_bytes(gpu.memory)})" if gpu is not None and layout.gpus_per_node else ""
    nodes = f"{counted(layout.nodes, 'node')} x {counted(layout.ranks_per_node, 'rank')}"
    foreign = "launcher sets the micro-batch and the accumulation; the rest is the command's own"
    if plan.estimate is not None:
        foreign = (
            f"planned as {recipe_line(plan.recipe)}: the command must do the same; launcher sets only the "
            "micro-batch and the accumulation"
        )
    micro, accum = plan.recipe.micro_batch_size, plan.recipe.grad_accum
    ranks = data_ranks(plan.recipe, layout.ranks)
    of_each = "ranks" if ranks == layout.ranks else "data-parallel ranks"
    batch = f"{micro * accum * ranks} = {micro} x {accum} x {ranks} {of_each}"
    return [
        ("job", job.name),
        ("cluster", f"{cluster.name}: {nodes}, {gpus}{kind}"),
        ("recipe", foreign if own_recipe else recipe_line(plan.recipe)),
        ("batch", batch),
        ("why", plan.reason),
    ]


def cost_rows(
    job: Job, cluster: Cluster, plan: Plan, offered: Offered | None = None
) -> list[tuple[str, str]]:
    """Return the cost as (name, value) pairs in plain text, or [] if nothing is paid by the hour."""
    from launcher.planning.cost import cost_of

    cost = cost_of(job, cluster, plan, offered)
    return [] if cost is None else cost.rows()


def cost_lines(job: Job, cluster: Cluster, plan: Plan) -> list[tuple[str, str]]:
    """Return the cost as one (name, value) pair, or [] if nothing is paid by the hour."""
    from launcher.planning.cost import cost_of, usd

    cost = cost_of(job, cluster, plan)
    if cost is None:
        return []
    total = "total unknown" if cost.usd is None else f"{usd(cost.usd)} predicted"
    upper_bound = cost.worst if cost.worst_usd is None else f"{usd(cost.worst_usd)} ({cost.worst})"
    price = cost.price if cost.usd_per_hour is None else f"{usd(cost.usd_per_hour)}/h {cost.price}"
    exceeds_bound = cost.usd is not None and cost.worst_usd is not None and cost.usd > cost.worst_usd
    return [("cost", f"{total}, {price}; {'but it ends at' if exceeds_bound else 'at most'} {upper_bound}")]


def fit(estimate: Estimate, recipe: Recipe, capacity: Capacity) -> str:
    """Return whether the recipe fits, with how much room."""
    from launcher.spec.quantities import format_bytes

    if (misfit := capacity.misfit(estimate)) is not None:
        return f"no: {misfit}"
    needed = f"{format_bytes(estimate.needed)} +- {estimate.band:.0%}"
    if capacity.card is None:
        unknown = "unknown: `node.memory` is not set in the profile"
        answer = unknown if capacity.host is None else "yes, in host memory"
        return f"{answer}; the tensors of a rank need {needed}"
    spare = format_bytes(capacity.card - estimate.needed * (1 + estimate.band))
    condition = ""
    if capacity.is_unknown_for(recipe):
        condition = f", if each node has at least {format_bytes(estimate.host_per_node)} of host memory"
    return f"yes{condition}: {needed} of {format_bytes(capacity.card)} on each GPU, {spare} to spare"


def _fit_and_time(job: Job, cluster: Cluster, plan: Plan) -> list[tuple[str, str]]:
    """Return whether the plan fits and how long the whole job takes, if its memory was estimated."""
    from launcher.planning.fastest_recipe import Capacity
    from launcher.spec.quantities import format_duration

    if plan.estimate is None:
        return []
    capacity = Capacity.of(job, cluster, on_gpu=plan.layout.gpus_per_node > 0)
    rows = [("fits", fit(plan.estimate, plan.recipe, capacity))]
    if plan.samples_per_second and job.steps is not None and not cluster.rents:  # else the cost has the time
        total = job.steps * job.batch.global_ / plan.samples_per_second
        rows.append(("time", f"{format_duration(total)} predicted for {job.steps:,} steps"))
    return rows


def show_plan(
    console: Console,
    job: Job,
    cluster: Cluster,
    plan: Plan,
    warnings: Sequence[str],
    offered: Offered | None = None,
) -> None:
    rows = [
        *cost_rows(job, cluster, plan, offered),
        *_fit_and_time(job, cluster, plan),
        *plan_rows(job, cluster, plan),
    ]
    if below := ladder_line(plan):
        why = next(number for number, (name, _) in enumerate(rows) if name == "why")
        rows.insert(why, ("if memory runs out", below))
    rows += [("[yellow]note[/]", warning) for warning in warnings]
    console.print(grid(rows))


def grid(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of names (markup) and values (plain text)."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def show_prepared(console: Console, prepared: Prepared) -> None:
    """Print the output of `--dry-run`: the plan, every file and the command."""
    request = prepared.request
    show_plan(console, request.job, request.cluster, request.plan, prepared.warnings, prepared.offered)
    for file in prepared.files:
        console.rule(f"{prepared.run_dir}/scripts/{file.path}", align="left", style="dim")
        console.out(file.shown, highlight=False, end="")
    console.rule("command", align="left", style="dim")
    console.out(shlex.join(prepared.command), highlight=False)
