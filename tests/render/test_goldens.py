"""Every shipped profile x template, as files: a change is seen in review, and every tool accepts them.

`make goldens` (python -m tests.render.update_goldens) writes them anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.render.examples import GOLDEN, clusters, rendered, target
from tests.render.run import notes

ROOT = GOLDEN.parent.parent
FILES = sorted(path for path in GOLDEN.rglob("*") if path.is_file())
SCRIPTS = [str(path) for path in FILES if path.suffix in (".sh", ".sbatch")]


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        import sys

        beside = Path(sys.executable).parent / name
        found = str(beside) if beside.exists() else None
    if found is None:
        pytest.skip(f"{name} is not installed (extra `dev`)")
    return found


@pytest.mark.parametrize("name", sorted(clusters()))
def test_rendering_gives_the_golden_files(name: str) -> None:
    fresh = {path: file.text for path, file in rendered(name).items()}
    golden = {
        p.relative_to(GOLDEN).as_posix(): p.read_text()
        for p in FILES
        if p.relative_to(GOLDEN).parts[0] == name
    }
    assert sorted(fresh) == sorted(golden)
    for path, text in fresh.items():
        assert text == golden[path], f"{path} differs; `make goldens`, then read the diff"


def test_every_shipped_profile_has_golden_files() -> None:
    assert {path.relative_to(GOLDEN).parts[0] for path in FILES} == set(clusters())


def test_bash_parses_every_script() -> None:
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.slow
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run([tool("shellcheck"), "--shell=bash", *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_nothing() -> None:
    files = [str(path) for path in FILES if path.name == "Dockerfile"]
    done = subprocess.run([tool("hadolint"), *files], capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout


def _openapi() -> dict[str, Any]:
    path = Path(os.environ.get("RUNPOD_OPENAPI", ROOT.parent / "shared" / "facts" / "runpod_openapi_v2.json"))
    if not path.is_file():
        pytest.skip("RunPod's OpenAPI document is not here; name it in RUNPOD_OPENAPI (/v2/openapi.json)")
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.name.startswith("create-")], ids=lambda p: str(p.relative_to(GOLDEN))
)
def test_runpod_requests_are_valid_by_runpods_own_document(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = "CreateClusterRequest" if path.name == "create-cluster.json" else "CreatePodRequest"
    document = _openapi()
    checker = jsonschema.Draft202012Validator({**document, "$ref": f"#/components/schemas/{schema}"})
    body = json.loads(path.read_text())
    assert list(checker.iter_errors(body)) == []
    assert not checker.is_valid({**body, "gpuTypeIds": ["x"]}), "the check itself must see an unknown field"
    assert ("gpu" in body) != ("cpu" in body) or schema == "CreateClusterRequest"


def test_no_script_shows_its_commands_or_falls_back_to_localhost() -> None:
    for path in FILES:
        text = path.read_text()
        assert "set -x" not in text and "set -ex" not in text, path
        assert ":=localhost" not in text and ":-localhost" not in text, path


def test_notes_tell_what_is_left_to_do_and_local_ones_nothing() -> None:
    told = notes(target(clusters()["runpod-a6000"], "command"))
    assert any(
        "runpod.volume_id is still CHANGE-ME: put your network volume's id into" in one for one in told
    )
    assert notes(target(clusters()["local"], "task")) == ()
