from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # both need what is optional
    from tests.sandbox.server import Sandbox
    from tests.schedulers.runpod.runs import Lab


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    from tests.sandbox.server import start

    with start(tmp_path_factory.mktemp("runpod") / "sandbox") as running:
        yield running


@pytest.fixture
def lab(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    from launcher.schedulers import registry
    from tests.schedulers.runpod.runs import Lab

    yield Lab(sandbox, tmp_path, monkeypatch)
    registry.opened.clear()  # it knows this sandbox
    sandbox.faults()
    for pod in sandbox.state()["live"]:
        sandbox.ask("DELETE", f"/pods/{pod['id']}")
