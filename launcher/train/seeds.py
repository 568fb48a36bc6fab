"""Seeds that do not repeat each other."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits; different parts give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
