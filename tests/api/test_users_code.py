"""Errors of a task's code, as `launcher plan` tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.api.model_sources import UserCodeError, running_user_code


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("bad heads", "ValueError: bad heads ("),
        ("invalid config:\n    4097 is odd\n    more", "ValueError: invalid config: 4097 is odd ("),
        ("sizes differ\nmore", "ValueError: sizes differ ("),
    ],
)
def test_an_error_is_told_with_its_reason_and_place(tmp_path: Path, message: str, told: str) -> None:
    with pytest.raises(UserCodeError) as caught, running_user_code("task m:T", tmp_path):
        raise ValueError(message)
    assert str(caught.value).startswith(f"task m:T: {told}")


class OwnExit(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(0), "SystemExit: 0 ("),
        (SystemExit(), "SystemExit ("),
        (OwnExit("early"), "OwnExit: early ("),
        (AssertionError(), "AssertionError ("),
    ],
)
def test_code_that_leaves_is_no_success(error: BaseException, told: str, tmp_path: Path) -> None:
    """`launcher plan` ended with exit code 0, without a plan."""
    with pytest.raises(UserCodeError) as caught, running_user_code("task m:T", tmp_path):
        raise error
    assert str(caught.value).startswith(f"task m:T: {told}")


def test_ctrl_c_still_ends_a_plan(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_user_code("task m:T", tmp_path):
        raise KeyboardInterrupt
