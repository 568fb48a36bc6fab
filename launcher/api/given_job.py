"""A job as the caller passes it: a file, a mapping of its fields, or a Job."""

from __future__ import annotations

import copy
import json
import numbers
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from launcher.spec.errors import Problem, SpecError, UsageError
from launcher.spec.job import Job
from launcher.spec.load import load_job, read, validate, with_overrides
from launcher.spec.yaml import Document

if TYPE_CHECKING:
    from collections.abc import Sequence

JobLike: TypeAlias = Path | str | Mapping[str, Any] | Job
NO_FILE = "(no file)"
"Replaces the name of the job file if there is none."
Values: TypeAlias = Mapping[str, Any]
"Values by dotted field path, such as `{'train.lr': 1e-4}`."


@dataclass(frozen=True)
class GivenJob:
    """A job from `file`, or from `data`.

    Relative paths start in the folder of `file`, which then need not exist.
    """

    file: Path
    data: Mapping[str, Any] | None = None

    def document(self, overrides: Sequence[str] = ()) -> Document:
        """Return the job's data, not validated yet. Raises SpecError, OSError."""
        if self.data is None:
            with _readable():
                return read(self.file, overrides)
        try:
            data = copy.deepcopy(dict(self.data))
        except (TypeError, RecursionError) as error:
            raise UsageError(f"the job: {error}: give plain dicts, lists, strings and numbers") from None
        return with_overrides(Document(data, "the job"), overrides)

    def job(self, overrides: Sequence[str] = ()) -> Job:
        """Return the validated job. Raises SpecError, OSError."""
        if self.data is None:
            with _readable():
                return load_job(self.file, overrides)
        return validate(Job, self.document(overrides))


def as_given_job(job: JobLike | GivenJob) -> GivenJob:
    """Wrap a job, unless it is wrapped already.

    Relative paths of a mapping or a Job start in the current directory. Raises UsageError.
    """
    if isinstance(job, GivenJob):
        return job
    no_file = Path.cwd() / NO_FILE
    if isinstance(job, Job):
        return GivenJob(no_file, job.model_dump(mode="json", by_alias=True, exclude_unset=True))
    if isinstance(job, Mapping):
        return GivenJob(no_file, job)
    if not isinstance(job, str | Path):
        raise UsageError(f"{job!r} is not a job: give the path of a file, a mapping or a Job")
    return GivenJob(Path(job))


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None


def overrides_of(values: Values | Sequence[str] | None) -> list[str]:
    """Return the values as texts for `--set`.

    Raises UsageError, and SpecError for a value that a file cannot hold.
    """
    if values is None:
        return []
    if isinstance(values, Mapping):
        return [f"{name}={as_text(name, value)}" for name, value in values.items()]
    if (
        isinstance(values, str)
        or not isinstance(values, Iterable)
        or not all(isinstance(text, str) for text in values)
    ):
        raise UsageError(f"set: give a mapping such as {{'train.lr': 1e-4}}, not {values!r}")
    return list(values)


def as_text(name: str, value: Any) -> str:
    """Return the text after the `=`. Text fields take it literally; task arguments are parsed as YAML."""
    if not isinstance(name, str):
        raise SpecError([Problem("set", repr(name), "the name of a field is text")])
    if "=" in name:
        raise SpecError([Problem("set", name, "no field has `=` in its name")])
    if value is None:
        raise SpecError([Problem("set", name, "None is not a value; leave the field out")])
    if isinstance(value, str) and not name.startswith("args."):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_number)
    except (TypeError, ValueError, RecursionError):
        message = f"{value!r} is not a number, text, list or mapping"
        raise SpecError([Problem("set", name, message)]) from None


def _number(value: Any) -> int | float:
    """Return a number of another library, such as numpy, as one of Python. Raises TypeError."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError
