"""The Plan: the layout, the recipe and the reason. Made from a Job and a Cluster without side effects."""

from __future__ import annotations

from launcher.memory.estimate import Estimate
from launcher.memory.states import Ranks
from launcher.planning.micro_batches import ladder
from launcher.spec import optimizer_table
from launcher.spec.cluster import Cluster
from launcher.spec.command import environment_name, for_a_shell, placeholder_of, unknown_placeholders, uses
from launcher.spec.errors import Problem, RefusedError, SpecError
from launcher.spec.fire_drill import BUDGET, DRILLS, counts_allocations, env_problems
from launcher.spec.job import Job
from launcher.spec.mesh import data_ranks, model_parallel
from launcher.spec.quantities import GIB, format_bytes, format_duration
from launcher.spec.recipe import APPROXIMATE, REPLICATED, SHARDED, Recipe
from launcher.spec.recipe_rules import Setting, broken_rules, changes_line, nearest_valid
from launcher.spec.unsupported_recipes import unsupported
from launcher.spec.value import Value

PRETENDED = frozenset({BUDGET, DRILLS})
"Variables in the job's `env:` that limit memory on a CPU as if it were a GPU."


class Layout(Value):
    """The number of processes and their places. One process per GPU."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def setting(self, job: Job, *, shardable: bool = True) -> Setting:
        return Setting(
            self.ranks,
            self.nodes,
            self.gpus_per_node,
            job.model.batch_norm,
            job.model.couples_samples,
            nvme_dir=job.train.nvme_dir is not None,
            entrypoint=job.task is not None,
            micro_batch_fixed=job.recipe.micro_batch_size is not None,
            lower_micro_batch=job.retries.lower_micro_batch,
            adapter=job.adapter is not None,
            clips=job.task is not None and job.train.clip_norm is not None,
            counts_allocations=job.task is not None and counts_allocations(job.env, self.gpus_per_node),
            shardable=shardable,
        )


def ranks_of(layout: Layout) -> Ranks:
    return Ranks(layout.ranks, layout.ranks_per_node, layout.gpus_per_node > 0)


class Plan(Value):
    layout: Layout
    recipe: Recipe
    ladder: tuple[Recipe, ...]
    "Recipes to fall back to after an OOM, in order."
    ladder_speed: tuple[float, ...] = ()
    "Samples per second of each rung, relative to `recipe`; empty if the model is unknown."
    above: tuple[Recipe, ...] = ()
    """Larger micro-batches under which exactly one earlier run ran out of memory. The run tries them again,
    the last one first."""
    reason: str
    warnings: tuple[str, ...] = ()
    estimate: Estimate | None = None
    "The memory of the recipe; None if the model is unknown."
    parameters: int | None = None
    "Number of the model's parameters; tied ones count once."
    usd_per_hour: float | None = None
    samples_per_second: float | None = None
    "Predicted speed; None if the model or the hardware is unknown."


class PlanRefusedError(SpecError, RefusedError):
    """The job cannot run on this cluster as written."""


class NotEstimatedError(PlanRefusedError):
    """The memory of the job's recipe cannot be estimated, so no plan can say that it fits."""


def make_plan(job: Job, cluster: Cluster, *, shardable: bool = True) -> Plan:
    """Choose the layout and the recipe. Raises PlanRefusedError with every reason against the job.

    `shardable`: whether FSDP can shard the model.
    """
    problems: list[Problem] = []
    layout = _layout(job, cluster, problems)
    _check_node(job, cluster, problems)
    ranks = data_ranks(job.recipe, layout.ranks)
    if job.batch.global_ % ranks:
        problems.append(
            _refusal(
                "batch.global",
                f"{job.batch.global_} samples cannot be shared equally by {ranks} {_data_parallel(job)}ranks"
                f"; nearest: {_nearest_multiple(job.batch.global_, ranks)}",
            )
        )
    if job.task is not None:
        wrong = env_problems(job.env, layout.ranks)
        problems += [_refusal(f"env.{name}", message) for name, message in wrong]
    if problems:
        raise PlanRefusedError(problems)
    recipe, reason = _recipe(job, layout, shardable=shardable)
    setting = layout.setting(job, shardable=shardable)
    broken = broken_rules(recipe, setting)
    if job.task is not None and not broken:
        missing = unsupported(recipe)
        if missing:
            raise PlanRefusedError([_refusal("recipe", message) for message in missing])
    if broken:
        refusals = [_refusal("recipe", str(rule)) for rule in broken]
        valid = nearest_valid(recipe, setting)
        if valid is not None and len(broken) > 1:
            fields = changes_line(valid, recipe)
            refusals.append(_refusal("recipe", f"nearest recipe that breaks no rule: {fields}"))
        raise PlanRefusedError(refusals)
    price = cluster.usd_per_gpu_hour
    gpus = layout.nodes * layout.gpus_per_node
    return Plan(
        layout=layout,
        recipe=recipe,
        ladder=_ladder(job, recipe, setting),
        reason=reason,
        warnings=(*_warnings(job), *_costs(recipe, setting)),
        usd_per_hour=price * gpus if price is not None else None,
    )


def _refusal(field: str, message: str) -> Problem:
    return Problem("the job", field, message)


def _layout(job: Job, cluster: Cluster, problems: list[Problem]) -> Layout:
    wanted = job.resources
    gpus = cluster.gpus_per_node if wanted.gpus_per_node is None else wanted.gpus_per_node
    if gpus > cluster.gpus_per_node:
        problems.append(
            _refusal(
                "resources.gpus_per_node",
                f"{gpus} GPUs asked for, a node of {cluster.name} has {cluster.gpus_per_node}"
                + ("; 0 trains on the CPU" if cluster.gpus_per_node == 0 else ""),
            )
        )
    if wanted.nodes > cluster.max_nodes:
        problems.append(
            _refusal(
                "resources.nodes", f"{wanted.nodes} nodes asked for, {cluster.name} gives {cluster.max_nodes}"
            )
        )
    ranks = wanted.ranks_per_node or gpus or 1
    if gpus and ranks != gpus:
        problems.append(
            _refusal("resources.ranks_per_node", f"{ranks} ranks for {gpus} GPUs; one rank drives one GPU")
        )
    return Layout(nodes=wanted.nodes, ranks_per_node=ranks, gpus_per_node=gpus)


def _check_node(job: Job, cluster: Cluster, problems: list[Problem]) -> None:
    wanted, node = job.resources, cluster.node
    if wanted.cpus_per_node and node.cpus and wanted.cpus_per_node > node.cpus:
        problems.append(
            _refusal("resources.cpus_per_node", f"{wanted.cpus_per_node} asked for, a node has {node.cpus}")
        )
    if wanted.memory_per_node and node.memory and wanted.memory_per_node > node.memory:
        problems.append(
            _refusal(
                "resources.memory_per_node",
                f"{format_bytes(wanted.memory_per_node)} asked for, a node has {format_bytes(node.memory)}",
            )
        )
    if wanted.memory_per_node and wanted.memory_per_node < GIB // 16:
        problems.append(
            _refusal(
                "resources.memory_per_node", f"{wanted.memory_per_node} bytes of host memory are too few"
            )
        )


def _recipe(job: Job, layout: Layout, *, shardable: bool) -> tuple[Recipe, str]:
    """Return the job's fixed fields plus defaults that give nothing up, and the reason.

    The run falls back from these defaults after an OOM.
    """
    fixed = {name: value for name, value in job.recipe.model_dump().items() if value is not None}
    ranks = data_ranks(job.recipe, layout.ranks)
    ranks_text = f"{ranks} {_data_parallel(job)}ranks"
    per_rank = job.batch.global_ // ranks
    micro, accum = fixed.get("micro_batch_size"), fixed.get("grad_accum")
    if micro is None:
        # Interleaved stages take as many micro-batches at a time as the pipeline has ranks.
        least = accum or (fixed.get("pipeline", 1) if fixed.get("virtual_stages", 1) > 1 else 1)
        micro = per_rank // least if per_rank % least == 0 else per_rank
    if accum is None:
        accum = max(per_rank // micro, 1)
    if micro * accum != per_rank and "grad_accum" not in fixed:
        message = f"{micro} does not divide the {per_rank} samples that each of {ranks_text} gets"
        raise PlanRefusedError([_refusal("recipe.micro_batch_size", message)])
    if micro * accum != per_rank:
        raise PlanRefusedError(
            [
                _refusal(
                    "recipe",
                    f"micro_batch_size {micro} x grad_accum {accum} x {ranks_text} is "
                    f"{micro * accum * ranks} samples, batch.global is {job.batch.global_}; "
                    f"micro_batch_size must divide {per_rank}",
                )
            ]
        )
    on_gpu = layout.gpus_per_node > 0
    chosen = {
        "precision": "bf16-mixed" if on_gpu else "fp32",
        "optimizer": optimizer_table.DEFAULT,
        "sharding": "none" if ranks == 1 else "fsdp" if shardable else "ddp",
        **fixed,
        "micro_batch_size": micro,
        "grad_accum": accum,
    }
    if chosen["precision"] == "fp16-mixed":
        chosen.setdefault("grad_scaler", True)
    if "checkpoint_ratio" in fixed:
        chosen.setdefault("activations", "checkpoint")
    if "activation_budget" in fixed:
        chosen.setdefault("activations", "budget")
    # `last` costs DDP one more copy of the gradients. Elsewhere it would take most of a rank's memory.
    chosen.setdefault("grad_sync", "last" if chosen["sharding"] in REPLICATED else "each")
    named = f"the job fixes {', '.join(fixed)}; " if fixed else ""
    start = f"at the largest micro-batch ({job.batch.global_} / {ranks_text} / accumulation {accum})"
    if "micro_batch_size" in fixed:
        start = "with the job's micro-batch"
    reason = f"{named}the run starts {start} and falls back when memory runs out"
    return Recipe(**chosen), reason


def _ladder(job: Job, recipe: Recipe, setting: Setting) -> tuple[Recipe, ...]:
    """Return the ladder of a plan without an estimate: smaller micro-batches, then offload to the host.

    Offload comes first if a smaller micro-batch changes what is learnt. There is no offload if the job fixes
    it, or on a CPU, unless a budget or a drill limits the memory there.
    """
    rungs = ladder(recipe, setting)
    two_memories = setting.gpus_per_node > 0 or not PRETENDED.isdisjoint(job.env)
    if job.task is None or job.recipe.offload is not None or not two_memories:
        return rungs
    offload = "cpu" if recipe.sharding in SHARDED else "cpu-optimizer"
    above = [rung for rung in rungs if rung.micro_batch_size == recipe.micro_batch_size]
    if not setting.keeps_micro_batch:
        above = list(rungs)
    moved = (recipe, *above)[-1].model_copy(update={"offload": offload})
    return rungs if broken_rules(moved, setting) else (*above, moved, *ladder(moved, setting))


def _warnings(job: Job) -> tuple[str, ...]:
    warnings = []
    command = " ".join(job.command or ())
    if job.command and "{micro_batch_size}" not in command:
        warnings.append(
            "the command does not use {micro_batch_size}: it gets the smaller micro-batch after an OOM only "
            "if it reads the environment variable LAUNCHER_MICRO_BATCH_SIZE"
        )
    elif job.command and "{grad_accum}" not in command:
        warnings.append(
            "the command does not use {grad_accum}: a smaller micro-batch would change the global batch, "
            "unless it reads the environment variable LAUNCHER_GRAD_ACCUM"
        )
    if job.command and "{checkpoint_dir}" not in command:
        warnings.append(
            "the command does not use {checkpoint_dir}: a restart begins at step 0, unless it reads the "
            "environment variable LAUNCHER_CHECKPOINT_DIR"
        )
    unset = [name for name in ("steps", "epochs") if getattr(job, name) is None]
    if empty := [f"{{{name}}}" for name in unset if uses(job.command or (), name)]:
        warnings.append(f"the job does not set {' and '.join(empty)}: the command gets nothing there")
    if written := for_a_shell(job.command or ()):
        warnings.append(
            f"the command gets {', '.join(written)} as written, because no shell expands it: use a "
            'placeholder such as {run_dir}, or start a shell with [bash, -c, "..."]'
        )
    if unknown := unknown_placeholders(job.command or ()):
        doubled = ", ".join(f"{{{name}}}" for name in unknown)
        warnings.append(
            f"the command gets {', '.join(unknown)} as written, because there is no such placeholder: if the "
            f"program needs this text, write {doubled}"
        )
    nothing, environment = job.unread()
    if nothing:
        warnings.append(
            f"nothing reads {', '.join(nothing)}: with `command:`, the script or its arguments decide that"
        )
    if environment:
        names = ", ".join(f"${environment_name(str(placeholder_of(field)))}" for field in environment)
        warnings.append(
            f"the command has no placeholder for {', '.join(environment)}: "
            f"the value is only in the environment, as {names}"
        )
    if job.resources.time:
        warnings.append(f"time limit {format_duration(job.resources.time)} for one submission")
    return tuple(warnings)


def _costs(recipe: Recipe, setting: Setting) -> tuple[str, ...]:
    """Return warnings about settings that cost precision, or more time than they gain."""
    costs = []
    if setting.gpus_per_node == 0:
        moved = [("offload", "cpu"), ("offload", "cpu-optimizer"), ("activations", "offload")]
        costs += [
            f"{field}: {value} frees nothing without a GPU to offload from"
            for field, value in moved
            if getattr(recipe, field) == value
        ]
    if recipe.precision == "float8" and not recipe.compile:
        costs.append("precision: float8 without compile: true: the casts can cost as much as float8 gains")
    if recipe.activations == "compress" and setting.entrypoint:
        costs.append(APPROXIMATE)
    return tuple(costs)


def _data_parallel(job: Job) -> str:
    return "data-parallel " if model_parallel(job.recipe) > 1 else ""


def _nearest_multiple(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
