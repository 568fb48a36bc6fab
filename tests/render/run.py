"""The scripts and notes of a target, as the scheduler of its cluster makes them."""

from __future__ import annotations

from launcher.render.render import RenderedFile
from launcher.render.values import Target
from launcher.schedulers.registry import scheduler_class


def render_run(target: Target) -> tuple[RenderedFile, ...]:
    return scheduler_class(target.cluster.scheduler).scripts(target)


def notes(target: Target) -> tuple[str, ...]:
    return scheduler_class(target.cluster.scheduler).notes(target)
