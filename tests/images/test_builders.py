"""What is said where a builder is there but cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.images import ImageError
from launcher.images.builders import choose

# Docker's client 28.5 without the plugin, and without an engine, in its own words.
CLIENT = """#!/bin/sh
if [ "$1" = buildx ] && [ -z "$BUILDX" ]; then
  printf "docker: unknown command: docker buildx\\n\\nRun 'docker --help' for more information\\n" >&2
  exit 1
fi
if [ "$1" = version ] && [ -z "$ENGINE" ]; then
  echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?" >&2
  exit 1
fi
"""
PLUGIN = "docker: its plugin buildx is missing: install"
SILENT = (
    "docker: its engine does not answer, start it or name one in DOCKER_HOST: Cannot connect to the Docker"
)


@pytest.mark.parametrize(
    ("there", "said"), [("BUILDX", [SILENT]), ("ENGINE", [PLUGIN]), ("", [PLUGIN, SILENT])]
)
def test_of_docker_the_missing_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, said: list[str]
) -> None:
    (tmp_path / "docker").write_text(CLIENT)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for part in ("BUILDX", "ENGINE"):
        monkeypatch.delenv(part, raising=False)
    if there:
        monkeypatch.setenv(there, "1")
    with pytest.raises(ImageError) as caught:
        choose("docker", "docker")
    first, *reasons = str(caught.value).splitlines()
    assert first == "no tool on this machine can build or start this image"
    assert len(reasons) == len(said)
    assert all(line.startswith(words) for line, words in zip(reasons, said, strict=True))


def test_docker_with_plugin_and_engine_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text(CLIENT)
    (tmp_path / "docker").chmod(0o755)
    for name, value in (("PATH", f"{tmp_path}:/usr/bin:/bin"), ("BUILDX", "1"), ("ENGINE", "1")):
        monkeypatch.setenv(name, value)
    assert choose("docker", "docker").name == "docker"
