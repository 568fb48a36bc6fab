"""Secret values are read here, at start, into the environment of the ranks, and nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.spec.job import Secret


class SecretMissingError(Exception):
    """A secret's source is empty; the message names it, never a value."""


def read_secrets(secrets: Sequence[Secret], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """`{name: value}`; what is `given` is not looked for. Raises SecretMissingError with all missing ones."""
    values, missing = dict(given or {}), []
    for secret in secrets:
        if secret.name not in values:
            try:
                values[secret.name] = _read(secret)
            except SecretMissingError as error:
                missing.append(str(error))
    if missing:
        raise SecretMissingError("; ".join(missing))
    return values


def found(secrets: Sequence[Secret]) -> dict[str, str]:
    """Those that have a value on this machine."""
    values = {}
    for secret in secrets:
        with contextlib.suppress(SecretMissingError):
            values[secret.name] = _read(secret)
    return values


def _read(secret: Secret) -> str:
    if secret.file is not None:
        try:
            return Path(secret.file).expanduser().read_text().strip()
        except OSError as error:
            raise SecretMissingError(f"{secret.name}: cannot read {secret.file}: {error.strerror}") from None
    source = secret.env or secret.name
    if source not in os.environ:
        raise SecretMissingError(f"{secret.name}: the environment variable {source} is not set")
    return os.environ[source]
