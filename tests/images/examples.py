"""The images of the shipped catalogue, rendered as for the golden files."""

from __future__ import annotations

from pathlib import Path

from launcher.images.catalogue import Image, load_catalogue
from launcher.images.context import BuildOptions, build_files
from launcher.render.render import RenderedFile
from launcher.render.shipped import containers_dir

GOLDEN = Path(__file__).parent / "golden"
DIGEST = "sha256:" + "0123456789abcdef" * 4
"Of no image."


def images() -> tuple[Image, ...]:
    return load_catalogue(containers_dir())


def rendered(image: Image) -> dict[str, RenderedFile]:
    """By path below `golden/`. The lock file is not repeated there."""
    files = build_files(image, containers_dir() / image.lock, BuildOptions(image.base.reference))
    return {f"{image.name}/{file.path}": file for file in files if file.path != "requirements.txt"}
