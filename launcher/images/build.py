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
from pathlib import Path

from launcher import __version__
from launcher.images import ImageError
from launcher.images.builders import Builder
from launcher.images.catalogue import Image
from launcher.render.render import RenderedFile
from launcher.rundir.files import replace_text
from launcher.spec.long_work import working


def local_tag(image: Image) -> str:
    """The local name of a built image; a file for Apptainer."""
    return (
        f"{image.name}.sif"
        if image.target == "apptainer"
        else f"localhost/launcher/{image.name}:{__version__}"
    )


def base_of(image: Image, base: str | None, unpinned: bool) -> str:
    """The reference to build on. Raises ImageError if it has no digest, unless `unpinned` allows that."""
    reference = base or image.base.reference
    if "@sha256:" in reference or unpinned:
        return reference
    whose = "" if base else f"of {image.name} in the catalogue "
    raise ImageError(
        f"the base {whose}has no digest: {reference} may be another image tomorrow. "
        f"Give --base {reference}@sha256:..., "
        f"or take what the tag means now with --unpinned-base. The digest is shown by\n"
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
            "launcher is installed without its sources: give its wheel, --launcher-wheel launcher-*.whl"
        )
    # hatchling is a development dependency; without it pip downloads it.
    here = ("--no-build-isolation",) if importlib.util.find_spec("hatchling") is not None else ()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *here,
        "--wheel-dir",
        str(folder),
    ]
    done = subprocess.run([*command, str(checkout)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ImageError(f"launcher's wheel cannot be built: {done.stderr.strip()}")
    return next(folder.glob("launcher-*.whl"))


def add_wheels(context: Path, wheel: Path | None, wheels: Path | None) -> Path:
    """Fill `wheels/` with launcher's wheel and those of a folder.

    Return launcher's. Raises ImageError, OSError.
    """
    folder = context / "wheels"
    if wheels is not None:
        found = [file for file in sorted(wheels.glob("*.whl")) if not file.name.startswith("launcher-")]
        if not found:
            raise ImageError(f"{wheels} holds no wheels")
        for file in found:
            _same_file(file, folder / file.name)
    if wheel is None:
        return own_wheel(folder)
    if not (wheel.name.startswith("launcher-") and wheel.suffix == ".whl" and zipfile.is_zipfile(wheel)):
        raise ImageError(f"{wheel} is not a wheel of launcher")
    return Path(shutil.copy(wheel, folder / wheel.name))


def _same_file(source: Path, target: Path) -> None:
    """Hard-link the file if the file system can, because torch's wheel has hundreds of megabytes."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy(source, target)


def epoch_of(wheel: Path) -> int:
    """The image's time in seconds since 1970: SOURCE_DATE_EPOCH, otherwise the wheel's time stamp.

    The clock is not used, so that the same sources make the same image.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is not None:
        if not given.isdigit():
            raise ImageError(f"SOURCE_DATE_EPOCH is {given!r}, not a number of seconds since 1970")
        return int(given)
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
        done = subprocess.run(builder.build(context, tag, epoch))
    if done.returncode != 0:
        raise ImageError(f"{builder.name} failed with exit code {done.returncode}; its last lines say why")
