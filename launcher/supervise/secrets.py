"""Read the values of secrets when the run starts. They go into the ranks' environment and nowhere else.

It uses only the standard library, because its source is sent to ssh hosts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.spec.job import Secret

LONGEST = 128 * 1024
"Maximum bytes of NAME=VALUE with its NUL: Linux passes no longer string to a process (MAX_ARG_STRLEN)."


class SecretError(Exception):
    """A secret has no value that a process can receive. The message names the secret, never its value."""


class SecretMissingError(SecretError):
    """The file or environment variable of a secret does not exist."""


def read_secrets(secrets: Sequence[Secret], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `{name: value}`. Secrets in `given` are not read again.

    Raises SecretError, which names every secret that cannot be read.
    """
    values, problems = dict(given or {}), []
    for secret in secrets:
        if secret.name not in values:
            try:
                values[secret.name] = read_secret(secret.name, secret.env, secret.file)
            except SecretError as error:
                problems.append(str(error))
    if problems:
        raise SecretError("; ".join(problems))
    return values


def secrets_with_values(secrets: Sequence[Secret]) -> dict[str, str]:
    """Return the secrets that have a value on this machine. Raises SecretError for an unusable value."""
    values = {}
    for secret in secrets:
        with contextlib.suppress(SecretMissingError):
            values[secret.name] = read_secret(secret.name, secret.env, secret.file)
    return values


def read_secret(name: str, env: str | None, file: str | None) -> str:
    """Return the value of the secret `name` from its file or its environment variable. Raises SecretError."""
    if file is not None:
        return read_secret_file(name, file)
    source = env or name
    if source not in os.environ:
        raise SecretMissingError(f"{name}: the environment variable {source} is not set")
    value = os.environ[source]
    if value:
        _checked(name, os.fsencode(value), f"the environment variable {source}")
    return value


def read_secret_file(name: str, file: str) -> str:
    """Return the value of the secret `name`, without surrounding white space.

    `file` may begin with `~/`. Raises SecretError.
    """
    try:
        descriptor = os.open(Path(file).expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SecretMissingError(f"{name}: there is no file {file}") from None
    except OSError as error:
        raise SecretError(f"{name}: cannot read {file}: {error.strerror}") from None
    except RuntimeError:
        raise SecretError(f"{name}: {file}: your home directory is not known; set HOME") from None
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            what = "a directory" if stat.S_ISDIR(kind) else "a pipe, a device or a socket"
            raise SecretError(f"{name}: {file} is {what}; name a regular file")
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(LONGEST + 1)
    except OSError as error:
        raise SecretError(f"{name}: cannot read {file}: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return _checked(name, data, file).strip()


def _checked(name: str, data: bytes, where: str) -> str:
    """Return the value as text. Raises SecretError if no process can receive it."""
    if not data.strip():
        raise SecretError(f"{name}: {where} is empty")
    if len(name) + len(data.strip()) + 2 > LONGEST:
        raise SecretError(
            f"{name}: {where} is too large: a variable of the environment has at most {LONGEST // 1024} KiB; "
            "let your program read the file"
        )
    if b"\0" in data:
        raise SecretError(f"{name}: {where} contains a NUL byte, which no process can receive; {_ENCODE}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SecretError(
            f"{name}: {where} is not UTF-8 text (byte {error.start + 1} cannot be read); {_ENCODE}"
        ) from None


_ENCODE = "store it as base64 and decode it in your program"
