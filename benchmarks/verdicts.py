"""How often the cause of a failure is found in real logs, and whether what stands around them changes it.

    python benchmarks/verdicts.py --save

Reads tests/corpus: excerpts of failures from public threads, labelled by people. The part that is held back,
a third by a hash of the source, was not looked at while the table of patterns was written. The peer is what
launcher did before: the exception or the words in the last 20 lines, else the exit code.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.diagnosis.cause import Candidate, cause_of, clues_of_text  # noqa: E402
from tests.corpus import Log, logs  # noqa: E402
from tests.corpus.surrounding_output import COLLECTORS, HEADS, TAILS  # noqa: E402

GOALS = {"tuning": 0.97, "held back": 0.93, "certain": 0.98, "likely": 0.90, "around": 0.99}


def judged(text: str) -> tuple[str, str]:
    """Return class and confidence by a log alone."""
    cause = cause_of(Candidate(clue) for clue in clues_of_text(text.encode().split(b"\n")))
    return (cause.failure, cause.confidence) if cause is not None else ("unknown", "guess")


def last_lines_only(text: str) -> str:
    """Return the class by the last 20 lines: the peer."""
    return judged("\n".join(text.split("\n")[-20:]))[0]


def share(right: Iterable[bool]) -> dict[str, Any]:
    counted = list(right)
    return {"right": sum(counted), "of": len(counted), "share": round(sum(counted) / max(1, len(counted)), 4)}


def measure(corpus: list[Log]) -> dict[str, Any]:
    """Return every figure of the report."""
    verdicts = {log: judged(log.text) for log in corpus}
    parts = {
        name: [log for log in corpus if log.held_back == held]
        for name, held in (("tuning", False), ("held back", True))
    }
    report: dict[str, Any] = {
        name: share(verdicts[log][0] == log.failure for log in part) for name, part in parts.items()
    }
    for confidence in ("certain", "likely", "guess"):
        given = [log for log in corpus if verdicts[log][1] == confidence]
        report[confidence] = share(verdicts[log][0] == log.failure for log in given)
    memory = [log for log in corpus if log.failure == "gpu-oom"]
    report["GPU out of memory missed"] = share(verdicts[log][0] != "gpu-oom" for log in memory)
    misleading = [log for log in corpus if log.mentions_memory]
    report["misleading taken for GPU out of memory"] = share(
        verdicts[log][0] == "gpu-oom" for log in misleading
    )
    classes = sorted({log.failure for log in corpus})
    report["by class"] = {
        name: {
            part: share(verdicts[log][0] == name for log in own if log.failure == name)
            for part, own in parts.items()
        }
        for name in classes
    }
    report["confusion"] = {
        name: dict(Counter(verdicts[log][0] for log in corpus if log.failure == name)) for name in classes
    }
    report["around"] = around(corpus, verdicts)
    report["last 20 lines only"] = {
        "alone": share(last_lines_only(log.text) == log.failure for log in corpus),
        "with wandb's lines after it": share(
            last_lines_only(f"{log.text}\n{TAILS['wandb']}") == log.failure for log in corpus
        ),
    }
    return report


def around(corpus: list[Log], verdicts: dict[Log, tuple[str, str]]) -> dict[str, Any]:
    """Return for how many logs each head, tail and collector leaves the verdict as it was."""
    changed = {}
    for where, texts in (("before", HEADS), ("after", TAILS)):
        for name, text in texts.items():
            joined = (f"{text}\n{log.text}" if where == "before" else f"{log.text}\n{text}" for log in corpus)
            same = [judged(both)[0] == verdicts[log][0] for log, both in zip(corpus, joined, strict=True)]
            changed[f"{name} {where}"] = share(same)
    for name, added in COLLECTORS.items():
        collected = ("\n".join(map(added, log.text.split("\n"))) for log in corpus)
        same = [judged(text)[0] == verdicts[log][0] for log, text in zip(corpus, collected, strict=True)]
        changed[f"collected by {name}"] = share(same)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/verdicts.json")
    options = parser.parse_args()
    corpus = list(logs())
    report = measure(corpus)
    missed = show(report)
    if options.save:
        target = ROOT / "benchmarks" / "results" / "verdicts.json"
        made = {"command": "python benchmarks/verdicts.py --save", "python": platform.python_version()}
        target.write_text(json.dumps({**made, "logs": len(corpus), **report}, indent=1) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 1 if missed else 0


def show(report: dict[str, Any]) -> bool:
    """Print every figure beside its goal. Return whether one is missed."""
    missed = False
    for name in ("tuning", "held back", "certain", "likely", "guess"):
        goal = GOALS.get(name)
        missed |= goal is not None and report[name]["share"] < goal
        print(f"{name:42}{_words(report[name])}{f'  goal {goal:.0%}' if goal else ''}")
    for name in ("GPU out of memory missed", "misleading taken for GPU out of memory"):
        print(f"{name:42}{_words(report[name])}")
    for name, rows in report["by class"].items():
        print(f"  {name:20}" + "   ".join(f"{part} {_words(row)}" for part, row in rows.items()))
    print("verdict unchanged with these lines around the log:")
    for name, row in report["around"].items():
        missed |= row["share"] < GOALS["around"]
        print(f"  {name:40}{_words(row)}")
    for name, row in report["last 20 lines only"].items():
        print(f"the last 20 lines only, {name:18}{_words(row)}")
    print("confusion, label -> verdicts:")
    for name, row in report["confusion"].items():
        print(f"  {name:20}{row}")
    return missed


def _words(row: dict[str, Any]) -> str:
    return f"{row['right']:4} of {row['of']:4} {row['share']:7.1%}"


if __name__ == "__main__":
    sys.exit(main())
