"""Job: what the user wants to train."""

from __future__ import annotations

import itertools
import shlex
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

from launcher.spec.base import Bytes, Env, EnvName, Seconds, Threshold, Value
from launcher.spec.command import check_command, reads, seen_as, uses
from launcher.spec.failures import FailurePattern
from launcher.spec.recipe import RecipeChoice
from launcher.spec.text import no_nul


class Batch(Value):
    global_: PositiveInt = Field(alias="global")
    "Samples per optimizer step over all ranks. No recipe changes it."


class Resources(Value):
    nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt | None = None
    "GPUs on each node; 0 trains on the CPU; left out, all that the cluster's nodes have."
    ranks_per_node: PositiveInt | None = None
    "Processes on each node; left out, one per GPU (one in all without GPUs)."
    cpus_per_node: PositiveInt | None = None
    memory_per_node: Bytes | None = None
    time: Seconds | None = None
    "Wall-clock limit of one submission."


class Training(Value):
    """Settings of the built-in entrypoint (`task:` jobs)."""

    lr: PositiveFloat = 3e-4
    "Peak of the learning rate: linear warm-up, then a cosine to a tenth of it at the last step."
    weight_decay: NonNegativeFloat = 0.1
    warmup_steps: NonNegativeInt = 0
    clip_norm: PositiveFloat | None = 1.0
    seed: NonNegativeInt = 0
    eval_every: PositiveInt | None = None
    "Steps between two evaluations on the held-out data; left out, none."
    checkpoint_every: PositiveInt | None = 100
    "Steps between two checkpoints; the last step and a requested stop always write one."
    keep_checkpoints: PositiveInt = 2
    keep_best: bool = False
    "The checkpoint with the lowest held-out loss stays besides. `eval_every` divides `checkpoint_every`."
    workers: NonNegativeInt = 0
    "DataLoader processes of each rank; 0 fetches samples in the rank itself."
    find_unused_parameters: bool = False
    "DDP looks in each step for parameters that took no part in the loss, at some cost."
    collective_timeout: Seconds = 600
    "How long a rank waits for the others in one collective before it gives up; NCCL's own default."
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    "Where metrics go besides metrics.jsonl; needs launcher's extra `track`."
    memory_alert: Threshold = "95%"
    "A line and an event when a rank's peak passes it: of the device's memory (90%), or a size (45GiB)."
    probe: Literal["auto", "always", "never"] = "auto"
    "Before the first step, find the largest micro-batch that fits; auto: on GPUs, and under a memory budget."
    record_memory: bool = False
    "Record every allocation on the GPU with its stack, so that the snapshot of an OOM tells who made it."
    async_checkpoints: bool | None = None
    "Written while the training goes on, from a copy in host memory; left out, on GPUs only."
    nvme_dir: Annotated[str, AfterValidator(no_nul)] | None = None
    "Where `offload: nvme-optimizer` keeps its scratch files: a directory on a local NVMe disk of each node."


class Model(Value):
    """What cannot be seen without importing the user's code."""

    batch_norm: bool = False
    "The model has BatchNorm layers: its statistics need a micro-batch of two or more."
    couples_samples: bool = False
    "The loss of one sample depends on the others of its micro-batch: a smaller one is another objective."


class Declared(Value):
    """What the planner cannot see by itself."""

    model: str | None = Field(None, pattern=r"^hf:.+$")
    "Of a `command:`: `hf:PATH`, a transformers config.json or a directory with one, relative to `workdir`."
    length: PositiveInt | None = None
    "Tokens of a sample, with `model`."
    params: PositiveInt | None = None
    "Of a `command:` of which no more is known: how many parameters its model has, such as 8.5e9."
    vary: dict[str, tuple[JsonValue, ...]] = {}
    "Arguments of the task that may be lowered, each with its values in falling order, the job's own first."


def _as_home_or_path(file: str) -> str:
    if file.startswith("~") and not file.startswith("~/"):
        raise ValueError(f"only `~/`, your own home directory, is known; write {file!r} as an absolute path")
    return no_nul(file)


def _as_inside(pattern: str) -> str:
    path = PurePosixPath(no_nul(pattern))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("name something below `workdir`, relative to it")
    return pattern


class Secret(Value):
    """The name of an environment variable, and where its value is read at start. Never the value."""

    name: EnvName
    env: EnvName | None = None
    file: Annotated[str, AfterValidator(_as_home_or_path)] | None = Field(None, min_length=1)
    "Relative to `workdir`, or absolute; a leading `~/` is the home directory of the machine that reads it."
    runpod: str | None = None
    "The name of a RunPod secret."

    @model_validator(mode="after")
    def _one_source(self) -> Secret:
        if sum(source is not None for source in (self.env, self.file, self.runpod)) > 1:
            raise ValueError("give one of env, file, runpod")
        return self


class Retries(Value):
    """Budgets: how often each kind of restart may happen in one run."""

    lower: NonNegativeInt = 8
    "Restarts with a recipe that needs less memory."
    lower_micro_batch: bool | None = None
    """Whether memory that runs out may lower the micro-batch. Left out: yes, unless the job fixes
    `recipe.micro_batch_size` and the loss couples samples."""
    same: NonNegativeInt = 3
    "Restarts with the same recipe after a lost node, a network failure or an unknown one."
    preemptions: NonNegativeInt = 20
    time_limits: NonNegativeInt = 20


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
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ValueError(f"cannot split into arguments ({error}); write a list instead") from None
    if isinstance(value, list | tuple):
        return [str(x) if isinstance(x, int | float) and not isinstance(x, bool) else x for x in value]
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
    task: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    "`package.module:Class`, a launcher.train.Task."
    args: dict[str, JsonValue] = {}
    "Keyword arguments of the task."
    command: _Command | None = None
    "Started once per rank by torchrun, without a shell; `{micro_batch_size}` and its kin are filled in."
    workdir: str = "."
    "Where the processes start; relative to the job file."
    batch: Batch
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    resources: Resources = Resources()
    recipe: _Recipe = RecipeChoice()
    train: Training = Training()
    model: Model = Model()
    plan: Declared = Declared()
    env: Env = {}
    secrets: tuple[_AnySecret, ...] = ()
    send: tuple[Annotated[str, AfterValidator(_as_inside)], ...] = ()
    """Files or folders below `workdir` that go to another machine with the code although they look like
    secrets or are ignored, such as `certs/test.pem` or `certs/*.pem`."""
    image: str | None = None
    requeue: bool = True
    "Go on in a new submission after a preemption or a time limit."
    retries: Retries = Retries()
    stall_timeout: Seconds | None = None
    """An attempt is ended and judged when none of its ranks has printed anything for this long; left out,
    never. For commands that may hang after a failure that they caught."""
    stop_timeout: Seconds | None = None
    """How long ranks may take to save and end when the run is to stop, before they are killed; left out,
    `slurm.signal_seconds` of the profile, elsewhere 2 minutes. A scheduler may leave less."""
    failures: tuple[FailurePattern, ...] = ()
    "Words of your own program that tell why it failed."
    tags: tuple[str, ...] = ()

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
        """How long before its time limit a run is asked to stop, in a profile with `signal_seconds`."""
        return self.stop_timeout or signal_seconds

    def unread(self) -> tuple[list[str], list[str]]:
        """Fields of a job with `command:` that are set: those that nothing reads, and those that its ranks
        find in their environment only. What is said of the batch and of tags anyway is left out."""
        nothing: list[str] = []
        environment: list[str] = []
        declared = self.plan.model is not None or self.plan.params is not None  # the plan reads the recipe
        for field in _changed_fields(self) if self.command is not None else ():
            placeholder = seen_as(field)
            if placeholder is None:
                told = field == "tags" or (declared and field.startswith("recipe."))
                nothing += [field] if not (reads(field) or told) else []
            elif placeholder not in ("global_batch", "micro_batch_size", "grad_accum"):
                environment += [field] if not uses(self.command or (), placeholder) else []
        return nothing, environment

    def with_model(self, **found: bool) -> Job:
        """This job, with what was found in its model beside what it declares."""
        model = self.model.model_copy(update={name: True for name, value in found.items() if value})
        return self.model_copy(update={"model": model})

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        for _, message in cross_problems(self.model_dump(by_alias=True)):
            raise ValueError(message)
        return self


def _changed_fields(value: Value, above: str = "") -> Iterator[str]:
    """Dotted paths of the fields that differ from their defaults."""
    for name, info in type(value).model_fields.items():
        one, path = getattr(value, name), f"{above}{info.alias or name}"
        if isinstance(one, Value):
            yield from _changed_fields(one, f"{path}.")
        elif one != info.get_default(call_default_factory=True):
            yield path


def cross_problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key path, message) for what no field can see alone. Works on unchecked data as well."""
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
                "belongs to `command:`; the model and the samples of a `task:` are asked for",
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
            yield ("plan", "vary", name), "must fall from value to value"
        elif isinstance(args, Mapping) and name in args and args[name] != values[0]:
            message = f"begins with {values[0]!r}, but args says {args[name]!r}: the first is the job's own"
            yield ("plan", "vary", name), message
