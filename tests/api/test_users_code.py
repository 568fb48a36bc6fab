"""Errors of a task's code, as `launcher plan` tells them."""

from __future__ import annotations

import multiprocessing
import os
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


def test_code_that_ends_the_process_is_no_success_either(tmp_path: Path) -> None:
    """`launcher submit` ended with exit code 0, and no run had begun."""
    with (
        pytest.raises(UserCodeError, match="task m:T: SystemExit: 0"),
        running_user_code("task m:T", tmp_path),
    ):
        os._exit(0)
    leave = os._exit
    with running_user_code("task m:T", tmp_path):
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
        child.start()
        child.join()
    assert child.exitcode == 7 and os._exit is leave


def test_ctrl_c_still_ends_a_plan(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_user_code("task m:T", tmp_path):
        raise KeyboardInterrupt
