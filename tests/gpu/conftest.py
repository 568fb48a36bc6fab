"""Every test of this folder needs a CUDA device."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
