"""Resolve `image: catalog:NAME` of a profile by `published.yaml`, which names each image by digest."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import platformdirs

from launcher.images import ImageError
from launcher.images.builders import Builder
from launcher.images.catalogue import FILE, Image, catalogue_folder, find_image, load_catalogue
from launcher.images.names import PREFIX
from launcher.render.shipped import containers_dir
from launcher.rundir.files import replace_text
from launcher.spec.load import read, validate
from launcher.spec.progress import working
from launcher.spec.value import Value

RECORD = "published.yaml"
_REFERENCE = r"^[a-z0-9][A-Za-z0-9.:-]*(/[a-z0-9][a-z0-9._-]*)+@sha256:[0-9a-f]{64}$"


class Published(Value):
    """Catalogue name -> `registry/path@sha256:...`."""

    images: dict[str, str]


def record_folders(project_dir: Path) -> tuple[Path, ...]:
    """Return the folders of records by precedence: the project's, the user's, the shipped one."""
    user = Path(platformdirs.user_config_dir("launcher")) / "containers"
    return (project_dir / "containers", user, containers_dir())


def published(name: str, project_dir: Path) -> str | None:
    """Return the published reference by digest, or None. Raises SpecError for an invalid record."""
    for folder in record_folders(project_dir):
        if (folder / RECORD).is_file():
            images = validate(Published, read(folder / RECORD)).images
            if name in images:
                return images[name]
    return None


def by_digest(image: str, runtime: str, project_dir: Path) -> str:
    """Resolve `catalog:NAME` for the runtime, and return any other image unchanged.

    Raises SpecError, ImageError.
    """
    if not image.startswith(PREFIX):
        return image
    name = image.removeprefix(PREFIX)
    find_image(name, load_catalogue(catalogue_folder(project_dir)), "image")
    reference = published(name, project_dir)
    if reference is None:
        raise ImageError(
            f"image {image} is not published. Publish it with `launcher images build {name}` "
            f"and `launcher images push {name} --to REGISTRY/PATH`, or name another image"
        )
    if re.fullmatch(_REFERENCE, reference) is None:
        raise ImageError(f"image {image}: {reference!r} in {RECORD} is not REGISTRY/PATH@sha256:...")
    if runtime == "pyxis":
        # enroot separates the registry's name with `#`.
        registry, _, rest = reference.partition("/")
        return f"{registry}#{rest}"
    return reference


def push(
    builder: Builder, image: Image, tag: str, to: str, version: str, project_dir: Path
) -> tuple[str, Path]:
    """Copy an image to a registry. Return its reference by digest, and the file that now records it.

    Raises ImageError.
    """
    repository = f"{to.rstrip('/')}/{image.name}"
    if re.fullmatch(_REFERENCE, f"{repository}@sha256:{'0' * 64}") is None:
        raise ImageError(f"--to {to}: write REGISTRY/PATH, in lower case, e.g. ghcr.io/my-team/launcher")
    with tempfile.TemporaryDirectory() as folder, working(f"pushing {repository}:{version}"):
        digest = builder.push(tag, f"{repository}:{version}", Path(folder) / "digest")
    reference = f"{repository}@{digest}"
    return reference, record(image.name, reference, project_dir)


def record(name: str, reference: str, project_dir: Path) -> Path:
    """Record the reference in the project's `containers/` if it has a catalogue, otherwise in the user's
    configuration."""
    own, user, _ = record_folders(project_dir)
    file = (own if (own / FILE).is_file() else user) / RECORD
    images = validate(Published, read(file)).images if file.is_file() else {}
    lines = [f"  {key}: {value}\n" for key, value in sorted({**images, name: reference}.items())]
    file.parent.mkdir(parents=True, exist_ok=True)
    head = "# Written by `launcher images push`: the images to which `image: catalog:NAME` refers.\nimages:\n"
    replace_text(file, head + "".join(lines), 0o644)
    return file
