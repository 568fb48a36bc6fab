"""Query the site's Slurm in the background, while Python still imports the rest.

Accounting's answers are cached for an hour: one query to slurmdbd takes as long as the rest of a submission.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

import platformdirs

from launcher.rundir.files import read_record, replace_json
from launcher.schedulers.login import Answer, Here, Login, LoginError, ask
from launcher.schedulers.slurm.records import NOT_ASKED
from launcher.schedulers.slurm.site import NOT_ENFORCED, OF_ACCOUNTING, questions

KEPT_SECONDS = 3600.0
_STAMP = ("ClusterName", "AccountingStorageHost", "AccountingStorageEnforce")


class Kept(NamedTuple):
    """Accounting's answers, at most an hour old."""

    answers: dict[str, Answer]
    stamp: list[str]
    "The cluster that the answers are about; see `stamp`."


def kept(login: Login) -> Kept | None:
    """Read the answers cached by the last submission. None if there are none or they are too old."""
    record = read_record(_file(login))
    with suppress(KeyError, TypeError, ValueError):
        if 0 <= time.time() - record["time"] < KEPT_SECONDS:
            return Kept({name: Answer(*record["answers"][name]) for name in OF_ACCOUNTING}, record["stamp"])
    return None


def keep(login: Login, answers: Mapping[str, Answer]) -> None:
    """Cache accounting's answers if all of them arrived."""
    own = {name: answers.get(name, NOT_ASKED) for name in OF_ACCOUNTING}
    if answers["config"].code or any(answer.code not in (0, NOT_ENFORCED) for answer in own.values()):
        return
    file = _file(login)
    value = {"time": time.time(), "stamp": stamp(answers)}
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_json(file, {**value, "answers": {name: astuple(answer) for name, answer in own.items()}})


def stamp(answers: Mapping[str, Answer]) -> list[str]:
    """Which cluster the answers are about, and what it enforces.

    Several clusters may share a home directory.
    """
    config = answers["config"].out
    found = (re.search(rf"^{name}\s*=\s*(.*)$", config, re.MULTILINE) for name in _STAMP)
    return [match[1].strip() if match else "" for match in found]


def _file(login: Login) -> Path:
    host = socket.gethostname() if isinstance(login, Here) else ""
    first = login.first if isinstance(login, Here) else ""
    where = "\0".join((login.name, host, first, os.environ.get("SLURM_CONF", ""), str(os.getuid())))
    name = hashlib.sha256(where.encode()).hexdigest()[:16]
    return Path(platformdirs.user_cache_dir("launcher")) / "slurm" / f"{name}.json"


_begun: list[_Asking] = []
_FIELD = re.compile(r"""(?:^|[{,]\s*)["']?(scheduler|login)["']?\s*:\s*["']?([\w.@-]*)""", re.MULTILINE)


class _Asking(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.answers: dict[str, Answer] = {}
        known = kept(Here())
        skipped = known.answers if known is not None else {}
        self.questions = {name: asked for name, asked in questions().items() if name not in skipped}

    def run(self) -> None:
        with suppress(LoginError, OSError):
            self.answers = ask(Here(), self.questions)


def begin(profile: Path) -> None:
    """Query this host's Slurm in the background if the profile appears to use it.

    The profile is only searched with a regular expression. A wrong guess costs a few processes; errors in the
    profile are reported elsewhere.
    """
    with suppress(OSError, UnicodeDecodeError):
        text = profile.read_text(encoding="utf-8")
        fields = dict(_FIELD.findall(text))
        if fields.get("scheduler") == "slurm" and "login" not in fields and shutil.which("sbatch"):
            _begun.append(_Asking())
            _begun[-1].start()


def begun(login: Login) -> dict[str, Answer]:
    """Wait for the answers that `begin` asked for, once. {} if it asked for none."""
    if not isinstance(login, Here) or login.first or not _begun:
        return {}
    asking = _begun.pop()
    asking.join()
    return asking.answers
