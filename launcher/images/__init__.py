"""Container images: the catalogue, the files that build one, building, verifying, publishing.

`inside` and `sbom` run in an image, with its Python and the standard library alone.
"""

from __future__ import annotations


class ImageError(Exception):
    """Something about an image that is refused or failed; the message is for the user."""
