"""Cache accounting's answers for an hour. A query to slurmdbd takes as long as the rest of a submission."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

import platformdirs

from launcher.rundir.files import read_record, replace_json
from launcher.schedulers.login import Answer, LocalLogin, Login
from launcher.schedulers.slurm.records import NOT_ASKED
from launcher.schedulers.slurm.site import NOT_ENFORCED, OF_ACCOUNTING

KEPT_SECONDS = 3600.0
_STAMP = ("ClusterName", "AccountingStorageHost", "AccountingStorageEnforce")


class CachedAnswers(NamedTuple):
    """Accounting's answers, at most an hour old."""

    answers: dict[str, Answer]
    stamp: list[str]
    "The cluster that the answers are about; see `stamp`."


def read_cache(login: Login) -> CachedAnswers | None:
    """Return the answers cached by the last submission, or None if there are none or they are too old."""
    record = read_record(_file(login))
    with suppress(KeyError, TypeError, ValueError):
        if 0 <= time.time() - record["time"] < KEPT_SECONDS:
            return CachedAnswers(
                {name: Answer(*record["answers"][name]) for name in OF_ACCOUNTING}, record["stamp"]
            )
    return None


def write_cache(login: Login, answers: Mapping[str, Answer]) -> None:
    """Cache accounting's answers if all of them arrived."""
    accounting_answers = {name: answers.get(name, NOT_ASKED) for name in OF_ACCOUNTING}
    if answers["config"].code or any(
        answer.code not in (0, NOT_ENFORCED) for answer in accounting_answers.values()
    ):
        return
    file = _file(login)
    value = {"time": time.time(), "stamp": stamp(answers)}
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_json(
            file, {**value, "answers": {name: astuple(answer) for name, answer in accounting_answers.items()}}
        )


def stamp(answers: Mapping[str, Answer]) -> list[str]:
    """Return which cluster the answers are about, and what it enforces.

    The stamp is needed because several clusters may share a home directory.
    """
    config = answers["config"].out
    matches = (re.search(rf"^{name}\s*=\s*(.*)$", config, re.MULTILINE) for name in _STAMP)
    return [match[1].strip() if match else "" for match in matches]


def _file(login: Login) -> Path:
    here = (socket.gethostname(), login.first) if isinstance(login, LocalLogin) else ("", "")
    where = "\0".join((login.name, *here, os.environ.get("SLURM_CONF", ""), str(os.getuid())))
    name = hashlib.sha256(where.encode()).hexdigest()[:16]
    return Path(platformdirs.user_cache_dir("launcher")) / "slurm" / f"{name}.json"
