"""Read the value of a secret from a file.

It uses only the standard library, because its source is sent to SSH hosts.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

LONGEST = 128 * 1024
"Maximum bytes of NAME=VALUE with its NUL: Linux passes no longer string to a process (MAX_ARG_STRLEN)."


class SecretFileError(Exception):
    """The file holds no value that a process can receive. The message names the file, never its content."""


class NoSecretFileError(SecretFileError):
    """The file does not exist."""


def read_secret_file(name: str, file: str) -> str:
    """Return the value of the secret `name`, without surrounding white space.

    `file` may begin with `~/`. Raises SecretFileError.
    """
    try:
        descriptor = os.open(Path(file).expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NoSecretFileError(f"{name}: there is no file {file}") from None
    except OSError as error:
        raise SecretFileError(f"{name}: cannot read {file}: {error.strerror}") from None
    except RuntimeError:
        raise SecretFileError(f"{name}: {file}: your home directory is not known; set HOME") from None
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            what = "a directory" if stat.S_ISDIR(kind) else "a pipe, a device or a socket"
            raise SecretFileError(f"{name}: {file} is {what}; name a regular file")
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(LONGEST + 1)
    except OSError as error:
        raise SecretFileError(f"{name}: cannot read {file}: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return checked(name, data, file).strip()


def checked(name: str, data: bytes, where: str) -> str:
    """Return the value as text. Raises SecretFileError if no process can receive it."""
    if not data.strip():
        raise SecretFileError(f"{name}: {where} is empty")
    if len(name) + len(data.strip()) + 2 > LONGEST:
        raise SecretFileError(
            f"{name}: {where} is too large: a variable of the environment has at most {LONGEST // 1024} KiB; "
            "let your program read the file"
        )
    if b"\0" in data:
        raise SecretFileError(f"{name}: {where} contains a NUL byte, which no process can receive; {_ENCODE}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SecretFileError(
            f"{name}: {where} is not UTF-8 text (byte {error.start + 1} cannot be read); {_ENCODE}"
        ) from None


_ENCODE = "store it as base64 and decode it in your program"
