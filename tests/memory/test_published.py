"""Estimates beside the peaks that torchtitan has published, of runs whose recipe is published whole."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_published_peaks_are_met_within_the_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])
    from memory_published import errors

    found = errors()
    assert len(found) == 7
    for name, error, band in found:
        assert -band <= error <= 0.08, (name, error)
    assert statistics.median(abs(error) for _, error, _ in found) <= 0.04
