"""benchmarks/results/doctor.md shows the faults that the tests make, and what is found."""

from __future__ import annotations

from tests.doctor.fault_table import BEGIN, PAGE, table


def test_the_table_of_faults_is_that_of_the_tests() -> None:
    assert BEGIN + table() + "\n\n" in PAGE.read_text(), "python -m tests.doctor.fault_table"
