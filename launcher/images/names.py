"""The syntax for images of the catalogue in jobs and profiles.

Every verb imports this, so it imports nothing.
"""

from __future__ import annotations

PREFIX = "catalog:"
