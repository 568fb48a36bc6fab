"""What each image of the shipped catalogue is built from, as files: a change is seen in review.

`make goldens` (python -m tests.images.update_goldens) writes them anew.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from launcher.images.catalogue import Image
from launcher.render.shipped import clusters_dir
from tests.images.examples import GOLDEN, images, rendered
from tests.render.test_goldens import tool

FILES = sorted(path for path in GOLDEN.rglob("*") if path.is_file())
IMAGES = pytest.mark.parametrize("image", images(), ids=lambda image: image.name)


@IMAGES
def test_rendering_gives_the_golden_files(image: Image) -> None:
    fresh = {path: file.text for path, file in rendered(image).items()}
    golden = {path.relative_to(GOLDEN).as_posix(): path.read_text() for path in FILES}
    assert fresh == {path: text for path, text in golden.items() if path.startswith(f"{image.name}/")}


def test_every_image_has_golden_files_and_every_golden_file_an_image() -> None:
    assert {path.parent.name for path in FILES} == {image.name for image in images()}


def test_hadolint_and_shellcheck_find_nothing() -> None:
    for name, options, pattern in (("hadolint", [], "*/Dockerfile"), ("shellcheck", [], "*/*.sh")):
        files = [str(path) for path in GOLDEN.glob(pattern)]
        done = subprocess.run([tool(name), *options, *files], capture_output=True, text=True)
        assert files and done.returncode == 0, done.stdout


@IMAGES
def test_packages_are_installed_by_hash_and_from_the_lock_alone(image: Image) -> None:
    recipe = next(
        file.text for path, file in rendered(image).items() if path.endswith(("Dockerfile", ".def"))
    )
    installs = re.findall(r"pip install(?:[^&\n]|\\\n)*", recipe.replace("\\\n", " "))
    assert len(installs) == 2
    assert all(
        "--no-deps" in one and ("--require-hashes" in one) != ("--no-index" in one) for one in installs
    )


def test_a_pods_image_has_no_entrypoint_and_the_others_are_not_root() -> None:
    recipes = {path.parent.name: path.read_text() for path in FILES if path.name == "Dockerfile"}
    for name, text in recipes.items():
        lines = text.splitlines()
        pod = name.startswith("runpod")
        assert any(line.startswith("ENTRYPOINT") for line in lines) != pod
        assert any(line.startswith("USER 1000") for line in lines) != pod
    assert "rm -rf" in recipes["runpod-cuda13"] and "/etc/ssh/ssh_host_*" in recipes["runpod-cuda13"]


@IMAGES
def test_an_image_is_for_profiles_that_are_there(image: Image) -> None:
    assert image.profiles and all((clusters_dir() / f"{name}.yaml").is_file() for name in image.profiles)


def test_the_workflow_builds_every_image() -> None:
    workflow = YAML(typ="safe").load(Path(__file__).parents[2] / ".github/workflows/images.yml")
    built = {*workflow["jobs"]["container"]["strategy"]["matrix"]["image"]}
    built.add(workflow["jobs"]["apptainer"]["env"]["IMAGE"])
    assert built == {image.name for image in images()}
