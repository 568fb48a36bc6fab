"""Print, compare and write rendered files, for `launcher render`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.render.eject import diff_rendered
from launcher.render.render import RenderedFile, render_image
from launcher.rundir.files import replace_text
from launcher.schedulers.base import Prepared
from launcher.schedulers.registry import scheduler_class
from launcher.schedulers.rundir import write_run


def show_files(files: Sequence[RenderedFile]) -> None:
    """Print the files without their packed content; several files get a header line each."""
    for file in files:
        header = f"# ==> {file.path} <==\n" if len(files) > 1 else ""
        end = "" if file.text.endswith("\n") else "\n"
        sys.stdout.buffer.write(f"{header}{file.shown}{end}".encode())  # byte for byte, for `> file`


def image_files(ready: Prepared) -> tuple[RenderedFile, ...]:
    """Return the Dockerfile and the Apptainer definition. Raises RenderError without container.base."""
    return render_image(ready.request.cluster, ready.request.project_dir)


def show_diff(ready: Prepared, files: Sequence[RenderedFile], folder: Path | None, image: bool) -> None:
    """Compare with the files in `folder`, or with the output of the shipped templates if it is None."""
    if folder is not None:
        scripts = folder / "scripts"
        print(diff_rendered(files, scripts if scripts.is_dir() else folder), end="")
        return
    import tempfile

    if image:
        shipped = render_image(ready.request.cluster)
    else:
        shipped = scheduler_class(ready.target.cluster.scheduler).scripts(
            replace(ready.target, project_dir=None)
        )
    with tempfile.TemporaryDirectory() as name:
        for file in shipped:
            (Path(name) / file.path).write_text(file.text, encoding="utf-8")
        print(diff_rendered(files, Path(name)), end="")


def write_run_dir(ready: Prepared, out: Path) -> None:
    """Write a complete run directory. Its scripts can be started by hand."""
    if out.exists():
        out.rmdir()
    run = write_run(replace(ready, run_dir=str(out.absolute())), "rendered")
    for file in ready.files:
        print(run.scripts / file.path)


def write_image(files: Sequence[RenderedFile], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        replace_text(out / file.path, file.text, file.mode)
        print(out / file.path)
