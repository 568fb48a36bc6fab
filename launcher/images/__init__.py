"""Container images: the catalogue, rendering, building, verifying and publishing.

`inside` and `sbom` run in an image, with its Python and the standard library only.
"""

from __future__ import annotations


class ImageError(Exception):
    """An operation on an image was refused or failed; the message is for the user."""
