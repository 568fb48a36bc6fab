"""Limits of what is rented are read as other options are."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli.main import _main, app


@pytest.mark.parametrize("option", ["--max-price", "--budget", "--max-hours"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "abc"])
def test_a_limit_that_is_no_number_above_0_is_wrong_usage(option: str, value: str) -> None:
    for verb in ("submit", "run"):
        done = CliRunner().invoke(app, (verb, "job.yaml", option, value))
        assert done.exit_code == 2 and option in done.output


def test_a_negative_number_of_runs_is_wrong_usage() -> None:
    done = CliRunner().invoke(app, ("list", "--limit", "-1"))
    assert done.exit_code == 2 and "--limit" in done.output


LONG = "9" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("--set", f"steps={LONG}"),
        ("--set", f"steps={'9 ' * 2500}"),
        ("--set", f"limits.time={LONG}"),
        ("--set", f"recipe.precision=x{LONG}"),
        ("--set", f"x{LONG}=1"),
        ("--set", f"x{LONG}"),
        ("--cluster", f"x{LONG}"),
    ],
)
def test_a_message_quotes_a_part_of_a_long_value(
    arguments: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: a\ncommand: ['true']\nsteps: 5\nbatch: {global: 8}\nresources: {gpus_per_node: 0}\n"
    )
    monkeypatch.setattr("sys.argv", ["launcher", "submit", str(file), "--dry-run", *arguments])
    with pytest.raises(SystemExit) as ended:
        _main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and 20 < len(told) < 1500 and "characters" in told
