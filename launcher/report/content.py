"""The content of a page about a plan, independent of the output format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.planning.fastest_recipe import Candidate
from launcher.planning.hardware import gpu_types_of
from launcher.planning.questions import Comparison
from launcher.planning.recipe_and_ladder import Decision
from launcher.planning.speed import StepTime
from launcher.planning.zero_stages import Stages
from launcher.report.terminal import cost_lines, fit, ladder_line, plan_rows, recipe_line
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.listed_names import listed
from launcher.spec.quantities import GIB, format_bytes, format_duration
from launcher.spec.recipe_rules import changes_line

LAUNCH_BOUND = 0.01
"Seconds. A shorter step mostly consists of launching thousands of kernels, a few microseconds each."


@dataclass(frozen=True)
class Page:
    """One answer of `launcher plan`, as plain values."""

    job: Job
    cluster: Cluster
    decision: Decision | None
    "None if nothing fits."
    tokens_per_sample: int | None = None
    comparisons: tuple[Comparison, ...] = ()
    explain: bool = False
    refusal: str = ""
    "Why nothing fits, and what would fit."
    zero: Stages | None = None
    "Result of `--zero`."


class Section(NamedTuple):
    """A part of the page: a table, or pairs of a name and a value if it has no columns, or lines of text."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    columns: Sequence[str] = ()
    conclusion: str = ""
    "Shown below the table."
    lines: Sequence[str] = ()


def sections(page: Page, *, explain: bool) -> Iterator[Section]:
    """Yield the sections after the summary and the GPU memory. Without `explain`, only answers and notes."""
    decision = page.decision if explain else None
    if decision is not None:
        yield Section("host memory of a node", _host_rows(decision))
        yield Section("predicted time of a step", _time_rows(page))
        yield Section(
            "if memory runs out, each compared with the one above", _ladder_rows(decision),
            ("CHANGE", "NEEDED", "SAVED", "SPEED LOST"),
        )  # fmt: skip
        yield Section("why", lines=decision.explained)
    for comparison in page.comparisons:
        columns, rows = _comparison_table(page, comparison)
        yield Section(comparison.question, rows, columns, comparison.conclusion)
    if page.zero is not None:
        yield _zero(page.zero)
        yield Section("about the table", lines=_zero_lines(page.zero))
    if page.decision is not None:
        yield Section("notes", lines=(*page.decision.plan.warnings, *page.decision.notes))
    if decision is not None:
        yield Section("not modelled", lines=decision.chosen.estimate.not_modelled)


def lead(page: Page) -> list[tuple[str, str]]:
    """Return the summary in at most eleven rows: fit, time, cost, and the chosen recipe with the reason."""
    decision = page.decision
    if decision is None:
        return [("job", page.job.name), ("cluster", page.cluster.name)]
    plan = decision.plan
    job, cluster, recipe, batch, why = plan_rows(page.job, page.cluster, plan)
    frozen = f", {decision.trained:,} of them trained" if decision.trained != decision.parameters else ""
    ladder = ladder_line(plan)
    return [
        ("fits", fit(decision.chosen.estimate, decision.chosen.recipe, decision.room)),
        ("host memory", _host(decision)),
        ("time", _duration(page, decision)),
        *cost_lines(page.job, page.cluster, plan),
        ("model", f"{job[1]}: {decision.parameters:,} parameters{frozen}"),
        cluster,
        recipe,
        batch,
        why,
        *([("if memory runs out", ladder)] if ladder else []),
    ]


def _host(decision: Decision) -> str:
    needed, capacity = format_bytes(decision.chosen.estimate.host_per_node), decision.room.host
    has = "the host memory of a node is unknown" if capacity is None else f"of {format_bytes(capacity)}"
    return f"{needed} on each node; {has}" if capacity is None else f"{needed} {has} on each node"


def _duration(page: Page, decision: Decision) -> str:
    step = decision.chosen.time
    if step is None and decision.chosen.estimate.basis == "formulas":
        return "unknown: launcher predicts the time only of models that it can trace"
    if step is None:
        gpu = page.cluster.node.gpu
        candidates = gpu_types_of(gpu.type) if gpu is not None else []
        if len(candidates) > 1 and gpu is not None:
            labels = ", ".join(one.label for one in candidates)
            return f"unknown: node.gpu.type {gpu.type!r} may be {labels}; name one in the profile"
        return "unknown: there are no speed figures for this hardware"
    pace = f"{seconds(step.total)} a step, {speed(step.samples_per_second, page.tokens_per_sample)}"
    if step.total < LAUNCH_BOUND:
        pace += "; so short a step takes longer: kernel launches are not counted"
    if page.job.steps is None:
        until = "until the data is read" if page.job.command is None else "without `steps:` in the job"
        return f"{pace}; the number of steps is unknown {until}"
    return f"{format_duration(page.job.steps * step.total)}: {page.job.steps:,} steps, {pace}"


def memory_rows(decision: Decision) -> list[tuple[str, str]]:
    """Return rows with the parts of the needed GPU memory, and the capacity."""
    estimate, room = decision.chosen.estimate, decision.room
    if not estimate.overhead:  # without a GPU there are only tensors
        return [("needed", f"{format_bytes(estimate.needed)} +- {estimate.band:.0%}")]
    streams = ", ".join(f"{stream} {format_bytes(size)}" for stream, size in estimate.pools.items())
    rows = [
        ("allocated", f"{format_bytes(estimate.allocated)} at the worst peak: tensors, cuBLAS's workspaces"),
        ("reserved", f"{format_bytes(estimate.reserved)} by PyTorch's allocator: the same and its gaps"),
        *([("  per CUDA stream", streams)] if len(estimate.pools) > 1 else []),
        *([("measured before", f"x {estimate.correction:.3f}")] if estimate.correction != 1 else []),
        *((name, format_bytes(size)) for name, size in estimate.overhead.items()),
        ("needed", f"{format_bytes(estimate.needed)} +- {estimate.band:.0%}"),
    ]
    if room.card is not None:
        free = room.card - estimate.needed * (1 + estimate.band)
        rows.append(("GPU capacity", f"{format_bytes(room.card)}: {format_bytes(free)} to spare"))
    if estimate.managed:
        where = "on the GPU while there is room, else on the host"
        rows.append(("paged states", f"{format_bytes(estimate.managed)}: {where}"))
    if estimate.nvme:
        rows.append(("files on NVMe", format_bytes(estimate.nvme)))
    return rows


def _host_rows(decision: Decision) -> list[tuple[str, str]]:
    """Return rows with the host memory of one node."""
    estimate, capacity = decision.chosen.estimate, decision.room.host
    rows = [(name, format_bytes(size)) for name, size in estimate.host.items()]
    rows.append(("needed", format_bytes(estimate.host_per_node)))
    has = "unknown: `node.memory` is not set in the profile" if capacity is None else format_bytes(capacity)
    return [*rows, ("capacity", has)]


def _time_rows(page: Page) -> list[tuple[str, str]]:
    """Return rows with the time of one optimizer step, or none if the hardware's speed is unknown."""
    time = page.decision.chosen.time if page.decision is not None else None
    if time is None:
        return []
    rows = [(name, f"{seconds(value)}{remark}") for name, value, remark in time_parts(time) if value]
    total = [("step", seconds(time.total)), ("speed", speed(time.samples_per_second, page.tokens_per_sample))]
    return [*rows, *total]


def time_parts(time: StepTime) -> list[tuple[str, float, str]]:
    """Return (name, seconds, remark) of each part of a step. The seconds add up to the whole step."""
    extra = f", of {seconds(time.communication)} in all" if time.communication > time.exposed else ""
    if time.tensor:
        extra += f", {seconds(time.tensor)} of them within tensor-parallel layers"
    return [
        ("matrix products", time.compute, ""),
        ("other kernels", time.memory, ""),
        ("communication", time.exposed, f" in which nothing else runs{extra}"),
        ("pipeline bubble", time.bubble, " in which a stage waits for others"),
        ("offload", time.offload, ""),
        ("optimizer", time.optimizer, ""),
    ]


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def speed(samples: float, tokens_per_sample: int | None) -> str:
    """Format samples, and tokens if known, per second."""
    tokens = "" if tokens_per_sample is None else f", {samples * tokens_per_sample:,.0f} tokens/s"
    return f"{samples:.3g} samples/s{tokens}"


def _ladder_rows(decision: Decision) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for rung in decision.rungs:
        change = rung.words.split("; saves")[0]
        lost = f"{rung.slower:.0%}" if decision.chosen.speed else "-"
        needed = format_bytes(rung.candidate.estimate.needed)
        rows.append((change, needed, format_bytes(rung.saved), lost))
    return rows


def _comparison_table(page: Page, comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return (columns, rows): memory, fit and speed of each answer, and how its recipe differs."""
    costs = any(answer.hours is not None for answer in comparison.answers)
    base_recipe = page.decision.plan.recipe if page.decision is not None and not costs else None
    columns = ("", "NEEDED", "FITS", "SAMPLES/S", *(("TIME", "PRICE") if costs else ()), "RECIPE")
    rows: list[tuple[str, ...]] = []
    if page.decision is not None and base_recipe is not None:
        rows.append(("chosen", *_facts(page.decision.chosen), recipe_line(base_recipe)))
    for answer in comparison.answers:
        chosen = answer.choice.chosen
        if chosen is None:
            rows.append((answer.label, "-", "no", "-", *(("-", "-") if costs else ()), answer.choice.reason))
            continue
        price: tuple[str, ...] = ()
        if costs:
            time = "-" if answer.hours is None else format_duration(answer.hours * 3600)
            price = (time, "-" if answer.usd is None else f"{answer.usd:,.2f} USD")
        if base_recipe is None:
            recipe = recipe_line(chosen.recipe)
        else:
            recipe = changes_line(chosen.recipe, base_recipe) or "the same"
        rows.append((answer.label, *_facts(chosen), *price, recipe))
    return columns, rows


def _facts(fitting: Candidate) -> tuple[str, str, str]:
    pace = f"{fitting.speed:.3g}" if fitting.speed else "-"
    return format_bytes(fitting.estimate.needed), "yes", pace


def _zero(zero: Stages) -> Section:
    """Return a row for each stage of ZeRO. The title has the unit."""
    largest = max(stage.total for stage in zero.stages)
    unit, name = (GIB, "GiB") if largest >= GIB else (2**20, "MiB")
    rows: list[tuple[str, ...]] = []
    for stage in zero.stages:
        needed = stage.candidate.estimate.needed if stage.candidate is not None else 0
        sizes = (stage.parameters, stage.gathered, stage.gradients, stage.optimizer, stage.total, needed)
        cells = [f"{size / unit:.4g}" if size else "-" for size in sizes]
        fits = "-" if stage.fits is None else "yes" if stage.fits else "no"
        rows.append((f"{stage.name}, {stage.sharding}", *cells, fits))
    columns = ("", "PARAMETERS", "GATHERED", "GRADIENTS", "STATES", "TOTAL", "NEEDED", "FITS")
    return Section(f"ZeRO: {name} on each GPU", rows, columns)


def _zero_lines(zero: Stages) -> list[str]:
    """Return lines with the assumptions of the table of ZeRO stages."""
    recipe, each = zero.recipe, zero.per_parameter
    [keep] = [stage for stage in zero.stages if stage.sharding == "fsdp-keep"]
    refused: dict[str, list[str]] = {}
    for stage in zero.stages:
        if stage.candidate is None:
            refused.setdefault(str(stage.why_not), []).append(stage.name)
    lines = [f"{listed(names)} cannot be used: {why}" for why, names in refused.items()]
    if len({stage.total for stage in zero.stages}) == 1:
        lines.append("all stages hold the same: no other GPU has this part of the model, to divide it with")
    return [
        *lines,
        f"bytes per parameter: {each.parameters:.3g} parameters, {each.gradients:.3g} gradients, "
        f"{each.optimizer:.3g} optimizer states ({recipe.precision}, {recipe.optimizer})",
        "TOTAL: the model states during a step; NEEDED: the estimate with activations, communication, "
        f"PyTorch's allocator and CUDA, at micro-batch {recipe.micro_batch_size}, activations "
        f"{recipe.activations}, nothing offloaded",
        f"ZeRO-2 is fsdp-keep: FSDP2 also keeps its shard of the gathered parameters; without it, as the "
        f"ZeRO paper counts, the total is {format_bytes(keep.in_the_paper)}",
    ]
