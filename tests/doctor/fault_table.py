"""`python -m tests.doctor.fault_table`: write the table of faults into benchmarks/results/doctor.md."""

from __future__ import annotations

from pathlib import Path

from launcher.doctor.checks import CHECKS
from tests.doctor.test_node import NODE_FAULTS
from tests.doctor.test_nodes import RANK_FAULTS, WAY_FAULTS

PAGE = Path(__file__).parents[2] / "benchmarks/results/doctor.md"
BEGIN = "| fault, made for real | check | verdict |\n|---|---|---|\n"
END = "\n\n"
"The table ends at the first empty line."


def table() -> str:
    """The rows, from the faults that the tests make and the findings that they expect."""
    faults = [*NODE_FAULTS, *WAY_FAULTS]
    rows = [((fault.__doc__ or "").rstrip("."), check, verdict) for fault, check, verdict, _ in faults]
    return "\n".join(
        f"| {fault} | {CHECKS[check].title} | {verdict} |" for fault, check, verdict in [*rows, *RANK_FAULTS]
    )


def main() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
