from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.spec.job import Training
from launcher.spec.quantities import (
    GIB,
    format_duration,
    parse_bytes,
    parse_seconds,
    parse_threshold,
    threshold_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("47.4GiB", int(47.4 * GIB)),
        ("48GB", 48 * 10**9),
        ("512 mib", 512 * 2**20),
        ("7", 7),
        (7, 7),
        ("1TiB", 2**40),
    ],
)
def test_sizes_tell_gib_from_gb(text, size):
    assert parse_bytes(text) == size


def test_a_threshold_is_a_size_or_a_share_and_survives_a_round_trip():
    for text, size in {"45GiB": 45 * GIB, "90%": 72 * GIB, "62.5 %": 50 * GIB, 7: 7}.items():
        training = Training.model_validate(Training(memory_alert=text).model_dump(mode="json"))
        assert threshold_bytes(training.memory_alert, 80 * GIB) == size
    for wrong in ("lots", "0%", "101%"):
        with pytest.raises(ValueError, match=r"45GiB or 90%|at most 100%"):
            parse_threshold(wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("1d12h", 129600), ("24:00:00", 86400), ("2-12:00:00", 216000), ("30", 30), (30, 30)],
)
def test_durations_read_as_people_and_slurm_write_them(text, seconds):
    assert parse_seconds(text) == seconds


@given(st.integers(1, 10**7))
def test_a_printed_duration_reads_back_to_within_its_smallest_shown_unit(seconds):
    again = parse_seconds(format_duration(seconds).replace(" ", ""))
    assert again <= seconds + 1 and seconds - again < 3600
