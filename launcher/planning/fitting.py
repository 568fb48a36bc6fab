"""Whether the states of a recipe fit, and which recipes nearby have states that do."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Held, Ranks, States, host_of_node, states_of
from launcher.planning.plan import Layout, Plan
from launcher.spec.base import Value, format_bytes
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.recipe import SHARDED, Offload, Optimizer, Recipe, Sharding
from launcher.spec.rules import Setting, as_yaml, broken_rules
from launcher.spec.supported import unsupported

# What to try, the change that costs least first.
OPTIMIZERS: tuple[Optimizer, ...] = (
    "adamw-bf16", "adamw-8bit", "paged-adamw-8bit", "adam-mini", "lion", "lion-8bit"
)  # fmt: skip
SHARDINGS: tuple[Sharding, ...] = ("fsdp",)
OFFLOADS: tuple[Offload, ...] = ("cpu-optimizer", "cpu", "nvme-optimizer")


class Fit(Value):
    """The states of a plan's recipe beside what the cluster has. All sizes in bytes."""

    parameters: int
    "How many, each of tied ones once."
    trained: int
    "How many of them have gradients and optimizer states."
    rank: States
    "Of rank 0; no rank holds more."
    mean: States
    "Of all ranks."
    host_per_node: int
    "Of all ranks of a node together."
    card: int | None
    "Memory of one GPU; None where the job computes on the CPU."
    node: int | None
    "Host memory of a node: what the job asks for, else the profile's; None when neither says."
    problems: tuple[str, ...] = ()
    "What does not fit."
    alternatives: tuple[Recipe, ...] = ()
    "When something does not: valid recipes nearby whose states do, the smallest change first."


def weigh(model: ModelShapes, job: Job, cluster: Cluster, plan: Plan) -> Fit:
    """`model`: as the precision of the plan's recipe stores it."""
    layout, recipe, gpu = plan.layout, plan.recipe, cluster.node.gpu
    ranks = ranks_of(layout)
    card = gpu.memory if gpu is not None and ranks.on_gpu else None
    node = job.resources.memory_per_node or cluster.node.memory

    def problems_of(one: Recipe) -> tuple[str, ...]:
        return _problems(model, one, ranks, card, node)

    problems = problems_of(recipe)
    return Fit(
        parameters=model.numel,
        trained=sum(p.numel for p in model.trained),
        rank=states_of(model, recipe, ranks),
        mean=_mean([states_of(model, recipe, ranks, rank) for rank in range(ranks.shards(recipe))]),
        host_per_node=host_of_node(model, recipe, ranks),
        card=card,
        node=node,
        problems=problems,
        alternatives=nearby(recipe, layout.setting(job), lambda one: not problems_of(one))
        if problems
        else (),
    )


def ranks_of(layout: Layout) -> Ranks:
    return Ranks(layout.ranks, layout.ranks_per_node, layout.gpus_per_node > 0)


def nearby(recipe: Recipe, setting: Setting, fits: Callable[[Recipe], bool]) -> tuple[Recipe, ...]:
    """Other optimizers, offloads and shardings that are valid here and fit; none that changes more than
    another one in the list needs to. The micro-batch stays: states do not depend on it."""
    found: list[Recipe] = []
    for candidate in sorted(_others(recipe, setting), key=lambda one: len(one.changes_from(recipe))):
        needless = any(_axes(one, recipe) <= _axes(candidate, recipe) for one in found if _axes(one, recipe))
        if not needless and not unsupported(candidate) and fits(candidate):
            found.append(candidate)
    return tuple(found)


def _axes(recipe: Recipe, other: Recipe) -> set[tuple[str, object]]:
    """What differs, but for `grad_sync`, which follows from the sharding."""
    return {(name, new) for name, (_, new) in recipe.changes_from(other).items() if name != "grad_sync"}


def _others(recipe: Recipe, setting: Setting) -> list[Recipe]:
    axes = itertools.product(
        (recipe.sharding, *SHARDINGS), (recipe.offload, *OFFLOADS), (recipe.optimizer, *OPTIMIZERS)
    )
    made = [recipe.model_copy(update={"grad_sync": "each"})]
    for sharding, offload, optimizer in axes:
        sync = "each" if sharding in SHARDED else recipe.grad_sync
        changes = {"sharding": sharding, "offload": offload, "optimizer": optimizer, "grad_sync": sync}
        made.append(recipe.model_copy(update=changes))
    return [one for one in dict.fromkeys(made) if one != recipe and not broken_rules(one, setting)]


def _problems(
    model: ModelShapes, recipe: Recipe, ranks: Ranks, card: int | None, node: int | None
) -> tuple[str, ...]:
    found = []
    held = states_of(model, recipe, ranks)
    on_gpu, on_host = held.gpu.total, host_of_node(model, recipe, ranks)
    if card is not None:
        on_host += ranks.per_node * max(0, min(held.managed, on_gpu + held.managed - card))
    if card is not None and on_gpu > card:
        found.append(
            f"the states alone are {format_bytes(on_gpu)} on each GPU, which has {format_bytes(card)}: "
            "no micro-batch helps"
        )
    if node is not None and on_host > node:
        found.append(
            f"the states alone are {format_bytes(on_host)} of host memory on each node, which has "
            f"{format_bytes(node)}: no micro-batch helps"
        )
    return tuple(found)


def changes_line(recipe: Recipe, other: Recipe) -> str:
    """What to write into the job file to get `recipe` instead of `other`."""
    return ", ".join(f"{name}: {as_yaml(new)}" for name, (_, new) in recipe.changes_from(other).items())


def _mean(of: list[States]) -> States:
    """In whole bytes."""
    gpu, host = (sum((getattr(one, place) for one in of), Held()) for place in ("gpu", "host"))
    return States(
        gpu=gpu // len(of),
        host=host // len(of),
        managed=sum(one.managed for one in of) // len(of),
        nvme=sum(one.nvme for one in of) // len(of),
    )
