"""Placeholders in a job's `command:`, filled in for each attempt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from launcher.spec.text import no_nul

PLACEHOLDERS = {
    "micro_batch_size": "recipe.micro_batch_size",
    "grad_accum": "recipe.grad_accum",
    "global_batch": "batch.global",
    "precision": "recipe.precision",
    "optimizer": "recipe.optimizer",
    "sharding": "recipe.sharding",
    "activations": "recipe.activations",
    "steps": "steps",
    "epochs": "epochs",
    "run_id": "run.id",
    "run_dir": "run.dir",
    "checkpoint_dir": "run.checkpoints",
    "attempt": "run.attempt",
}
"""Values passed to a command and its ranks: `{name}` in the command, and the variable `environment_name` in a
rank's environment. Each has its field of the job file, or `run.` and a property of the run."""
_UNREAD = ("train", "recipe", "tags")
_READ = ("recipe.expandable_segments",)

# These programs start a job's processes themselves. launcher starts torchrun, one process per rank.
_OWN_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "srun", "mpirun", "mpiexec", "horovodrun"})
_OWN_LAUNCHER_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
_EXPANDED = re.compile(r"~(/\S*)?|\S*\$([A-Za-z_]\w*|\{[A-Za-z_]\w*\})\S*")
# `${HOME}` belongs to the shell; `{{name}}` stands for a literal `{name}`.
_PATTERN = re.compile(r"(?<!\$)(?:\{\{(?P<literal>[a-z_]+)\}\}|\{(?P<name>[a-z_]+)\})")


def check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command. Raises ValueError if it is certainly a mistake."""
    if not command:
        raise ValueError("`command:` is empty")
    for argument in command:
        no_nul(argument)
    program = PurePosixPath(command[0]).name
    if program.startswith("python") and "-m" in command[1:3]:
        module = command[command.index("-m") + 1 : command.index("-m") + 2]
        program = module[0] if module and module[0] in _OWN_LAUNCHER_MODULES else program
    if program in _OWN_LAUNCHERS | _OWN_LAUNCHER_MODULES:
        raise ValueError(
            f"`command:` starts with {program}, which starts the ranks itself; give the script alone "
            "(for example `python train.py`): launcher starts it once per rank"
        )
    for argument in command:
        for match in _PATTERN.finditer(argument):
            name = match["name"]
            if name is None or name in PLACEHOLDERS:
                continue
            # A user's own `{lr}` stays unchanged. A name close to a placeholder is a spelling mistake.
            near = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.8)
            if near:
                raise ValueError(f"{{{name}}}: unknown placeholder; did you mean {{{near[0]}}}?")
    return command


def environment_name(placeholder: str) -> str:
    """Return the variable with the same value in a rank's environment: `LAUNCHER_MICRO_BATCH_SIZE`."""
    return f"LAUNCHER_{placeholder.upper()}"


def placeholder_of(field: str) -> str | None:
    """Return the placeholder that passes a field of the job to a command, or None."""
    return next((name for name, source in PLACEHOLDERS.items() if source == field), None)


def values_of(job: Mapping[str, Any], recipe: Mapping[str, Any], run: Mapping[str, object]) -> dict[str, str]:
    """Return every placeholder with its value. The value is empty if the job does not set it."""
    values: dict[str, str] = {}
    for name, source in PLACEHOLDERS.items():
        value: Any = {**job, "recipe": recipe, "run": run}
        for key in source.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        values[name] = "" if value is None else str(value)
    return values


def affects_ranks(field: str) -> bool:
    """Return whether a field of a job with `command:` affects the ranks even without a placeholder."""
    return field in _READ or field.partition(".")[0] not in _UNREAD


def uses(command: tuple[str, ...], placeholder: str) -> bool:
    """Return whether an argument contains `{placeholder}`. `{{placeholder}}` is plain text."""
    return any(match["name"] == placeholder for text in command for match in _PATTERN.finditer(text))


def unknown_placeholders(command: tuple[str, ...]) -> list[str]:
    """Return each `{name}` that looks like a placeholder and is none."""
    found = (match for text in command for match in _PATTERN.finditer(text))
    return [
        *dict.fromkeys(match[0] for match in found if match["name"] and match["name"] not in PLACEHOLDERS)
    ]


def for_a_shell(command: tuple[str, ...]) -> list[str]:
    """Return the arguments such as `$HOME/x` or `~/x` that a shell would expand. Text with spaces, or after
    `-c`, is a shell's own script."""
    options = ("", *command)
    return [
        text
        for option, text in zip(options, command, strict=False)
        if option != "-c" and _EXPANDED.fullmatch(text)
    ]


def fill(argument: str, values: Mapping[str, str]) -> str:
    """Replace `{name}` for every name in `values`. Other text, such as JSON or `${HOME}`, stays unchanged."""

    def replace(match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return f"{{{match['literal']}}}" if match["literal"] in values else match[0]
        return values.get(match["name"], match[0])

    return _PATTERN.sub(replace, argument)
