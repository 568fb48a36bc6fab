"""The log that W&B writes on this machine, offline and online: `wandb/*run-*/run-ID.wandb`.

After a header of 7 bytes the file is LevelDB's log: blocks of 32 KiB with fragments of records, each fragment
with checksum (4 bytes), length (2) and kind (1). A record is a `Record` message.
Source: https://github.com/google/leveldb/blob/main/doc/log_format.md; wandb/proto/wandb_internal.proto, 0.31.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.rundir.files import open_regular
from launcher.supervise.framework_logs.protobuf import fields, parts
from launcher.supervise.framework_logs.reading import Reading, number

NAMES = "run-*.wandb"
BLOCK = 2**15
HEADER = b":W&B"
_HEADER_BYTES = _FRAGMENT_BYTES = 7
_NOTHING, _WHOLE, _FIRST, _MIDDLE, _LAST = range(5)
"Kinds of fragments. The rest of a block may be zeros."
_HISTORY = 2
"Field of Record."
_ITEM = 1
"Field of HistoryRecord."
_KEY, _NESTED_KEY, _JSON = 1, 2, 16
"Fields of HistoryItem."
STEPS = {"trainer/global_step": 0, "train/global_step": 1}
"The optimizer step as Lightning and transformers log it -> number of the first one."


class WandbReader:
    """Reads the history of one run of W&B, which is written in blocks of 32 KiB and at the end."""

    def __init__(self, path: Path, since: float) -> None:
        self._path, self._at = path, _HEADER_BYTES

    def read(self) -> list[Reading]:
        found = []
        for record in self._records():
            with contextlib.suppress(ValueError, RecursionError):  # the records around a damaged one count
                found += [] if (reading := _reading(record)) is None else [reading]
        return found

    def _records(self) -> Iterator[bytes]:
        """Yield the complete records after `_at`."""
        with open_regular(self._path) as file:
            head = file.read(_HEADER_BYTES)
            if len(head) < _HEADER_BYTES:
                return
            if not head.startswith(HEADER):
                raise ValueError(f"{self._path} is no log of W&B")
            at, record = self._at, b""
            while True:
                left = BLOCK - at % BLOCK
                if left < _FRAGMENT_BYTES:
                    at += left
                    continue
                file.seek(at)
                head = file.read(_FRAGMENT_BYTES)
                if len(head) < _FRAGMENT_BYTES:
                    return
                length, kind = int.from_bytes(head[4:6], "little"), head[6]
                if kind == _NOTHING:
                    at += left
                    continue
                fragment = file.read(length)
                if len(fragment) < length:
                    return
                if kind > _LAST:  # damaged: where the next one begins is not known
                    return
                record = fragment if kind in (_WHOLE, _FIRST) else record + fragment
                at += _FRAGMENT_BYTES + length
                if kind in (_WHOLE, _LAST):
                    self._at = at
                    yield record


def _reading(record: bytes) -> Reading | None:
    """Return what a record tells of a step; None if it is no history."""
    for history in parts(record, _HISTORY):
        values = dict(_item(item) for item in parts(history, _ITEM))
        known = next((name for name in STEPS if name in values), "_step")
        step, time = number(values.get(known)), number(values.get("_timestamp"))
        if step is None:
            return None
        metrics = {name: value for name, value in values.items() if name[:1] != "_" and name not in STEPS}
        return Reading(int(step), metrics, time, first=STEPS.get(known))
    return None


def _item(item: bytes) -> tuple[str, Any]:
    names, text = [], b"null"
    for field, value in fields(item):
        if field in (_KEY, _NESTED_KEY) and isinstance(value, bytes) and value:
            names.append(value.decode(errors="replace"))
        elif field == _JSON and isinstance(value, bytes):
            text = value
    return ".".join(names), json.loads(text)
