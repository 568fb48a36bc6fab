"""`launcher images list | render | build | verify | push`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from launcher.cli.options import AsJson

if TYPE_CHECKING:
    from launcher.images.catalogue import Image

app = typer.Typer(no_args_is_help=True, help="Container images of the catalogue.")


def _complete(incomplete: str) -> list[str]:
    from launcher.images.catalogue import catalogue_folder, load_catalogue

    images = load_catalogue(catalogue_folder(Path.cwd()))
    return [image.name for image in images if image.name.startswith(incomplete)]


# typer reads these annotations at run time, also on Python 3.10, so they use Optional instead of `|`.
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="name of an image in `launcher images list`", autocompletion=_complete
    ),
]
BaseOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--base", metavar="IMAGE@sha256:...", help="build on this base image instead of the catalogue's"
    ),
]
Unpinned = Annotated[
    bool,
    typer.Option(
        "--unpinned-base", help="accept a base image without a digest, whatever its tag refers to now"
    ),
]
With = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--with",
        metavar="TOOL",
        help="use docker, podman, buildah or apptainer; the first that works if left out",
    ),
]
Tag = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="local name of the image; for Apptainer a file"),
]


@app.command("list")
def list_images(json: AsJson = False) -> None:
    """List the images of the catalogue: ./containers/images.yaml if it exists, otherwise the shipped one."""
    from rich.table import Table

    from launcher.cli.output import console, print_json
    from launcher.images.catalogue import catalogue_folder, load_catalogue
    from launcher.images.publish import published

    project = Path.cwd()
    images = load_catalogue(catalogue_folder(project))
    if json:
        print_json(
            [
                {**image.model_dump(mode="json"), "published": published(image.name, project)}
                for image in images
            ]
        )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("IMAGE", "TARGET", "CUDA", "TORCH", "PYTHON", "BASE", "PUBLISHED", "WHAT"):
        table.add_column(column, no_wrap=column == "IMAGE")
    for image in images:
        table.add_row(
            image.name,
            image.target,
            image.cuda or "-",
            image.torch,
            image.python,
            "pinned" if image.base.digest else "no digest",
            published(image.name, project) or "-",
            image.description,
        )
    console().print(table)


@app.command()
def render(
    name: Name,
    base: BaseOption = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", "-o", metavar="DIR", help="write the build files into this directory"),
    ] = None,
) -> None:
    """Show the Dockerfile or Apptainer definition and the files that it copies, exactly as `build` uses
    them."""
    from launcher.cli.output import fail
    from launcher.cli.rendered_files import show_files
    from launcher.images.build import write_context
    from launcher.images.context import BuildOptions, build_files

    image, lock = _named(name)
    files = build_files(image, lock, BuildOptions(base or image.base.reference), Path.cwd())
    if out is None:
        show_files([file for file in files if file.path != "requirements.txt"])
        return
    if out.exists() and any(out.iterdir()):
        fail(f"{out} is not empty; give another folder")
    write_context(out, files)
    for file in files:
        print(out / file.path)
    print(f"note: launcher's wheel goes into {out / 'wheels'}")


@app.command()
def build(
    name: Name,
    base: BaseOption = None,
    unpinned_base: Unpinned = False,
    wheels: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="install packages from this directory only, none from an index",
        ),
    ] = None,
    launcher_wheel: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="wheel of launcher; built from the checkout if left out",
        ),
    ] = None,
    tool: With = None,
    tag: Tag = None,
) -> None:
    """Build an image on this machine."""
    from launcher.images.build import base_of, local_tag
    from launcher.images.build import build as build_image
    from launcher.images.builders import choose
    from launcher.images.context import BuildOptions, build_files

    image, lock = _named(name)
    options = BuildOptions(base_of(image, base, unpinned_base), offline=wheels is not None)
    builder = choose(image.target, tool)
    files = build_files(image, lock, options, Path.cwd())
    image_name = tag or local_tag(image)
    build_image(builder, files, image_name, launcher_wheel, wheels)
    print(f"built {image_name} with {builder.name}; check it with `launcher images verify {name}`")


@app.command()
def verify(name: Name, tool: With = None, tag: Tag = None) -> None:
    """Start a built image and compare its versions, imports, user, entrypoint and parts with the
    catalogue."""
    from launcher.images.build import local_tag
    from launcher.images.builders import choose
    from launcher.images.catalogue import pins
    from launcher.images.verify import verify as verify_image

    image, lock = _named(name)
    image_name, locked = tag or local_tag(image), pins(lock)
    differences = verify_image(choose(image.target, tool), image, locked, image_name)
    for line in differences:
        print(f"{image_name}: {line}")
    if differences:
        raise SystemExit(1)
    print(f"{image_name}: ok, {len(locked)} packages as locked, torch {image.torch}, Python {image.python}")


@app.command()
def push(
    name: Name,
    to: Annotated[
        str,
        typer.Option(metavar="REGISTRY/PATH", help="push to this repository, e.g. ghcr.io/my-team/launcher"),
    ],
    tool: With = None,
    tag: Tag = None,
) -> None:
    """Copy a built image to a registry. Log in to the registry first, with the same tool.

    `image: catalog:NAME` of a profile or job then means this image, by digest.
    """
    from launcher import __version__
    from launcher.images.build import local_tag
    from launcher.images.builders import choose
    from launcher.images.publish import push as push_image

    image, _ = _named(name)
    builder = choose(image.target, tool)
    reference, file = push_image(builder, image, tag or local_tag(image), to, __version__, Path.cwd())
    print(f"{reference}\n`image: catalog:{name}` now refers to it ({file})")


def _named(name: str) -> tuple[Image, Path]:
    """Return the image of this name, and its lock file. Raises SpecError."""
    from launcher.images.catalogue import FILE, catalogue_folder, find_image, load_catalogue

    folder = catalogue_folder(Path.cwd())
    image = find_image(name, load_catalogue(folder), str(folder / FILE))
    return image, folder / image.lock
