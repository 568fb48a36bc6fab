"""How a job or profile names an image of the catalogue. Imports nothing: every verb starts with this."""

from __future__ import annotations

PREFIX = "catalog:"
