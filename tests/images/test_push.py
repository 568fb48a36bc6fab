"""Pushing to a real registry on loopback: the digest it answers with is what a profile's name then means."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images.lab import Storage
from tests.lab import wait_for


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed (tests/images/install.sh)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "registry.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/blobs}}}}\n"
        f"http: {{addr: '{address}'}}\n"
    )
    server = subprocess.Popen(
        ["docker-registry", "serve", str(tmp_path / "registry.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: urllib.request.urlopen(f"http://{address}/v2/"), "registry").close()
        yield address
    finally:
        server.kill()
        server.wait()


def test_a_pushed_image_is_what_the_name_means_by_the_registrys_own_digest(
    registry: str, tmp_path: Path
) -> None:
    (tmp_path / "storage").mkdir()
    storage = Storage(tmp_path / "storage")
    try:
        (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')
        storage.env["CONTAINERS_REGISTRIES_CONF"] = str(tmp_path / "registries.conf")
        small = storage.buildah("from", "scratch").stdout.strip()
        storage.buildah("config", "--label", "launcher.image=cpu", small)
        storage.buildah("commit", "--rm", small, "localhost/small:1")

        options = ["--to", f"{registry}/team", "--tag", "localhost/small:1", "--with", "buildah"]
        pushed = storage.launcher("images", "push", "cpu", *options)
        assert pushed.returncode == 0, pushed.stderr
        reference = pushed.stdout.splitlines()[0]
        accepted = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        asked = urllib.request.Request(f"http://{registry}/v2/team/cpu/manifests/0.1.0", headers=accepted)
        with urllib.request.urlopen(asked) as answer:
            assert reference == f"{registry}/team/cpu@{answer.headers['Docker-Content-Digest']}"

        listed = json.loads(storage.launcher("images", "list", "--json").stdout)
        assert {one["name"]: one["published"] for one in listed}["cpu"] == reference
        assert storage.launcher("job", "init").returncode == 0
        rendered = storage.launcher("render", "job.yaml", "-c", "slurm-h100", "--set", "image=catalog:cpu")
        assert f"--container-image={reference.replace('/', '#', 1)}" in rendered.stdout
        absent = storage.launcher("images", "push", "cpu", "--to", f"{registry}/team", "--with", "buildah")
        assert absent.returncode == 4 and "build it with `launcher images build NAME`" in absent.stderr
    finally:
        storage.end()
