"""Locate the folders that ship with the package: templates, clusters, containers."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def _shipped(name: str) -> Path:
    """`launcher/_shipped/<name>` in an installed wheel, otherwise `<name>` at the top of the checkout."""
    for folder in (_PACKAGE / "_shipped" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"the folder {name}/ that ships with launcher is missing from {_PACKAGE}; install launcher again"
    )


def templates_dir() -> Path:
    return _shipped("templates")


def template_names() -> list[str]:
    """Sorted names such as `slurm/job.sbatch.j2`."""
    folder = templates_dir()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.j2"))


LIBRARY = "slurm/slurm-lib.sh.j2"
IN_LIBRARY = frozenset(
    f"slurm/_{name}.sh.j2"
    for name in ("again", "container", "early", "lost", "nodes", "records", "rendezvous", "signals")
)
"Templates of earlier versions, whose functions are in `LIBRARY` now."


def clusters_dir() -> Path:
    return _shipped("clusters")


def containers_dir() -> Path:
    return _shipped("containers")


def project_templates(project_dir: Path) -> Path | None:
    """`templates/` of a project. None if it has none, or if it is the checkout that ships them."""
    folder = project_dir / "templates"
    return folder if folder.is_dir() and not folder.samefile(templates_dir()) else None
