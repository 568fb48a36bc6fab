"""Read keys and pauses from the environment or the user's configuration. Keys are used in requests only."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.errors import ApiError, clean
from launcher.spec import variables


def folder() -> Path:
    return Path(platformdirs.user_config_dir("launcher"))


def api_key() -> str:
    """Return RunPod's API key. Raises SchedulerError."""
    key = os.environ.get("RUNPOD_API_KEY", "").strip() or _file("runpod-key")
    if not key:
        raise SchedulerError(
            "there is no RunPod API key: export RUNPOD_API_KEY, or write it into "
            f"{folder() / 'runpod-key'} (chmod 600); RunPod's console makes one under Settings, API Keys"
        )
    return _plain(key, "RunPod's API key")


def has_api_key() -> bool:
    return bool(os.environ.get("RUNPOD_API_KEY", "").strip()) or (folder() / "runpod-key").exists()


def s3_keys() -> tuple[str, str]:
    """Return the access key and the secret key for the S3 API of network volumes. Raises SchedulerError."""
    access = os.environ.get("RUNPOD_S3_ACCESS_KEY", "").strip()
    secret = os.environ.get("RUNPOD_S3_SECRET_KEY", "").strip()
    if not (access and secret):
        access, colon, secret = _file("runpod-s3-key").partition(":")
        if not (access and colon and secret):
            raise SchedulerError(
                "there is no key for the S3 API of RunPod's network volumes (it is not the API key): export "
                "RUNPOD_S3_ACCESS_KEY and RUNPOD_S3_SECRET_KEY, or write `access:secret` into "
                f"{folder() / 'runpod-s3-key'} (chmod 600); RunPod's console makes one under Settings, "
                "S3 API Keys"
            )
    return _plain(access, "the S3 access key"), _plain(secret, "the S3 secret key")


def pause_seconds() -> float:
    """Return the pause before the first retry in seconds; each further pause is twice as long.

    It is shorter for a sandbox. Raises ApiError.
    """
    written = os.environ.get(variables.RUNPOD_PAUSE, "1")
    try:
        pause = float(written)
    except ValueError:
        pause = -1.0
    if not 0 <= pause < float("inf"):
        raise ApiError(f"{variables.RUNPOD_PAUSE}: {clean(written)!r} is not a number of seconds, e.g. 0.5")
    return pause


def pace() -> float:
    """Return the factor of all waiting times. It is below 1 for a sandbox only. Raises ApiError."""
    return min(1.0, pause_seconds())


def _file(name: str) -> str:
    path = folder() / name
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise SchedulerError(f"{path} can be read by others (mode {mode:o}): chmod 600 {path}")
            return file.read().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SchedulerError(f"{path}: {error.strerror}") from None


def _plain(key: str, what: str) -> str:
    """Return the key if it is valid. A line break would end the HTTP header, and an error would show the key.

    Raises SchedulerError.
    """
    if not key.isascii() or not key.isprintable() or " " in key:
        raise SchedulerError(f"{what} contains a space, a line break or another character that no key has")
    return key
