"""Seeds derived from names and numbers."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits. Different parts give unrelated random streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
