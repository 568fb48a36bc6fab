"""The slim image, built for real and without an engine: what is inside, and the demo in it.

buildah with `--isolation chroot`, on a Debian of this machine's making in the place of the catalogue's base.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.images.catalogue import pins
from launcher.render.shipped import containers_dir
from tests.images.examples import images
from tests.images.lab import BASE, Storage, wheels

CPU = images()[0]
TAG = "localhost/launcher/cpu:test"
EXAMPLES = Path(__file__).parents[2] / "examples"
CANARY = "canary-5d41402abc4b2a76"
# podman's own limits are above what root of a container may set. crun refuses cgroups of version 1 beside 2.
CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    if f"{sys.version_info.major}.{sys.version_info.minor}" != CPU.python:
        pytest.skip(f"pip picks wheels for this Python, and the image has {CPU.python}")
    storage = Storage(tmp_path_factory.mktemp("images"))
    try:
        storage.env |= {"HF_TOKEN": CANARY, "RUNPOD_API_KEY": CANARY}
        (storage.folder / ".env").write_text(f"TOKEN={CANARY}\n")
        storage.base()
        storage.build(CPU, "buildah", TAG, wheels(CPU, storage.folder))
        yield storage
    finally:
        storage.end()


@pytest.fixture(scope="module")
def container(storage: Storage) -> str:
    return storage.buildah("from", "--pull-never", TAG).stdout.strip()


def inside(storage: Storage, container: str, *command: str, options: tuple[str, ...] = ()) -> str:
    return storage.buildah("run", *options, container, "--", *command).stdout


@pytest.mark.slow
def test_verify_finds_what_the_catalogue_says(storage: Storage) -> None:
    done = storage.launcher("images", "verify", "cpu", "--with", "buildah", "--tag", TAG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok, {len(pins(containers_dir() / CPU.lock))} packages as locked" in done.stdout


@pytest.mark.slow
def test_the_image_says_what_it_is_and_how_it_starts(storage: Storage) -> None:
    config = json.loads(storage.buildah("inspect", "--type", "image", TAG).stdout)["Docker"]["config"]
    assert config["User"] == "1000:1000" and config["Cmd"] == ["bash"]
    assert config["Entrypoint"] == ["/opt/venv/bin/dumb-init", "--", "/usr/local/bin/launcher-start"]
    assert config["Healthcheck"]["Test"] == ["CMD", "python", "-m", "launcher.images.inside", "--health"]
    assert config["Labels"]["launcher.image"] == "cpu" and config["Labels"]["launcher.torch"] == CPU.torch


@pytest.mark.slow
def test_the_demo_runs_out_of_memory_and_recovers_inside(storage: Storage, container: str) -> None:
    run = "launcher run /examples/demo-oom.yaml -c local --set steps=3 && launcher why && id -u"
    command = ("/opt/venv/bin/dumb-init", "--", "/usr/local/bin/launcher-start", "sh", "-c", run)
    out = inside(storage, container, *command, options=("--volume", f"{EXAMPLES}:/examples:ro"))
    assert "trying again: micro-batch 16 -> 8" in out
    assert "succeeded: every rank ended with exit code 0" in out
    assert "gpu-oom: rank" in out and out.splitlines()[-1] == "1000"


@pytest.mark.slow
def test_its_list_of_parts_names_python_and_debian_packages(storage: Storage, container: str) -> None:
    parts = json.loads(inside(storage, container, "cat", "/opt/launcher/sbom.cdx.json"))
    assert (parts["bomFormat"], parts["specVersion"]) == ("CycloneDX", "1.6")
    purls = [part["purl"] for part in parts["components"]]
    assert "pkg:pypi/torch@2.13.0%2Bcpu" in purls and "pkg:pypi/gpu-launcher@0.1.0" in purls
    installed = inside(storage, container, "dpkg-query", "--show", "--showformat", "${Package} ${Version}\\n")
    debian = {
        f"{part['name']} {part['version']}" for part in parts["components"] if "pkg:deb" in part["purl"]
    }
    assert debian == set(installed.splitlines())


@pytest.mark.slow
def test_the_health_check_is_quick_and_says_what_is_wrong(storage: Storage, container: str) -> None:
    check = "import sys; from launcher.images import inside; print(inside.health(), 'torch' in sys.modules)"
    assert inside(storage, container, "/opt/venv/bin/python", "-c", check) == "None False\n"


@pytest.mark.slow
def test_no_secret_of_the_builder_is_in_any_layer(storage: Storage, container: str) -> None:
    root = Path(storage.buildah("mount", container).stdout.strip())
    try:
        names = {path.name for path in (root / "tmp").iterdir()} | {path.name for path in root.iterdir()}
        assert ".env" not in names and "wheels" not in names and "requirements.txt" not in names
        for folder in ("etc", "home", "opt/launcher", "root", "run", "usr/local", "var/lib/dpkg"):
            for path in (root / folder).rglob("*"):
                if path.is_file() and not path.is_symlink():
                    assert CANARY.encode() not in path.read_bytes(), path
    finally:
        storage.buildah("umount", container)
    assert CANARY not in storage.buildah("inspect", "--type", "image", TAG).stdout


def at_most(limit: int, wanted: int) -> int:
    hard = resource.getrlimit(limit)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)


@pytest.mark.thorough
def test_podman_builds_and_starts_it_too(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("podman", "runc"):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed (tests/images/install.sh podman runc)")
    conf = storage.folder / "containers.conf"
    files, processes = at_most(resource.RLIMIT_NOFILE, 1024), at_most(resource.RLIMIT_NPROC, 4096)
    conf.write_text(CONTAINERS_CONF.format(files=files, processes=processes))
    monkeypatch.setitem(storage.env, "CONTAINERS_CONF", str(conf))
    start = ["podman", "run", "--rm", "--network", "none", BASE, "true"]
    started = subprocess.run(start, env=storage.env, capture_output=True, text=True)
    if started.returncode != 0:
        pytest.skip(f"podman starts no container here: {started.stderr.strip()}")
    tag = "localhost/launcher/cpu:podman"
    storage.build(CPU, "podman", tag, storage.folder / "wheels")
    done = storage.launcher("images", "verify", "cpu", "--with", "podman", "--tag", tag)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tag}: ok, " in done.stdout
