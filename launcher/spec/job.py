"""Job: what the user wants to train."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from launcher.spec.adapter import Adapter
from launcher.spec.command import affects_ranks, check_command, placeholder_of, uses
from launcher.spec.command_text import split
from launcher.spec.failure_patterns import FailurePattern
from launcher.spec.fire_drill import env_problems
from launcher.spec.quantities import Memory, Seconds, Threshold
from launcher.spec.recipe import RecipeChoice
from launcher.spec.text import no_nul
from launcher.spec.value import Env, EnvName, Value, number_as_text


class Batch(Value):
    """Number of samples in an optimizer step."""

    global_: PositiveInt = Field(alias="global")
    "Samples per optimizer step over all ranks. No recipe changes it."


class Resources(Value):
    """What one submission asks of the cluster."""

    nodes: PositiveInt = 1
    "Number of nodes."
    gpus_per_node: NonNegativeInt | None = None
    "GPUs on each node. 0 trains on the CPU. Default: all GPUs of the cluster's nodes."
    ranks_per_node: PositiveInt | None = None
    "Processes on each node. Default: one per GPU; without GPUs, one."
    cpus_per_node: PositiveInt | None = None
    "CPUs on each node. Default: the job's share of `node.cpus` of the profile."
    memory_per_node: Memory | None = None
    "Host memory on each node, which limits the plan."
    time: Seconds | None = None
    "Wall-clock limit of one submission."


class Training(Value):
    """Settings of the built-in entrypoint (`task:` jobs)."""

    lr: PositiveFloat = 3e-4
    "Peak learning rate: linear warm-up, then a cosine to a tenth of the peak at the last step."
    weight_decay: NonNegativeFloat = 0.1
    "Weight decay, decoupled from the gradient. Applies to parameters with two or more dimensions."
    warmup_steps: NonNegativeInt = 0
    "Steps of linear warm-up."
    clip_norm: PositiveFloat | None = 1.0
    "Maximum norm of the whole gradient over all ranks. `null` does not clip."
    seed: NonNegativeInt = 0
    "Seed of the parameters, the order of the samples and every random draw."
    eval_every: PositiveInt | None = None
    "Steps between two evaluations on the held-out data. Default: no evaluation."
    checkpoint_every: PositiveInt | None = 100
    "Steps between two checkpoints. The last step and a requested stop always write one."
    keep_checkpoints: PositiveInt = 2
    "Number of newest checkpoints to keep."
    keep_best: bool = False
    "Also keep the checkpoint with the lowest held-out loss. `eval_every` must divide `checkpoint_every`."
    workers: NonNegativeInt = 0
    "DataLoader processes per rank. 0 fetches samples in the rank itself."
    find_unused_parameters: bool = False
    "Let DDP search each step for parameters that did not affect the loss. This takes time."
    collective_timeout: Seconds = 600
    "How long a rank waits in one collective before the run ends as `nccl-timeout`."
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    "Where metrics go besides metrics.jsonl. Needs launcher's extra `track`."
    memory_alert: Threshold = "95%"
    "Report a rank whose peak exceeds this share of the device's memory, or this size."
    probe: Literal["auto", "always", "never"] = "auto"
    "Before the first step, find the largest micro-batch that fits. auto: on GPUs and under a memory budget."
    record_memory: bool = False
    "Record the stack of every GPU allocation for the snapshot that an OOM leaves."
    async_checkpoints: bool | None = None
    "Write checkpoints during training, from a copy in host memory. Default: on GPUs only."
    nvme_dir: Annotated[str, AfterValidator(no_nul)] | None = None
    "Directory on a local NVMe disk of each node, for the files of `offload: nvme-optimizer`."


class Model(Value):
    """Properties of the model that launcher can see only by importing your code."""

    batch_norm: bool = False
    "The model has BatchNorm layers. No recipe then has a micro-batch of one."
    couples_samples: bool = False
    "The loss of a sample depends on the other samples of its micro-batch, as in a contrastive loss."


class Declared(Value):
    """Facts that the planner cannot find out by itself."""

    model: str | None = Field(None, pattern=r"^hf:.+$")
    "Model that a `command:` trains: `hf:PATH` to a transformers config.json or its directory, in `workdir`."
    length: PositiveInt | None = None
    "Tokens per sample. Required with `model`."
    params: PositiveInt | None = None
    "Number of parameters of the model that a `command:` trains, if nothing else is known."
    vary: dict[str, tuple[JsonValue, ...]] = {}
    "Arguments of the task that a run may lower, each with its values from high to low, the job's own first."


def _as_home_or_path(file: str) -> str:
    if file.startswith("~") and not file.startswith("~/"):
        raise ValueError(f"only your own home directory, `~/`, is known; write {file!r} as an absolute path")
    return no_nul(file)


def _as_inside(pattern: str) -> str:
    path = PurePosixPath(no_nul(pattern))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("name a path below `workdir`, relative to it")
    return pattern


class Secret(Value):
    """The name of an environment variable and the source of its value. Never holds the value."""

    name: EnvName
    "Variable that the ranks get. `[NAME]` is short for `[{name: NAME}]`."
    env: EnvName | None = None
    "Variable of your environment that holds the value. Default: `name`."
    file: Annotated[str, AfterValidator(_as_home_or_path)] | None = Field(None, min_length=1)
    "File that holds the value: absolute, below `~/`, or relative to `workdir`."
    runpod: str | None = None
    "Name of a secret that RunPod stores."

    @model_validator(mode="after")
    def _one_source(self) -> Secret:
        if sum(source is not None for source in (self.env, self.file, self.runpod)) > 1:
            raise ValueError("give one of env, file, runpod")
        return self


class Retries(Value):
    """How often each kind of restart may happen in one run."""

    lower: NonNegativeInt = 8
    "Downgrades to a recipe that needs less memory. 0 ends the run at its first OOM and disables the probe."
    lower_micro_batch: bool | None = None
    """Whether an OOM may lower the micro-batch. Default: yes, unless the job fixes
    `recipe.micro_batch_size` and the loss couples samples."""
    same: NonNegativeInt = 3
    "Restarts with the same recipe after a lost node, a network failure or an unknown failure."
    preemptions: NonNegativeInt = 20
    "New submissions after a preemption."
    time_limits: NonNegativeInt = 20
    "New submissions after a time limit."


def _as_secret(item: Any) -> Any:
    return {"name": item} if isinstance(item, str) else item


def _as_recipe(value: Any) -> Any:
    if value == "auto" or value is None:
        return {}
    if isinstance(value, str):
        raise ValueError(f"write `recipe: auto` or the fields to fix, not {value!r}")
    return value


def _as_command(value: Any) -> Any:
    if isinstance(value, str):
        return split(value)
    if isinstance(value, list | tuple):
        return [number_as_text(argument) for argument in value]
    return value


_Command = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_command, json_schema_input_type=str | list[str | int | float]),
    AfterValidator(check_command),
]
_AnySecret = Annotated[Secret, BeforeValidator(_as_secret, json_schema_input_type=str | Secret)]
_Recipe = Annotated[
    RecipeChoice, BeforeValidator(_as_recipe, json_schema_input_type=Literal["auto"] | RecipeChoice)
]


class Job(Value):
    """One training job. Give `task` (the built-in entrypoint) or `command` (any script)."""

    name: Annotated[str, AfterValidator(no_nul)] = Field(min_length=1, max_length=100)
    "Name of the job. The ids of its runs begin with it."
    task: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    "Class to train with the built-in entrypoint, as `package.module:Class`; a `launcher.train.Task`."
    args: dict[str, JsonValue] = {}
    "Keyword arguments of the task."
    adapter: Adapter | None = None
    "Small matrices to train in place of the task's whole model."
    command: _Command | None = None
    "Script to start once per rank, without a shell: text or a list. Placeholders are filled in."
    workdir: str = "."
    "Directory in which the processes start, relative to the job file."
    batch: Batch
    "The global batch."
    steps: PositiveInt | None = None
    "Number of optimizer steps. A task needs `steps` or `epochs`."
    epochs: PositiveInt | None = None
    "Number of passes over the training data."
    resources: Resources = Resources()
    "Nodes, GPUs, memory and time of one submission."
    recipe: _Recipe = RecipeChoice()
    "`auto`, or the fields of the recipe to fix."
    train: Training = Training()
    "Settings of the built-in entrypoint."
    model: Model = Model()
    "Properties of the model."
    plan: Declared = Declared()
    "Facts for the planner."
    env: Env = {}
    "Environment variables of the ranks, as text."
    secrets: tuple[_AnySecret, ...] = ()
    "Environment variables whose values are read at start and never written."
    send: tuple[Annotated[str, AfterValidator(_as_inside)], ...] = ()
    """Files or patterns below `workdir` that are sent to another machine even if they look like secrets or
    are ignored."""
    image: str | None = None
    "Container image, or `catalog:NAME`. Default: `container.image` of the profile."
    requeue: bool = True
    "Continue in a new submission after a preemption, a time limit or, on Slurm, a failed node."
    retries: Retries = Retries()
    "How often the run may restart."
    stall_timeout: Seconds | None = None
    """End an attempt if no rank has printed anything for this long. Default: never. For scripts that may
    hang after a failure that they caught."""
    stop_timeout: Seconds | None = None
    """How long the ranks may take to save and end before they are killed, if the run is to stop. Default:
    `slurm.signal_seconds` of the profile, elsewhere 2 minutes. A scheduler may leave less time."""
    failures: tuple[FailurePattern, ...] = ()
    "Lines of your program's output that show why it failed."
    tags: tuple[str, ...] = ()
    "Words by which `launcher list --tag` finds the run."

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if any(ord(char) < 32 or ord(char) == 127 for char in name):
            raise ValueError("contains a line break or another control character")
        return name

    @field_validator("workdir")
    @classmethod
    def _workdir_text(cls, workdir: str) -> str:
        return str(PurePosixPath(no_nul(workdir)))

    def stop_seconds(self, signal_seconds: int) -> int:
        """Return how many seconds before its time limit a run is asked to stop."""
        return self.stop_timeout or signal_seconds

    def unread(self) -> tuple[list[str], list[str]]:
        """Return the fields set in a job with `command:` that its script may miss.

        The first list holds fields that nothing reads, the second those that ranks get only through their
        environment. Batch fields and tags are excluded.
        """
        nothing: list[str] = []
        environment: list[str] = []
        declared = self.plan.model is not None or self.plan.params is not None  # the plan reads the recipe
        for field in _changed_fields(self) if self.command is not None else ():
            placeholder = placeholder_of(field)
            if placeholder is None:
                used = field == "tags" or (declared and field.startswith("recipe."))
                nothing += [field] if not (affects_ranks(field) or used) else []
            elif placeholder not in ("global_batch", "micro_batch_size", "grad_accum"):
                environment += [field] if not uses(self.command or (), placeholder) else []
        return nothing, environment

    @property
    def shaped_by(self) -> dict[str, JsonValue]:
        """What determines the shapes of a task's model and samples: its arguments, and the adapter."""
        if self.adapter is None:
            return self.args
        return {**self.args, "(adapter)": self.adapter.model_dump(mode="json")}

    def with_model(self, **properties: bool) -> Job:
        """Return this job with these properties of its model added to those that it declares."""
        model = self.model.model_copy(update={name: True for name, value in properties.items() if value})
        return self.model_copy(update={"model": model})

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        for _, message in cross_problems(self.model_dump(by_alias=True)):
            raise ValueError(message)
        return self


def _changed_fields(value: Value, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of the fields that differ from their defaults."""
    for name, info in type(value).model_fields.items():
        inner, path = getattr(value, name), f"{prefix}{info.alias or name}"
        if isinstance(inner, Value):
            yield from _changed_fields(inner, f"{path}.")
        elif inner != info.get_default(call_default_factory=True):
            yield path


def cross_problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key path, message) for errors that involve several fields. Works on unvalidated data too."""
    task, command = data.get("task"), data.get("command")
    if task is None and command is None:
        yield (), "give `task:` (built-in entrypoint) or `command:` (any script)"
    if task is not None and command is not None:
        yield ("command",), "give either `task:` or `command:`, not both"
    steps, epochs = data.get("steps"), data.get("epochs")
    if task is not None and steps is None and epochs is None:
        yield ("task",), "a task needs `steps:` or `epochs:`"
    if steps is not None and epochs is not None:
        yield ("epochs",), "give either `steps:` or `epochs:`, not both"
    if command is not None and data.get("args"):
        yield ("args",), "belongs to `task:`; put a command's arguments into `command:`"
    if command is not None and data.get("adapter"):
        yield ("adapter",), "belongs to `task:`; a command's own code adds its adapters"
    yield from _plan_problems(data)
    train = data.get("train")
    if isinstance(train, Mapping) and train.get("keep_best") is True:
        every, saves = train.get("eval_every"), train.get("checkpoint_every", 100)
        if not isinstance(every, int) or not isinstance(saves, int) or every < 1 or saves % every:
            yield (
                ("train", "keep_best"),
                "needs the loss of each checkpoint: give an `eval_every` that divides `checkpoint_every`",
            )
    env, secrets = data.get("env"), data.get("secrets")
    if task is not None and isinstance(env, Mapping):
        given = {name: value for name, value in env.items() if value is not None}
        for variable, message in env_problems(given):
            yield ("env", variable), message
    if isinstance(env, Mapping) and isinstance(secrets, list | tuple):
        for item in secrets:
            name = item.get("name") if isinstance(item, Mapping) else item
            if isinstance(name, str) and name in env:
                yield (
                    ("env", name),
                    "is in `env:` and in `secrets:`; a secret's value must not be in the file",
                )


def _plan_problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    plan, args = data.get("plan"), data.get("args")
    if not isinstance(plan, Mapping):
        return
    given = {name for name, value in plan.items() if value}
    if data.get("command") is None:
        for name in sorted(given & {"model", "length", "params"}):
            yield (
                ("plan", name),
                "belongs to `command:`; a `task:` is asked for its model and samples",
            )
    elif "vary" in given:
        yield ("plan", "vary"), "belongs to `task:`: the arguments of a command are not known"
    if {"model", "params"} <= given:
        yield ("plan", "params"), "give either `model:` or `params:`, not both"
    if "model" in given and "length" not in given:
        yield ("plan", "model"), "needs `length:`, the tokens of a sample"
    if "length" in given and "model" not in given:
        yield ("plan", "length"), "belongs to `model:`"
    vary = plan.get("vary")
    for name, values in vary.items() if isinstance(vary, Mapping) else ():
        if not isinstance(values, list | tuple):
            continue
        if len(values) < 2:
            yield ("plan", "vary", name), "needs the job's own value and a lower one"
            continue
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values) and any(b >= a for a, b in itertools.pairwise(numbers)):
            yield ("plan", "vary", name), "must be in falling order"
        elif isinstance(args, Mapping) and name in args and args[name] != values[0]:
            message = f"begins with {values[0]!r}, but args has {args[name]!r}; the job's own must be first"
            yield ("plan", "vary", name), message
