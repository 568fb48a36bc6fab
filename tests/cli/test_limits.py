"""Limits of what is rented are read as other options are."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from launcher.cli.main import app


@pytest.mark.parametrize("option", ["--max-price", "--budget", "--max-hours"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "abc"])
def test_a_limit_that_is_no_number_above_0_is_wrong_usage(option: str, value: str) -> None:
    for verb in ("submit", "run"):
        done = CliRunner().invoke(app, (verb, "job.yaml", option, value))
        assert done.exit_code == 2 and option in done.output
