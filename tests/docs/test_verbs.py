"""Every verb and option of launcher that the documentation names is one that the CLI has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from launcher.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CLI = typer.main.get_command(app)
FOREIGN = {"--array"}
"Options of other programs that a page names alone."


def verbs(command: Any) -> dict[str, Any]:
    return dict(getattr(command, "commands", {}))


def options(command: Any) -> set[str]:
    named = {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
    return {one for one in named if one.startswith("-")} | {"-h", "--help"}


def every(command: Any) -> Iterator[tuple[str, Any]]:
    for name, one in verbs(command).items():
        yield name, one
        yield from every(one)


ALL = dict(every(CLI))


def code_of(text: str) -> Iterator[str]:
    """Lines of fenced blocks, and what stands in backquotes."""
    for number, part in enumerate(re.split(r"^\s*```.*$", text, flags=re.M)):
        if number % 2:
            yield from part.splitlines()
        else:
            yield from re.findall(r"`([^`\n]+)`", part)


def wrong_in(line: str) -> str | None:
    """What launcher does not know in a command line that starts it."""
    begins = re.match(r"\s*(?:\$ )?(?:\w+=\S* )*(?:\S*/)?launcher (?=[a-z-])(.*)", line)
    if begins is None:
        return None
    text = re.split(r" # | -- |[|>;&]", begins[1])[0]
    try:
        words = shlex.split(text)
    except ValueError:  # a part of a line
        words = text.split()
    here, path = CLI, "launcher"
    while words and verbs(here) and not words[0].startswith("-"):
        if words[0] not in verbs(here):
            if words[0].isupper():  # VERB
                return None
            return f"{path} {words[0]}"
        here, path = verbs(here)[words[0]], f"{path} {words.pop(0)}"
    for word in words:
        option = word.partition("=")[0]
        if re.fullmatch(r"--?[a-z][\w-]*", option) and option not in options(here):
            return f"{path} {option}"
    return None


def lists_of(text: str) -> Iterator[list[str]]:
    """`a`, `b` and `c`."""
    for found in re.findall(r"`[a-z-]+`(?:(?:, | and | or |, and )`[a-z-]+`)+", text):
        yield re.findall(r"`([a-z-]+)`", found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_verbs_and_options_that_there_are(page: Path) -> None:
    text = page.read_text()
    assert [wrong for line in code_of(text) if (wrong := wrong_in(line))] == []
    for names in lists_of(text):
        known = [name for name in names if name in ALL]
        assert len(known) < 2 or known == names, f"among verbs: {names}"
    there = {option for _, command in every(CLI) for option in options(command)} | FOREIGN
    if "sbatch" not in text and "docker" not in text:
        named = {one.split()[0].partition("=")[0] for one in code_of(text) if re.match("--[a-z]", one)}
        assert named <= there, named - there


def test_the_check_finds_what_is_wrong() -> None:
    for line, wrong in {
        "launcher reprot": "launcher reprot",
        "$ launcher logs -f --colour": "launcher logs --colour",
        "launcher clusters lst": "launcher clusters lst",
        "launcher plan job.yaml --tokens 10e9 -c a": None,
        "launcher run a.yaml | tee --append x": None,
        "FOO=1 launcher submit --set a=-1": None,
        "launcher submit --dryrun": "launcher submit --dryrun",
    }.items():
        assert wrong_in(line) == wrong
    assert list(lists_of("`logs`, `why` and `report` read")) == [["logs", "why", "report"]]
