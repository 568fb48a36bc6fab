"""Read the values of secrets when the run starts. They go into the ranks' environment and nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from launcher.spec.job import Secret
from launcher.supervise.secret_file import NoSecretFileError, SecretFileError, checked, read_secret_file


class SecretError(Exception):
    """A secret cannot be given to the ranks. The message names the secret, never its value."""


class SecretMissingError(SecretError):
    """The file or environment variable of a secret does not exist."""


def read_secrets(secrets: Sequence[Secret], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `{name: value}`. Secrets in `given` are not read again.

    Raises SecretError, which names every secret that cannot be read.
    """
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
    """Return the secrets that have a value on this machine. Raises SecretError for an unusable value."""
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
