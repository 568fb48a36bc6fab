from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.schedulers.sshd import Sshd


@pytest.fixture
def sshd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """A login node, in a folder whose name is short enough for a socket."""
    node = Sshd(Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp")))
    node.use(monkeypatch)
    yield node
    node.close()
