"""What run.json says of the code: git's commit and uncommitted changes, in a process that submits again."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher.schedulers import prepare
from launcher.schedulers.prepare import code_state


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", folder, *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_threads_that_submit_together_get_the_same_answer(repository: Path) -> None:
    threads = 8
    together = threading.Barrier(threads)

    def ask() -> dict[str, Any] | None:
        together.wait()
        return code_state(repository)

    with ThreadPoolExecutor(threads) as pool:
        found = [one.result() for one in [pool.submit(ask) for _ in range(threads)]]
    assert found == [{"commit": git(repository, "rev-parse", "HEAD"), "changed_files": []}] * threads


def test_a_later_submission_sees_what_has_changed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "FRESH_SECONDS", 0.0)
    (repository / "train.py").write_text("two\n")
    before = code_state(repository)
    assert before is not None and before["changed_files"] == ["train.py"]
    git(repository, "commit", "-qam", "two")
    after = {"commit": git(repository, "rev-parse", "HEAD"), "changed_files": []}
    assert code_state(repository) == after and after["commit"] != before["commit"]


def test_it_is_asked_about_the_folder_in_a_hook_of_another_repository_too(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert code_state(repository) == {"commit": commit, "changed_files": []}


def test_without_a_repository_nothing_is_said(tmp_path: Path) -> None:
    assert code_state(tmp_path) is None
