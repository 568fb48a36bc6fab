"""Secret values are read here, at start, into the environment of the ranks, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.spec.job import Secret


class SecretMissingError(Exception):
    """A secret's source is empty; the message names it, never a value."""


def read_secrets(secrets: Sequence[Secret]) -> dict[str, str]:
    """`{name: value}`. Raises SecretMissingError with every missing one."""
    values, missing = {}, []
    for secret in secrets:
        source = secret.env or secret.name
        if secret.file is not None:
            try:
                values[secret.name] = Path(secret.file).expanduser().read_text().strip()
            except OSError as error:
                missing.append(f"{secret.name}: cannot read {secret.file}: {error.strerror}")
        elif source in os.environ:
            values[secret.name] = os.environ[source]
        elif secret.runpod is None or secret.name not in os.environ:
            missing.append(f"{secret.name}: the environment variable {source} is not set")
    if missing:
        raise SecretMissingError("; ".join(missing))
    return values
