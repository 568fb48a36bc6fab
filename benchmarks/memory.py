"""How far the predicted peak of a training step is from the true one, and what other tools say.

The truth: the real step on real ranks over gloo, every storage counted from birth to death; for some cases
PyTorch's own allocator events beside it. Every case of tests/memory/cases.py, every tool in the same run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "memory")]

from memory_peers import DEEPSPEED, PEERS, CannotError  # noqa: E402
from memory_tables import between, markdown  # noqa: E402

from tests.memory.cases import CASES, Case, peak, truths, write_configs  # noqa: E402
from tests.memory.predicted import MOMENTS, peaks, predicted  # noqa: E402

MIB = 2**20
GOALS = {"median": 0.02, "worst": 0.08}
PROFILED = 8
"Cases on one rank in which PyTorch's profiler counts the same bytes."
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/memory-cpu.* and docs/accuracy.md"
    )
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    rows = compared(cases)
    print(table(rows))
    summary = summaries(rows)
    print(markdown(summary))
    missed = [goal for goal, met in verdicts(summary).items() if not met]
    print(*(f"{goal}: MISSED" for goal in missed), sep="\n") if missed else print("all goals met")
    report = {
        "command": f"python benchmarks/memory.py {' '.join(sys.argv[1:])}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": _versions(),
        "goals": GOALS,
        "summary": summary,
        "cases": rows,
    }
    print(report["machine"], report["versions"])
    if options.save:
        (RESULTS / "memory-cpu.json").write_text(json.dumps(report, indent=1) + "\n")
        text = f"{_header(report)}\n\n{markdown(summary)}\n\n{checks(rows)}\n\n{table(rows)}\n"
        (RESULTS / "memory-cpu.md").write_text(f"# Predicted and true peaks\n\n{text}")
        between(
            ROOT / "docs" / "accuracy.md", "benchmarks/memory.py", f"{_header(report)}\n\n{markdown(summary)}"
        )
        print("wrote benchmarks/results/memory-cpu.json, .md and docs/accuracy.md")
    return 1 if missed else 0


def compared(cases: list[Case]) -> list[Row]:
    # The profiler does not tell host memory from that of the device which the CPU stands in for.
    alone = [case for case in cases if case.recipe.sharding == case.recipe.offload == "none"]
    measured = truths(cases, profile=alone[:: max(1, len(alone) // PROFILED)])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        configs = write_configs(Path(folder))
        for case, truth in zip(cases, measured, strict=True):
            rows.append(_row(case, truth, configs))
            print(_line(rows[-1]), flush=True)
    return rows


def _row(case: Case, truth: dict[str, Any], configs: Path) -> Row:
    job, true = case.job(configs), peak(truth["peaks"])
    row: Row = {"case": case.name, "truth": true, "by_moment": truth["peaks"], "tools": {}}
    if "profiled" in truth:
        row["profiled"] = truth["profiled"]
    try:
        ours = peaks(predicted(job, case.recipe, case.ranks, "cpu", per_node=case.per_node))
        row["predicted_by_moment"] = ours
        row["tools"]["launcher"] = _answer(peak(ours), true)
    except Exception as error:  # whatever the task's code raises on tensors without values
        row["tools"]["launcher"] = {"cannot": f"{type(error).__name__}: {error}"}
    for name, peer in PEERS.items():
        try:
            row["tools"][name] = _answer(peer(job, case.recipe, case.ranks), true)
        except CannotError as reason:
            row["tools"][name] = {"cannot": str(reason)}
    return row


def _answer(size: int, true: int) -> dict[str, Any]:
    return {"bytes": size, "error": round(size / true - 1, 4)}


def _line(row: Row) -> str:
    said = (f"{name} {_cell(answer)}" for name, answer in row["tools"].items())
    return f"{row['truth'] / MIB:8.2f} MiB  {row['case']}: {', '.join(said)}"


def _cell(answer: dict[str, Any]) -> str:
    return "cannot" if "cannot" in answer else f"{answer['bytes'] / MIB:.1f} ({answer['error']:+.1%})"


def table(rows: list[Row]) -> str:
    return markdown(
        [
            {"case": row["case"], "truth MiB": f"{row['truth'] / MIB:.2f}"}
            | {name: _cell(answer) for name, answer in row["tools"].items()}
            for row in rows
        ]
    )


def summaries(rows: list[Row]) -> list[Row]:
    """Absolute errors of each tool over the cases it answers; ours for each moment apart as well."""
    found = [_summary(name, (row["tools"][name] for row in rows)) for name in ("launcher", *PEERS)]
    for moment in MOMENTS:
        ours = (
            _answer(max(row["predicted_by_moment"][moment].values()), max(row["by_moment"][moment].values()))
            for row in rows
            if "predicted_by_moment" in row
        )
        found.append(_summary(f"launcher, {moment}", ours))
    return found


def _summary(name: str, answers: Iterable[dict[str, Any]]) -> Row:
    listed = list(answers)
    errors = [abs(answer["error"]) for answer in listed if "error" in answer]
    return {
        "tool": name,
        "cases": len(errors),
        "cannot": len(listed) - len(errors),
        "median error": f"{statistics.median(errors):.2%}" if errors else "-",
        "worst error": f"{max(errors):.2%}" if errors else "-",
    }


def verdicts(summary: list[Row]) -> dict[str, bool]:
    """Of the first row, which is ours. A case without a prediction misses both."""
    ours = summary[0]
    return {
        f"{name} error at most {goal:.0%}": ours["cannot"] == 0
        and ours["cases"] > 0
        and float(ours[f"{name} error"].rstrip("%")) / 100 <= goal
        for name, goal in GOALS.items()
    }


def checks(rows: list[Row]) -> str:
    """The count of storages beside PyTorch's own allocator events."""
    return markdown(
        [
            {
                "case": row["case"],
                "moment": moment,
                "storages MiB": f"{max(row['by_moment'][moment].values()) / MIB:.2f}",
                "profiler MiB": f"{size / MIB:.2f}",
                "difference": f"{size / max(row['by_moment'][moment].values()) - 1:+.2%}",
            }
            for row in rows
            for moment, size in row.get("profiled", {}).items()
        ]
    )


def _header(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"`{report['command'].strip()}`, {len(report['cases'])} cases, {report['machine']}; {versions}."


def _versions() -> dict[str, str]:
    names = ("gpu-launcher", "torch", "transformers", "accelerate", "bitsandbytes")
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"deepspeed": DEEPSPEED, "python": platform.python_version()}


if __name__ == "__main__":
    raise SystemExit(main())
