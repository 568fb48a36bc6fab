"""Render the files from which an image of the catalogue is built. Only templates and the lock are read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.images.catalogue import Image
from launcher.render import quote
from launcher.render.environment import render_template
from launcher.render.render import RenderedFile

SHM_MIB = 1024
"Size below which launcher-start warns. It is enough for a few workers with batches of images or video."
# The build context contains only the files that the build uses, whatever else is in the folder.
IGNORE = "*\n!requirements.txt\n!start.sh\n!pod.sh\n!wheels\nwheels/*\n!wheels/*.whl\n"


@dataclass(frozen=True)
class BuildOptions:
    """Build options that do not come from the catalogue."""

    base: str
    "Reference of the base image."
    offline: bool = False
    "Install packages from `wheels/` only."


def build_files(
    image: Image, lock: Path, options: BuildOptions, project_dir: Path | None = None
) -> tuple[RenderedFile, ...]:
    """Return every file of the context except `wheels/`. Raises RenderError, OSError."""
    requirements = lock.read_text(encoding="utf-8")
    name, _, digest = options.base.partition("@")
    base_name = image.base.image if options.base == image.base.reference else name
    values: dict[str, Any] = {
        "version": __version__,
        "name": image.name,
        "title": f"launcher {image.name}",
        "description": image.description,
        "base": quote.image(options.base),
        "base_name": base_name,
        "base_digest": digest or None,
        "python": image.python,
        "torch": image.torch,
        "cuda": image.cuda,
        "debian_packages": image.debian_packages,
        "debian_snapshot": image.debian_snapshot,
        "offline": options.offline,
        "lock_sha256": hashlib.sha256(requirements.encode()).hexdigest(),
        "shm_mib": SHM_MIB,
    }

    def rendered(name: str, template: str, mode: int) -> RenderedFile:
        return RenderedFile(name, render_template(template, values, project_dir), mode)

    files = [
        rendered(*_recipe(image), 0o644),
        rendered("start.sh", "docker/start.sh.j2", 0o755),
        RenderedFile("requirements.txt", requirements, 0o644),
    ]
    if image.target == "runpod":
        files.append(rendered("pod.sh", "docker/pod.sh.j2", 0o755))
    if image.target != "apptainer":
        files.append(RenderedFile(".dockerignore", IGNORE, 0o644))
    return tuple(files)


def _recipe(image: Image) -> tuple[str, str]:
    """Return the name and the template of the build recipe."""
    if image.target == "apptainer":
        return "image.def", "apptainer/cuda.def.j2"
    kind = "runpod" if image.target == "runpod" else "cpu" if image.cuda is None else "cuda"
    return "Dockerfile", f"docker/{kind}.Dockerfile.j2"
