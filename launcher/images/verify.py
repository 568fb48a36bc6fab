"""Start an image, inspect it from inside, and compare it with the catalogue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.images import ImageError
from launcher.images.builders import Builder
from launcher.images.catalogue import Image
from launcher.rundir.versions import DISTRIBUTION
from launcher.spec.progress import working

_MODULES = {
    "launcher": "launcher.train.loop",
    "torch": "torch.distributed",
    "numpy": "numpy",
    "safetensors": "safetensors.torch",
    "bitsandbytes": "bitsandbytes",
    "transformers": "transformers",
    "scikit-learn": "sklearn",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"Package -> the module of it that is imported."


def verify(builder: Builder, image: Image, locked: Mapping[str, str], tag: str) -> tuple[str, ...]:
    """Return every difference from the catalogue. Raises ImageError."""
    config = builder.config(tag)
    modules = [module for package, module in _MODULES.items() if package in locked or package == "launcher"]
    with working(f"starting and inspecting {tag}"):
        result = builder.run_inside(tag, ["python", "-m", "launcher.images.inside", *modules])
    if result.returncode != 0:
        raise ImageError(f"{tag} does not start, or launcher is not in it: {result.stderr.strip()}")
    try:
        report = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ImageError(f"{tag} printed no report: {result.stdout[-200:].strip()!r}") from None
    return (*configured(image, config), *labelled(config, report), *differences(image, locked, report))


def labelled(config: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if the label names another version of launcher than the one inside."""
    label = (config.get("Labels") or {}).get("org.opencontainers.image.version")
    if label != (inside := report["distributions"].get(DISTRIBUTION)):
        yield f"launcher is {inside or 'missing'}, the label says {label}"


def configured(image: Image, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the labels, the user and the entrypoint of the image."""
    labels = config.get("Labels") or {}
    if labels.get("launcher.image") != image.name:
        yield f"label launcher.image is {labels.get('launcher.image')!r}, not {image.name!r}"
    if image.target == "runpod" and config.get("Entrypoint"):
        yield f"it has an ENTRYPOINT, {config['Entrypoint']}, which would be put before a pod's command"
    if image.target == "docker":
        if config.get("User") in (None, "", "0", "root"):
            yield "it starts as root"
        if not config.get("Entrypoint"):
            yield "it has no ENTRYPOINT: nothing checks /dev/shm or reaps orphans"


def differences(image: Image, locked: Mapping[str, str], report: Mapping[str, Any]) -> Iterator[str]:
    """Yield how `report`, from launcher.images.inside, differs from the catalogue and its lock file."""
    if report["python"].split(".")[: image.python.count(".") + 1] != image.python.split("."):
        yield f"Python is {report['python']}, not {image.python}"
    installed = report["distributions"]
    for package, version in locked.items():
        if installed.get(package) != version:
            yield f"{package} is {installed.get(package, 'missing')}, not {version}"
    for package in sorted(set(installed) - set(locked) - {DISTRIBUTION, "pip"}):
        yield f"{package} {installed[package]} is in no lock file"
    if report["cuda"] != image.cuda:
        yield f"torch is built for CUDA {report['cuda']}, not {image.cuda}"
    for module, error in report["imports"].items():
        if error is not None:
            yield f"import {module} fails: {error}"
    if report["listed"] != installed:
        differing = sorted(set(report["listed"].items()) ^ set(installed.items()))
        names = ", ".join("==".join(pair) for pair in differing)
        yield f"the list of parts (SBOM) differs from what is installed: {names}"
    commands = {"launcher", "dumb-init", *(["sshd"] if image.target == "runpod" else [])}
    for name in sorted(commands | ({"gcc"} if image.cuda else set())):
        if not report["commands"][name]:
            yield f"there is no command {name}"
