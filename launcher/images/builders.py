"""The command lines of docker, podman, buildah and apptainer for the same few operations."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.images import ImageError
from launcher.images.catalogue import Target

Command = tuple[str, ...]


@dataclass(frozen=True)
class Builder:
    """Docker, and what other tools do in the same way."""

    name: str
    checks: tuple[tuple[Command, str], ...]
    "Commands that succeed if the tool is usable, each with an error message. `{said}` is its last line."

    def build(self, folder: Path, tag: str, epoch: int) -> Command:
        """Return the build command. `epoch` (Unix seconds) becomes the time of the image and its files."""
        # By default BuildKit keeps the time at which files in layers were written.
        output = f"type=docker,name={tag},rewrite-timestamp=true"
        epoch_argument = ("--build-arg", f"SOURCE_DATE_EPOCH={epoch}")
        return ("docker", "buildx", "build", *epoch_argument, "--output", output, str(folder))

    def config(self, tag: str) -> dict[str, Any]:
        """Return User, Entrypoint, Labels etc. of a local image. Raises ImageError if it does not exist."""
        return _json((self.name, "image", "inspect", "--format", "{{json .Config}}", tag), tag)

    def run_inside(self, tag: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Start the image and run a command in it through the image's entrypoint."""
        argv = [self.name, "run", "--rm", "--network", "none", "--shm-size", "1g", tag, *command]
        return subprocess.run(argv, capture_output=True, text=True)

    def push(self, tag: str, destination: str, digest_file: Path) -> str:
        """Push the image and return its digest in the registry. Raises ImageError."""
        self.config(tag)
        _quiet((self.name, "tag", tag, destination))
        _quiet((self.name, "push", destination))
        repository = destination.rpartition(":")[0]
        form = "{{json .RepoDigests}}"
        output = _quiet((self.name, "image", "inspect", "--format", form, destination))
        digests = [entry for entry in json.loads(output) if entry.startswith(f"{repository}@")]
        if not digests:
            raise ImageError(f"docker has pushed {destination}, but shows no digest for it")
        return str(digests[0].partition("@")[2])


class Podman(Builder):
    """Podman."""

    _verb = "build"

    def build(self, folder: Path, tag: str, epoch: int) -> Command:
        arguments = ("--build-arg", f"SOURCE_DATE_EPOCH={epoch}", "--timestamp", str(epoch))
        # Docker's format, because OCI's has no health check and no SHELL.
        return (self.name, self._verb, *arguments, "--format", "docker", "--tag", tag, str(folder))

    def push(self, tag: str, destination: str, digest_file: Path) -> str:
        self.config(tag)
        _quiet((self.name, "push", "--digestfile", str(digest_file), tag, f"docker://{destination}"))
        return digest_file.read_text(encoding="utf-8").strip()


class Buildah(Podman):
    """buildah. It works without an engine and, with BUILDAH_ISOLATION=chroot, also in a container."""

    _verb = "bud"

    def config(self, tag: str) -> dict[str, Any]:
        inspected = _json(("buildah", "inspect", "--type", "image", tag), tag)
        config: dict[str, Any] = inspected["Docker"]["config"]
        return config

    def run_inside(self, tag: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        # `buildah run` ignores the entrypoint.
        entrypoint = self.config(tag).get("Entrypoint") or []
        container = _quiet(("buildah", "from", "--pull-never", tag)).strip()
        try:
            argv = ["buildah", "run", container, "--", *entrypoint, *command]
            return subprocess.run(argv, capture_output=True, text=True)
        finally:
            _quiet(("buildah", "rm", container))


class Apptainer(Builder):
    """Apptainer, whose images are files. A tag is the path of one."""

    def build(self, folder: Path, tag: str, epoch: int) -> Command:
        # File names in a definition are relative to the directory in which the build starts.
        start = ("env", f"--chdir={folder}", f"SOURCE_DATE_EPOCH={epoch}")
        return (*start, "apptainer", "build", "--force", str(Path(tag).absolute()), "image.def")

    def config(self, tag: str) -> dict[str, Any]:
        inspected = _json(("apptainer", "inspect", "--json", "--labels", tag), tag)
        return {"Labels": inspected["data"]["attributes"]["labels"]}

    def run_inside(self, tag: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["apptainer", "run", "--cleanenv", tag, *command], capture_output=True, text=True
        )

    def push(self, tag: str, destination: str, digest_file: Path) -> str:
        raise ImageError(
            f"{tag} is a file: copy it to a file system that the nodes share, and name it in the profile"
        )


BUILDERS: dict[str, Builder] = {
    "docker": Builder(
        "docker",
        (
            (
                ("docker", "buildx", "version"),
                "its plugin buildx is missing: install the package docker-buildx-plugin or docker-buildx",
            ),
            (
                ("docker", "version"),
                "its engine does not answer, start it or name one in DOCKER_HOST: {said}",
            ),
        ),
    ),
    "podman": Podman("podman", ((("podman", "info"), "`podman info` fails: {said}"),)),
    "buildah": Buildah("buildah", ((("buildah", "info"), "`buildah info` fails: {said}"),)),
    "apptainer": Apptainer("apptainer", ((("apptainer", "version"), "`apptainer version` fails: {said}"),)),
}


def choose(target: Target, wanted: str | None) -> Builder:
    """Return the first tool that works. Raises ImageError with the problems of each tool."""
    names = ["apptainer"] if target == "apptainer" else ["docker", "podman", "buildah"]
    if wanted is not None:
        if wanted not in names:
            raise ImageError(f"{wanted} does not build images for {target}; {' or '.join(names)} does")
        names = [wanted]
    reasons = []
    for name in names:
        problems = _problems_of(BUILDERS[name])
        if not problems:
            return BUILDERS[name]
        reasons += [f"{name}: {problem}" for problem in problems]
    raise ImageError("\n".join(["no tool on this machine can build or start this image", *reasons]))


def _problems_of(builder: Builder) -> list[str]:
    if shutil.which(builder.name) is None:
        return ["not installed"]
    problems = []
    for command, missing in builder.checks:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            *_, last_line = ["no error message", *result.stderr.strip().splitlines()]
            problems.append(missing.format(said=last_line))
    return problems


def _json(command: Command, tag: str) -> dict[str, Any]:
    try:
        parsed = json.loads(_quiet(command))
    except ImageError as error:
        raise ImageError(
            f"there is no image {tag} on this machine; build it with `launcher images build NAME`\n{error}"
        ) from None
    assert isinstance(parsed, dict)
    return parsed


def _quiet(command: Command) -> str:
    """Run a command and return its standard output. Raises ImageError with the tool's message."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise ImageError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout
