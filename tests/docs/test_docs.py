"""The commands in the documentation run, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.lab import Lab

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SHIPPED = ("docs", "launcher", "templates", "clusters", "containers", "examples", ".github")
ON_A_CLUSTER = {"slurm", "remote-login", "runpod", "runpod-sandbox", "ssh-hosts"}
"Pages whose commands tests/slurm, tests/sandbox, tests/schedulers/runpod and tests/schedulers/ssh run."


def commands(page: Path) -> list[str]:
    """Lines that begin with `$ launcher` in ```console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), flags=re.S)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ launcher ")]


def files(page: Path) -> dict[str, str]:
    """Those the page shows: a name in backquotes and a colon, then a block."""
    shown = re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)```", page.read_text(), flags=re.S | re.M)
    return dict(shown)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem in ("index", "README") else pytest.mark.slow)
        for page in PAGES
        if commands(page) and page.stem not in ON_A_CLUSTER
    ],
    ids=lambda page: page.stem,
)
def test_every_command_of_the_page_runs(page: Path, lab: Lab) -> None:
    """`lab` ends the runs that a page has submitted."""
    for name, content in files(page).items():
        (lab.folder / name).write_text(content)
    if not any("job init" in line for line in commands(page)):
        lab.cli("job", "init")
    for line in commands(page):
        done = lab.cli(*shlex.split(line)[1:], timeout=240)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_every_relative_link_leads_somewhere() -> None:
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_nothing_that_is_shipped_installs_launcher_by_name_from_an_index() -> None:
    """There the name is a stranger's package."""
    found = [file for folder in SHIPPED for file in (ROOT / folder).rglob("*") if file.is_file()]
    texts = [
        *found,
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml")),
    ]
    assert len(texts) > 300
    wrong = re.compile(rb"""pip install (-\S+ )*["'`]?launcher(?![-\w/.])|launcher\[[a-z]+[],]""")
    assert [file for file in texts if file.suffix != ".pyc" and wrong.search(file.read_bytes())] == []
    for bad in (
        b"pip install launcher",
        b"pip install -U 'launcher[train]'",
        b"has launcher[runpod,sandbox]",
    ):
        assert wrong.search(bad)
    for good in (b"pip install /opt/launcher/gpu_launcher-*.whl", b"pip install -e ."):
        assert not wrong.search(good)


def test_the_table_of_exit_codes_is_the_one_in_the_code() -> None:
    from launcher.spec.verdict import EXIT_CODES

    table = dict(
        re.findall(r"^\| (\d+) \| ([a-z-]+) \|", (ROOT / "docs/exit-codes.md").read_text(), flags=re.M)
    )
    assert {name: int(code) for code, name in table.items()} == EXIT_CODES


def test_every_placeholder_is_documented() -> None:
    from launcher.spec.command import PLACEHOLDERS

    page = (ROOT / "docs/jobs.md").read_text()
    assert all(f"{{{name}}}" in page for name in PLACEHOLDERS)


def test_every_test_that_a_page_names_is_there() -> None:
    named = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
    pages = (ROOT / "docs").rglob("*.md")
    found = [(page, *match) for page in pages for match in named.findall(page.read_text())]
    assert len(found) > 20
    for page, file, name in found:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{page.name}: {file}::{name}"
