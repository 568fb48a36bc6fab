"""Build an image from a context folder and launcher's wheel, with one call of the builder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from calendar import timegm
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from launcher import __version__
from launcher.images import ImageError
from launcher.images.builders import Builder
from launcher.images.catalogue import Image
from launcher.render.render import RenderedFile
from launcher.rundir.files import replace_text
from launcher.rundir.versions import DISTRIBUTION
from launcher.spec.progress import working

WHEELS = f"{DISTRIBUTION.replace('-', '_')}-*.whl"
"The file name of launcher's wheel."


def local_tag(image: Image) -> str:
    """Return the local name of a built image. For Apptainer, it is a file."""
    return (
        f"{image.name}.sif"
        if image.target == "apptainer"
        else f"localhost/launcher/{image.name}:{__version__}"
    )


def base_of(image: Image, base: str | None, unpinned: bool) -> str:
    """Return the reference of the base image. Raises ImageError if it has no digest, unless `unpinned`."""
    reference = base or image.base.reference
    if "@sha256:" in reference or unpinned:
        return reference
    whose = "" if base else f"of {image.name} in the catalogue "
    raise ImageError(
        f"the base {whose}has no digest: {reference} may be another image tomorrow. "
        f"Give --base {reference}@sha256:..., "
        f"or accept what the tag refers to now with --unpinned-base. To see the digest:\n"
        f"  docker buildx imagetools inspect {reference} --format '{{{{.Manifest.Digest}}}}'"
    )


def write_context(folder: Path, files: Sequence[RenderedFile]) -> None:
    """Write the files and an empty `wheels/`.

    Modes are part of the image, so the umask must not affect them.
    """
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    for file in files:
        replace_text(folder / file.path, file.text, file.mode)
        (folder / file.path).chmod(file.mode)


def own_wheel(folder: Path) -> Path:
    """Build launcher's wheel from the running checkout. Raises ImageError if there is none."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        raise ImageError(
            f"launcher is installed without its sources: give its wheel, --launcher-wheel {WHEELS}"
        )
    # hatchling is a development dependency; without it pip downloads it.
    no_isolation = ("--no-build-isolation",) if importlib.util.find_spec("hatchling") is not None else ()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *no_isolation,
        "--wheel-dir",
        str(folder),
    ]
    result = subprocess.run([*command, str(checkout)], capture_output=True, text=True)
    if result.returncode != 0:
        raise ImageError(f"launcher's wheel cannot be built: {result.stderr.strip()}")
    return next(folder.glob(WHEELS))


def add_wheels(context: Path, wheel: Path | None, wheels: Path | None) -> Path:
    """Copy launcher's wheel and those in `wheels` to `wheels/` of the context.

    Return the copy of launcher's wheel. Raises ImageError, OSError.
    """
    folder = context / "wheels"
    if wheels is not None:
        others = [file for file in sorted(wheels.glob("*.whl")) if not fnmatch(file.name, WHEELS)]
        if not others:
            raise ImageError(f"{wheels} has no wheels")
        for file in others:
            _link_or_copy(file, folder / file.name)
    if wheel is None:
        return own_wheel(folder)
    if not (fnmatch(wheel.name, WHEELS) and zipfile.is_zipfile(wheel)):
        raise ImageError(f"{wheel} is not a wheel of launcher")
    return Path(shutil.copy(wheel, folder / wheel.name))


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard-link the file if the file system can, because torch's wheel has hundreds of megabytes."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy(source, target)


def epoch_of(wheel: Path) -> int:
    """Return the image's time in seconds since 1970: SOURCE_DATE_EPOCH, or else the wheel's time stamp.

    The clock is not used, so that the same sources give the same image.
    """
    variable = os.environ.get("SOURCE_DATE_EPOCH")
    if variable is not None:
        if not variable.isdigit():
            raise ImageError(f"SOURCE_DATE_EPOCH is {variable!r}, not a number of seconds since 1970")
        return int(variable)
    with zipfile.ZipFile(wheel) as archive:
        return max(timegm((*item.date_time, 0, 0, 0)) for item in archive.infolist())


def build(
    builder: Builder,
    files: Sequence[RenderedFile],
    tag: str,
    wheel: Path | None = None,
    wheels: Path | None = None,
) -> None:
    """Build the image. The tool's own output goes to the terminal. Raises ImageError, OSError."""
    with tempfile.TemporaryDirectory(prefix="launcher-image-") as name:
        context = Path(name)
        write_context(context, files)
        with working("collecting the wheels"):
            epoch = epoch_of(add_wheels(context, wheel, wheels))
        result = subprocess.run(builder.build(context, tag, epoch))
    if result.returncode != 0:
        raise ImageError(f"{builder.name} failed with exit code {result.returncode}; see its output above")
