"""Decide which faults to inject, by their probabilities. Equal seeds give equal faults."""

from __future__ import annotations

import random
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

KINDS = {
    "no-capacity": "a pod or cluster is refused: 400, as RunPod answers when nothing is free",
    "forbidden": "a pod or cluster is refused: 403, no access to the pool",
    "no-balance": "a pod or cluster is refused: 402",
    "rate-limit": "429 with Retry-After: VALUE seconds (1)",
    "server-error": "VALUE (500) instead of the answer; the request is not carried out",
    "lost-response": "the request is carried out, but the connection breaks before the answer",
    "gateway-timeout": "the request is carried out, but the answer is 504",
    "slow-answer": "the answer comes VALUE seconds later (2)",
    "slow-pull": "the image takes VALUE seconds more (10)",
    "pull-error": "the image cannot be pulled: the pod goes to ERROR",
    "interrupt": "a spot pod is interrupted VALUE seconds after its start (2)",
    "price": "the pod costs VALUE times the catalogue's price (3)",
    "unlisted": "a new pod or cluster is missing from the list for VALUE seconds (3)",
    "s3-error": "the S3 endpoint answers with VALUE (503)",
    "huge-body": "the answer has VALUE MiB (256)",
    "wrong-types": "the answer's fields have wrong types",
    "not-json": "the answer is an HTML page",
    "redirect": "a redirect to another host",
}
DEFAULTS = {
    "rate-limit": 1.0, "server-error": 500.0, "slow-answer": 2.0, "slow-pull": 10.0, "interrupt": 2.0,
    "price": 3.0,
    "s3-error": 503.0, "unlisted": 3.0, "huge-body": 256.0,
}  # fmt: skip
_TEXT = re.compile(r"(?P<p>[0-9.]+)(:(?P<value>[0-9.]+))?(x(?P<times>[0-9]+))?")


class Fault(BaseModel):
    """`p`: probability per occasion. `times`: maximum count. `on`: regular expression for `METHOD /path`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    p: float = Field(ge=0, le=1)
    value: float | None = Field(None, ge=0)
    times: int | None = Field(None, ge=0)
    on: str | None = None


def parse(text: str) -> tuple[str, Fault]:
    """Parse `no-capacity=0.3`, `slow-pull=0.5:20` or `lost-response=1x2` (the first two times)."""
    name, _, rest = text.partition("=")
    match = _TEXT.fullmatch(rest)
    if name not in KINDS or match is None:
        raise ValueError(
            f"fault {text!r}: write NAME=PROBABILITY[:VALUE][xTIMES], e.g. slow-pull=0.5:20; "
            f"NAME is one of {', '.join(KINDS)}"
        )
    return name, read({name: {key: value for key, value in match.groupdict().items() if value}})[name]


def read(record: object) -> dict[str, Fault]:
    """Read a mapping of names to a probability or to the fields of `Fault`."""
    if not isinstance(record, dict):
        raise ValueError("faults: write a mapping, e.g. {no-capacity: 0.3}")
    if unknown := sorted(set(record) - set(KINDS)):
        raise ValueError(f"fault {unknown[0]!r} is not known; known are {', '.join(KINDS)}")
    full_record = {
        name: {"p": value} if isinstance(value, int | float) else value for name, value in record.items()
    }
    try:
        return TypeAdapter(dict[str, Fault]).validate_python(full_record)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"fault {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class Dice:
    """Decides which faults happen. Each kind has its own random sequence, independent of other requests."""

    def __init__(self, seed: int, faults: dict[str, Fault]) -> None:
        self.seed = seed
        self.set(faults)

    def set(self, faults: dict[str, Fault]) -> None:
        self.faults = faults
        self.counts: dict[str, int] = {}
        self._random = {name: random.Random(f"{self.seed} {name}") for name in faults}

    def happens(self, name: str, on: str = "") -> float | None:
        """Return the fault's value if it happens now, else None."""
        fault = self.faults.get(name)
        if fault is None or (fault.on is not None and not re.search(fault.on, on)):
            return None
        if fault.times is not None and self.counts.get(name, 0) >= fault.times:
            return None
        if self._random[name].random() >= fault.p:
            return None
        self.counts[name] = self.counts.get(name, 0) + 1
        return DEFAULTS.get(name, 0.0) if fault.value is None else fault.value

    def record(self) -> dict[str, Any]:
        return {name: fault.model_dump(exclude_none=True) for name, fault in self.faults.items()}
