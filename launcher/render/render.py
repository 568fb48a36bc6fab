"""Render a target to files. Nothing is written, and only templates are read.

This module has what all runs have in common. Each scheduler renders its own files in its package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.render import quote, shipped
from launcher.render.environment import render_template
from launcher.render.quote import RenderError
from launcher.render.values import Target, start_values
from launcher.spec.cluster import Cluster
from launcher.spec.quantities import format_bytes


@dataclass(frozen=True)
class Packed:
    """Content that is packed into a rendered file."""

    what: str
    base64: str

    def __str__(self) -> str:
        return f"{self.what}, {format_bytes(len(self.base64) * 3 // 4)} in base64"


@dataclass(frozen=True)
class RenderedFile:
    """A rendered file. `path` is relative to the run's `scripts/`."""

    path: str
    text: str
    mode: int
    inside: tuple[Packed, ...] = ()
    "Content packed into the text in base64."

    @property
    def shown(self) -> str:
        """The text for a person: packed content is replaced by its name and size."""
        text = self.text
        for packed in self.inside:
            text = text.replace(packed.base64, f"<left out here: {packed}>")
        return text


def start_script(target: Target) -> RenderedFile:
    """Render `start.sh`, which every run has. Raises RenderError."""
    name = "start"
    if target.under_torchrun:
        name = "per-node" if target.nodes > 1 else "numa-binding"
    return rendered(target, "start.sh", f"torchrun/{name}.sh.j2", start_values(target))


def rendered(
    target: Target, path: str, template: str, values: Mapping[str, Any], mode: int = 0o755
) -> RenderedFile:
    """Render one file from a template. Raises RenderError."""
    return RenderedFile(path, render_template(template, values, target.project_dir), mode)


def render_image(cluster: Cluster, project_dir: Path | None = None) -> tuple[RenderedFile, ...]:
    """Render Dockerfile and image.def on top of `container.base`. Raises RenderError if that is missing."""
    base = cluster.container.base
    if base is None:
        raise RenderError(f"cluster {cluster.name}: `container.base`, the image to build on, is missing")
    shm = cluster.container.shm
    values = {
        "version": __version__,
        "cluster_name": cluster.name,
        "base": quote.image(base),
        "shm_gib": None if shm is None else -(-shm // 2**30),
    }
    return tuple(
        RenderedFile(name, render_template(f"{kind}/{name}.j2", values, project_dir), 0o644)
        for kind, name in (("docker", "Dockerfile"), ("apptainer", "image.def"))
    )


def notes(target: Target) -> tuple[str, ...]:
    """Note the project's templates that take precedence over the shipped ones."""
    own = shipped.project_templates(target.project_dir) if target.project_dir is not None else None
    if own is None:
        return ()
    names = [name for name in shipped.template_names() if (own / name).is_file()]
    return tuple(f"{own / name} replaces the shipped template" for name in names)
