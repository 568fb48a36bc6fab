"""Secret values are read here, at start, into the environment of the ranks, and nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from launcher.spec.job import Secret
from launcher.supervise.secret_file import NoSecretFileError, SecretFileError, checked, read_secret_file


class SecretError(Exception):
    """A secret cannot be given to the ranks; the message names it, never a value."""


class SecretMissingError(SecretError):
    """There is nothing where its value should be."""


def read_secrets(secrets: Sequence[Secret], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `{name: value}`; what is `given` is not looked for. Raises SecretError that names all wrong
    ones."""
    values, wrong = dict(given or {}), []
    for secret in secrets:
        if secret.name not in values:
            try:
                values[secret.name] = _read(secret)
            except SecretError as error:
                wrong.append(str(error))
    if wrong:
        raise SecretError("; ".join(wrong))
    return values


def found(secrets: Sequence[Secret]) -> dict[str, str]:
    """Those that have a value on this machine. Raises SecretError for one that no process can receive."""
    values = {}
    for secret in secrets:
        with contextlib.suppress(SecretMissingError):
            values[secret.name] = _read(secret)
    return values


def _read(secret: Secret) -> str:
    try:
        if secret.file is not None:
            return read_secret_file(secret.name, secret.file)
        source = secret.env or secret.name
        if source not in os.environ:
            raise SecretMissingError(f"{secret.name}: the environment variable {source} is not set")
        value = os.environ[source]
        if value:
            checked(secret.name, os.fsencode(value), f"the environment variable {source}")
        return value
    except NoSecretFileError as error:
        raise SecretMissingError(str(error)) from None
    except SecretFileError as error:
        raise SecretError(str(error)) from None
