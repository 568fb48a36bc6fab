"""Read the log that W&B writes on this machine, offline or online: `wandb/*run-*/run-ID.wandb`.

After a header of 7 bytes, the file has LevelDB's log format: blocks of 32 KiB with fragments of records, each
with a checksum (4 bytes), length (2) and kind (1). A record is a `Record` message.
Source: https://github.com/google/leveldb/blob/main/doc/log_format.md; wandb/proto/wandb_internal.proto, 0.31.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.callbacks.names import numbers_of
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
STEPS = {"trainer/global_step": 0, "train/global_step": 1, "global_step": None}
"Metric with the optimizer step, as Lightning, transformers and others log it -> its first value, if known."


class WandbReader:
    """Reads the history of one W&B run, which is written in blocks of 32 KiB and at the end."""

    def __init__(self, path: Path, since: float) -> None:
        self._path, self._at = path, _HEADER_BYTES
        self._counter: str | None = None
        "The metric that counts the steps, if the script logs one."
        self._calls = _Calls()
        self._last: int | None = None

    def read(self) -> list[Reading]:
        histories = []
        for record in self._records():
            with contextlib.suppress(ValueError, RecursionError):  # skip only the damaged record
                histories += [] if (values := _history(record)) is None else [values]
        named = (name for name in STEPS if any(name in values for values in histories))
        self._counter = self._counter or next(named, None)
        self._calls.has_loss |= any("loss" in numbers_of(values) for values in histories)
        return [reading for values in histories if (reading := self._reading(values)) is not None]

    def _reading(self, values: dict[str, Any]) -> Reading | None:
        """Return a history entry as a Reading, or None before the first step."""
        metrics = {name: value for name, value in values.items() if name[:1] != "_" and name not in STEPS}
        if self._counter is None:
            step = self._calls.step(number(values.get("_step")), metrics)
        else:
            step = number(values.get(self._counter))
        if step is not None:
            self._last = int(step)
        if self._last is None:
            return None
        time = number(values.get("_timestamp"))
        return Reading(self._last, metrics, time, first=STEPS.get(self._counter or ""))

    def _records(self) -> Iterator[bytes]:
        """Yield the complete records after `_at`."""
        with open_regular(self._path) as file:
            head = file.read(_HEADER_BYTES)
            if len(head) < _HEADER_BYTES:
                return
            if not head.startswith(HEADER):
                raise ValueError(f"{self._path} is not a log of W&B")
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
                if kind > _LAST:  # damaged: the start of the next fragment is unknown
                    return
                record = fragment if kind in (_WHOLE, _FIRST) else record + fragment
                at += _FRAGMENT_BYTES + length
                if kind in (_WHOLE, _LAST):
                    self._at = at
                    yield record


class _Calls:
    """Converts W&B's own counter to steps.

    The counter counts calls of `log` unless the script passes `step=`, and a script may log an evaluation in
    a separate call. As long as the counter rises by one, an entry is a step only if it has a training loss,
    or any training metric if no entry has a loss. Other entries belong to the last step.
    """

    def __init__(self) -> None:
        self._before: float | None = None
        self._one_by_one, self._other = True, 0
        self.has_loss = False

    def step(self, counted: float | None, metrics: Mapping[str, Any]) -> float | None:
        """Return the step of a history entry, or None if it belongs to the previous one."""
        if counted is None:
            return None
        self._one_by_one = self._one_by_one and self._before in (None, counted - 1)
        self._before = counted
        if not self._one_by_one:
            return counted
        names = numbers_of(metrics)
        if "loss" in names if self.has_loss else any(not name.startswith("eval_") for name in names):
            return counted - self._other
        self._other += 1
        return None


def _history(record: bytes) -> dict[str, Any] | None:
    """Return the items of a record, or None if it is not a history entry."""
    for history in parts(record, _HISTORY):
        return dict(_item(item) for item in parts(history, _ITEM))
    return None


def _item(item: bytes) -> tuple[str, Any]:
    names, text = [], b"null"
    for field, value in fields(item):
        if field in (_KEY, _NESTED_KEY) and isinstance(value, bytes) and value:
            names.append(value.decode(errors="replace"))
        elif field == _JSON and isinstance(value, bytes):
            text = value
    return ".".join(names), json.loads(text)
