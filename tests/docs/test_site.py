"""The documentation site builds, its links lead somewhere, and its reference is that of the models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from launcher.spec.value import Value
from tests.docs.field_examples import EXAMPLES
from tests.docs.update_reference import FOLDER, PAGES, models_in, page

ROOT = Path(__file__).parents[2]
MODELS = [model for root in PAGES.values() for model in (root, *(one for _, one in models_in(root)))]


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_the_site_builds_with_search_and_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000
    assert (tmp_path / "site/reference/job/index.html").exists()


@pytest.mark.parametrize(
    "link", [pytest.param("no-such-page.md", marks=pytest.mark.slow), "jobs.md#no-such-section"]
)
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with open(tmp_path / "docs/glossary.md", "a") as glossary:
        glossary.write(f"\n[broken]({link})\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and link.partition("#")[2] in done.stderr and "no-such" in done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_current(name: str) -> None:
    assert (FOLDER / f"{name}.md").read_text() == page(name), "make docs"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_has_a_description_and_an_example_that_is_valid(model: type[Value]) -> None:
    from launcher.spec.schema import descriptions

    hints = typing.get_type_hints(model, include_extras=True)
    names = [info.alias or name for name, info in model.model_fields.items()]
    assert list(descriptions(model)) == names and list(EXAMPLES[model.__name__]) == names
    for name, info in model.model_fields.items():
        example = EXAMPLES[model.__name__][info.alias or name]
        value = YAML(typ="safe").load(f"field: {example}")["field"]
        TypeAdapter(hints[name]).validate_python(value)
