"""A case of a day on a GPU: what a process of its own measures, and what is predicted. Frozen values."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from launcher.spec.value import Value

FILE = Path(__file__).with_name("gpu_day.jsonl")
"All cases of the day: `python benchmarks/gpu_day_cases.py` writes it."

Work = Literal["step", "oom", "fragments", "curve", "tests", "speed", "rates", "nccl", "doctor"]
Fields = dict[str, Any]


class Case(Value):
    stage: int
    name: str
    work: Work
    "The function of gpu_day_work.py."
    asked: Fields = {}
    seconds: float = 60.0
    "Time limit."
    predicted: Fields = {}
    "What the case should measure, by the names of the measured values."


class Stage(Value):
    title: str
    seconds: float = 570.0
    "Time limit of one command."


STAGES = {
    1: Stage(title="Memory: predicted and measured"),
    2: Stage(title="Out of memory for real"),
    3: Stage(title="Recipes: exactness"),
    4: Stage(title="Speed"),
    5: Stage(title="Large models under a cap, 20 steps each"),
    6: Stage(title="Doctor, NVML and NCCL"),
}


def write(cases: Iterable[Case], file: Path) -> None:
    """Replace `file` once all cases are known. Its first line says what predicted them."""
    lines = []
    for case in cases:
        lines.append(case.model_dump_json())
        print(f"{len(lines):3} stage {case.stage}: {case.name}", file=sys.stderr, flush=True)
    file.write_text("\n".join([json.dumps({"torch": version("torch")}), *lines]) + "\n")


def read(file: Path) -> Iterator[Case]:
    for line in file.read_text().splitlines()[1:]:
        yield Case.model_validate_json(line)
