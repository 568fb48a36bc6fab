"""The catalogue of images, `containers/images.yaml`: the pinned content of each image."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from launcher.render.shipped import containers_dir
from launcher.rundir.versions import DISTRIBUTION
from launcher.spec.errors import Problem, SpecError
from launcher.spec.load import read, validate
from launcher.spec.similar import did_you_mean
from launcher.spec.value import Value
from launcher.spec.yaml import Document

FILE = "images.yaml"
Target = Literal["docker", "apptainer", "runpod"]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=60)]
_Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]


class Base(Value):
    """The base image. It provides Python and Debian's packages."""

    image: str = Field(pattern=r"^[a-z0-9][A-Za-z0-9_./:-]*$")
    digest: Digest | None
    "null if it is not known. Such an image is built only if an unpinned base is allowed."

    @property
    def reference(self) -> str:
        """The reference by digest, without the tag, because Apptainer accepts only one of both."""
        name, colon, tag = self.image.rpartition(":")
        untagged = name if colon and "/" not in tag else self.image
        return self.image if self.digest is None else f"{untagged}@{self.digest}"


class Image(Value):
    """One image. Its packages are exactly the lines of `lock`."""

    name: _Name
    description: str
    target: Target
    base: Base
    python: _Version
    torch: str = Field(pattern=r"^\d+\.\d+\.\d+(\+[a-z0-9.]+)?$")
    cuda: _Version | None
    "Version of torch's own libraries; null for a CPU image. The host's driver must support it."
    extras: tuple[_Name, ...]
    "Extras of launcher, as in `pip install '.[train]'` in its checkout."
    without: tuple[_Name, ...] = ()
    "Packages of these extras that are left out."
    lock: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$")
    "File with a hash for each package, relative to the catalogue."
    torch_index: str | None = Field(None, pattern=r"^https://\S+$")
    "Package index that serves this torch, if it is not the Python Package Index."
    debian_packages: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], ...] = ()
    debian_snapshot: str | None = Field(None, pattern=r"^\d{8}T\d{6}Z$")
    "Time of the snapshot of Debian's archive, so that each build has the same packages."
    profiles: tuple[str, ...] = ()
    "Cluster profiles for which it is made."

    @field_validator("debian_snapshot")
    @classmethod
    def _is_a_time(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                datetime.strptime(value, "%Y%m%dT%H%M%SZ")
            except ValueError:
                raise ValueError(f"{value} is not a time; write it like 20260801T000000Z") from None
        return value

    @field_validator("extras")
    @classmethod
    def _exist(cls, extras: tuple[str, ...]) -> tuple[str, ...]:
        known = _extras()
        for extra in extras if known else ():
            if extra not in known:
                raise ValueError(f"launcher has no extra {extra!r}; it has {', '.join(known)}")
        return extras

    @model_validator(mode="after")
    def _fits(self) -> Image:
        if self.debian_packages and self.debian_snapshot is None:
            raise ValueError("debian_packages need debian_snapshot, the time of the archive to use")
        if self.target != "docker" and self.cuda is None:
            raise ValueError(f"target {self.target}: give `cuda`, because these images train on GPUs")
        if self.target == "runpod" and "openssh-server" not in self.debian_packages:
            raise ValueError("target runpod: debian_packages must have openssh-server")
        return self


def _extras() -> tuple[str, ...]:
    """Return launcher's extras, or none if it is not installed as a package."""
    try:
        return tuple(sorted(importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ()))
    except importlib.metadata.PackageNotFoundError:
        return ()


class Catalogue(Value):
    images: tuple[Image, ...]

    @model_validator(mode="after")
    def _once(self) -> Catalogue:
        names = [image.name for image in self.images]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"images: there are several named {', '.join(repeated)}")
        return self


def catalogue_folder(project_dir: Path) -> Path:
    """Return the project's `containers/` if it has a catalogue, otherwise the shipped one."""
    own = project_dir / "containers"
    return own if (own / FILE).is_file() else containers_dir()


def load_catalogue(folder: Path) -> tuple[Image, ...]:
    """Load the catalogue.

    Raises OSError, and SpecError with every problem and its line, which includes missing lock files.
    """
    document = read(folder / FILE)
    images = validate(Catalogue, document).images
    missing = [
        Problem(
            document.place(("images", index, "lock")), f"images.{index}.lock", f"there is no {image.lock}"
        )
        for index, image in enumerate(images)
        if not (folder / image.lock).is_file()
    ]
    problems = missing or list(_torch_mismatches(folder, images, document))
    if problems:
        raise SpecError(problems)
    return images


def _torch_mismatches(folder: Path, images: tuple[Image, ...], document: Document) -> Iterator[Problem]:
    """Yield a problem for each lock file with another torch version: its build would fail after an hour."""
    for index, image in enumerate(images):
        locked = pins(folder / image.lock).get("torch")
        if locked != image.torch:
            place = document.place(("images", index, "torch"))
            yield Problem(place, f"images.{index}.torch", f"{image.torch}, but {image.lock} has {locked}")


def pins(lock: Path) -> dict[str, str]:
    """Return package -> version of a lock file."""
    lines = (line.split()[0] for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line[:80])
    return dict(line.split("==") for line in lines if not line.startswith(("#", "-")))


def find_image(name: str, images: tuple[Image, ...], where: str = "") -> Image:
    """Return the image of this name. Raises SpecError with the closest name."""
    by_name = {image.name: image for image in images}
    if name in by_name:
        return by_name[name]
    hint = did_you_mean(name, by_name) or f"known: {', '.join(by_name)}"
    raise SpecError([Problem(where, name, f"no such image in the catalogue; {hint}")])
