"""List, eject and compare the user's own copies of templates."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.render import shipped
from launcher.render.quote import RenderError
from launcher.render.render import RenderedFile
from launcher.spec.similar import did_you_mean


@dataclass(frozen=True)
class TemplateInfo:
    """A template. `name` is e.g. `slurm/job.sbatch.j2`; `description` is its first comment."""

    name: str
    description: str
    ejected: bool


def list_templates(project_dir: Path) -> tuple[TemplateInfo, ...]:
    folder, own = shipped.templates_dir(), shipped.project_templates(project_dir)
    return tuple(
        TemplateInfo(name, _description(folder / name), own is not None and (own / name).is_file())
        for name in shipped.template_names()
    )


def _description(path: Path) -> str:
    match = re.search(r"\{#-?\s*(.*?)\s*-?#\}", path.read_text(encoding="utf-8"), re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def eject(name: str, project_dir: Path) -> Path:
    """Copy a shipped template to `templates/` of the project, where it takes precedence.

    Raises RenderError if the name is unknown or the file exists already.
    """
    source, target = _shipped(name), project_dir / "templates" / name
    if target.exists() and target.samefile(source):
        raise RenderError(f"{target} is the shipped template itself; eject in the folder of your own project")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RenderError(f"{target} exists already; --diff shows how it differs") from None
    return target


def diff_template(name: str, project_dir: Path) -> str:
    """Unified diff from the shipped template to the ejected one; empty if equal or not ejected."""
    source, target = _shipped(name), project_dir / "templates" / name
    if not target.is_file():
        return ""
    old, new = source.read_text(encoding="utf-8"), target.read_text(encoding="utf-8")
    return _diff(old, new, f"shipped/{name}", f"templates/{name}")


def diff_rendered(files: Iterable[RenderedFile], directory: Path) -> str:
    """Unified diff from the files in `directory` to the rendered ones. A missing file counts as empty."""
    parts = []
    for file in files:
        path = directory / file.path
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        parts.append(_diff(old, file.text, str(path), f"rendered/{file.path}"))
    return "".join(parts)


def _diff(old: str, new: str, old_name: str, new_name: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="")
    return "".join(line + "\n" for line in lines)


def _shipped(name: str) -> Path:
    names = shipped.template_names()
    if name in names:
        return shipped.templates_dir() / name
    hint = did_you_mean(name, names) or "see `launcher templates list`"
    raise RenderError(f"there is no template {name!r}; {hint}")
