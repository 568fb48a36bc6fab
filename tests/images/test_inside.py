"""What verify makes of an image's own report, and how the files start: no builder is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.images import ImageError, inside, sbom
from launcher.images.build import add_wheels, epoch_of, own_wheel
from launcher.images.builders import BUILDERS, choose
from launcher.images.verify import configured, differences, labelled
from launcher.rundir.versions import DISTRIBUTION
from tests.images.examples import images, rendered

CPU, _, RUNPOD, _ = images()
LOCKED = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}


def report(**changes: Any) -> dict[str, Any]:
    installed = {**LOCKED, DISTRIBUTION: "0.1.0", "pip": "23.0.1"}
    good = {
        "python": "3.11.2",
        "distributions": installed,
        "listed": installed,
        "cuda": None,
        "imports": {"torch": None},
        "commands": {"launcher": True, "dumb-init": True, "gcc": False, "sshd": False},
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"python": "3.1.1"}, ["Python is 3.1.1, not 3.11"]),
        ({"cuda": "13.0"}, ["torch is built for CUDA 13.0, not None"]),
        ({"imports": {"torch": "ImportError: libx.so"}}, ["import torch fails: ImportError: libx.so"]),
        (
            {"commands": {"launcher": True, "dumb-init": False, "gcc": False}},
            ["there is no command dumb-init"],
        ),
        ({"listed": {}}, ["the list of parts (SBOM) differs from what is installed: gpu-launcher==0.1.0"]),
    ],
)
def test_verify_tells_every_difference(changes: dict[str, Any], told: list[str]) -> None:
    found = list(differences(CPU, LOCKED, report(**changes)))
    assert len(found) == len(told) and all(
        one.startswith(start) for one, start in zip(found, told, strict=True)
    )


def test_a_package_more_or_another_version_is_a_difference() -> None:
    installed = {"torch": "2.13.0", "numpy": "2.4.6", DISTRIBUTION: "0.1.0", "requests": "2.0"}
    found = list(differences(CPU, LOCKED, report(distributions=installed, listed=installed)))
    assert found == ["torch is 2.13.0, not 2.13.0+cpu", "requests 2.0 is in no lock file"]


def test_an_entrypoint_is_missed_in_one_image_and_a_trap_in_the_other() -> None:
    labels = {"launcher.image": "cpu"}
    assert list(configured(CPU, {"Labels": labels, "User": "1000:1000", "Entrypoint": ["x"]})) == []
    assert [line[:10] for line in configured(CPU, {"Labels": labels})] == ["it starts ", "it has no "]
    labels = {"launcher.image": "runpod-cuda13"}
    assert list(configured(RUNPOD, {"Labels": labels})) == []
    (trap,) = configured(RUNPOD, {"Labels": labels, "Entrypoint": ["/start"]})
    assert "would be put before a pod's command" in trap


def test_the_report_of_this_python_is_json_and_tells_an_import_that_fails() -> None:
    command = [sys.executable, "-m", "launcher.images.inside", "json", "no_such_module"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told["imports"] == {
        "json": None,
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    }
    assert told["distributions"]["pydantic"] and told["uid"] == os.getuid() and told["shm"] > 0


def test_a_full_shared_memory_is_unhealthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert inside.health() is None
    monkeypatch.setattr(inside, "SHM_LEAST_FREE", 2**60)
    assert "MiB left: DataLoader workers die" in (inside.health() or "")
    monkeypatch.setattr(inside, "SHM", tmp_path / "none")
    assert inside.health() == f"{tmp_path}/none is missing"


def test_the_same_packages_make_the_same_list_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1580601600")
    system = {"ID": "debian", "VERSION_ID": "12"}
    first, second = sbom.sbom(system), sbom.sbom(system)
    assert first == second and first["metadata"]["timestamp"] == "2020-02-02T00:00:00Z"
    references = [part["bom-ref"] for part in first["components"]]
    assert len(set(references)) == len(references) == len(first["components"])


def test_a_small_shared_memory_is_said_and_the_command_runs(tmp_path: Path) -> None:
    start = tmp_path / "start.sh"
    start.write_text(rendered(CPU)["cpu/start.sh"].text)
    df = tmp_path / "df"
    df.write_text("#!/bin/sh\nprintf 'Filesystem 1048576-blocks\\nshm 64\\n'\n")
    df.chmod(0o755)
    for path, told in ((f"{tmp_path}:{os.environ['PATH']}", "/dev/shm has 64 MiB"), (os.environ["PATH"], "")):
        command = ["sh", str(start), "sh", "-c", 'echo "$1"; exit 7', "sh", "two words"]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (7, "two words\n")
        assert told in done.stderr and bool(told) == bool(done.stderr)


@pytest.mark.slow
def test_launchers_own_wheel_is_the_same_each_time_and_dates_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling (extra `dev`)")
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    first, second = own_wheel(tmp_path / "1"), own_wheel(tmp_path / "2")
    assert first.read_bytes() == second.read_bytes() and epoch_of(first) == 1580601600
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795000000")
    assert epoch_of(first) == 1795000000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(ImageError, match="'yesterday', not a number of seconds"):
        epoch_of(first)


def test_what_is_no_wheel_of_launcher_is_refused(tmp_path: Path) -> None:
    (tmp_path / "context/wheels").mkdir(parents=True)
    (tmp_path / "gpu_launcher-1.whl").write_text("not a zip")
    with pytest.raises(ImageError, match="is not a wheel of launcher"):
        add_wheels(tmp_path / "context", tmp_path / "gpu_launcher-1.whl", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="has no wheels"):
        add_wheels(tmp_path / "context", None, tmp_path / "empty")


def test_without_a_builder_each_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin-of-nobody")
    (tmp_path / "sh").symlink_to("/bin/sh")
    with pytest.raises(ImageError) as caught:
        choose("docker", None)
    assert "docker: its plugin buildx is missing" in str(caught.value)
    assert "DOCKER_HOST: Cannot connect to the Docker daemon\n" in str(caught.value)
    assert "podman: not installed\nbuildah: not installed" in str(caught.value)
    with pytest.raises(ImageError, match="buildah does not build images for apptainer; apptainer does"):
        choose("apptainer", "buildah")


def test_an_image_whose_label_tells_of_another_launcher_is_not_what_it_says() -> None:
    inside = report(distributions={**LOCKED, DISTRIBUTION: "0.1.0"})
    assert list(labelled({"Labels": {"org.opencontainers.image.version": "0.1.0"}}, inside)) == []
    (said,) = labelled({"Labels": {"org.opencontainers.image.version": "0.2.0"}}, inside)
    assert said == "launcher is 0.1.0, the label says 0.2.0"


def test_the_labels_of_an_apptainer_file_are_found_where_apptainer_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Apptainer 1.4.5 answered for an image built here, but for most of its labels.
    answer = (
        '{"data": {"attributes": {"labels": {"launcher.image": "apptainer-cuda13"}}}, "type": "container"}'
    )
    apptainer = tmp_path / "apptainer"
    apptainer.write_text(f"#!/bin/sh\necho '{answer}'\n")
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert BUILDERS["apptainer"].config("x.sif") == {"Labels": {"launcher.image": "apptainer-cuda13"}}
