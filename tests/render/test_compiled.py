"""Compiled templates that are kept: the text is the same with them, without them and with damaged ones."""

from __future__ import annotations

from pathlib import Path

import jinja2.compiler
import pytest

from launcher.render import environment
from launcher.render.compiled import compiled_templates
from launcher.render.environment import render_template
from launcher.render.quote import RenderError

TEMPLATE = "slurm/own.sbatch.j2"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the compiled templates: empty, and not read by earlier environments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "launcher" / "templates"


def render(project: Path, text: str, **values: object) -> str:
    """Render as a new process does."""
    environment._environment.cache_clear()
    path = project / "templates" / TEMPLATE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return render_template(TEMPLATE, values, project)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Names of the templates that were compiled."""
    found: list[str | None] = []
    generate = jinja2.Environment._generate

    def counted(self: jinja2.Environment, source: object, name: str | None, *more: object, **named: object):
        found.append(name)
        return generate(self, source, name, *more, **named)

    monkeypatch.setattr(jinja2.Environment, "_generate", counted)
    return found


def test_a_template_is_compiled_once_until_it_changes(
    tmp_path: Path, kept: Path, compilations: list[str | None]
) -> None:
    assert [render(tmp_path, "echo {{ x }}\n", x=x) for x in ("a b", "c d")] == [
        "echo 'a b'\n",
        "echo 'c d'\n",
    ]
    assert compilations == [TEMPLATE]
    assert render(tmp_path, "echo more {{ x }}\n", x="a b") == "echo more 'a b'\n"
    assert compilations == [TEMPLATE, TEMPLATE]
    assert kept.stat().st_mode & 0o777 == 0o700


def test_an_error_in_a_kept_template_names_its_line(
    tmp_path: Path, kept: Path, compilations: list[str | None]
) -> None:
    text = "one\ntwo {{ x }}\nthree {{ y }}\n"
    render(tmp_path, text, x="1", y="2")
    with pytest.raises(RenderError, match=r"own\.sbatch\.j2:3: 'y' is undefined"):
        render(tmp_path, text, x="1")
    assert compilations == [TEMPLATE]


def test_a_template_that_would_misplace_a_value_is_refused_again(tmp_path: Path, kept: Path) -> None:
    for _ in range(2):
        with pytest.raises(RenderError, match="a value in"):
            render(tmp_path, 'echo "{{ x }}"\n', x="1")


@pytest.mark.parametrize("left", [0, 2, 20, -20], ids=["empty", "no magic", "no pickle", "no end"])
def test_damaged_files_are_compiled_again(tmp_path: Path, kept: Path, left: int) -> None:
    text = "echo {{ x }}\n"
    whole = render(tmp_path, text, x="a b")
    [file] = kept.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:left])
    assert render(tmp_path, text, x="a b") == whole
    assert file.read_bytes() == content


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, kept: Path) -> None:
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    assert compiled_templates("sh") is None
    assert render(tmp_path, "echo {{ x }}\n", x="a b") == "echo 'a b'\n"
    assert not list(kept.iterdir())


def test_a_folder_that_cannot_be_made_costs_nothing(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert compiled_templates("sh") is None
    assert render(tmp_path, "echo {{ x }}\n", x="a b") == "echo 'a b'\n"


def test_each_language_has_its_own(kept: Path) -> None:
    found = {cache.pattern for kind in ("sh", "json") if (cache := compiled_templates(kind)) is not None}
    assert len(found) == 2
