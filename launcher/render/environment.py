"""A strict Jinja environment.

Every `{{ value }}` is quoted for its file, and errors name template and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from launcher.render import quote, shipped
from launcher.render.context import check_shell_template
from launcher.render.quote import RenderError
from launcher.spec.events import KINDS
from launcher.spec.similar import did_you_mean
from launcher.spec.verdict import EXIT_CODES, EXIT_SICK

_QUOTERS: dict[str, Callable[[object], quote.Written]] = {
    "sh": quote.sh,
    "json": quote.json_value,
    "dockerfile": quote.dockerfile,
    "def": quote.apptainer,
}
_KINDS = {".sh": "sh", ".sbatch": "sh", ".json": "json", ".def": "def"}
# Jinja's filters that templates may use. None of them marks text as safe.
_ALLOWED = ("default", "first", "join", "last", "length", "lower", "replace", "sort", "trim", "upper")


def kind_of(template: str) -> str:
    """The language of a template's output, by the name before `.j2`."""
    name = template.removesuffix(".j2")
    return "dockerfile" if name.endswith("Dockerfile") else _KINDS.get(Path(name).suffix, "sh")


class _Loader(jinja2.BaseLoader):
    """Loads templates from the project's `templates/` first, then the shipped ones."""

    def __init__(self, folders: tuple[Path, ...], kind: str) -> None:
        self.folders, self.kind = folders, kind

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        loaded = self._read(template)
        if loaded is None:
            raise jinja2.TemplateNotFound(template)
        folder, source = loaded
        # An included template becomes part of the outer file, and its values are quoted for that file.
        # Shipped scripts are checked by the tests, because checking takes a third of the rendering time.
        tested = folder == shipped.templates_dir() and kind_of(template) == "sh"
        if self.kind == "sh" and not tested:
            try:
                check_shell_template(environment, source, template)
            except jinja2.TemplateSyntaxError as error:
                error.source = source
                raise
        return source, template, lambda: self._read(template) == loaded

    def _read(self, template: str) -> tuple[Path, str] | None:
        for folder in self.folders:
            path = folder.joinpath(*jinja2.loaders.split_template_path(template))
            if path.is_file():
                return folder, path.read_text(encoding="utf-8")
        return None


def _strict(quoter: Callable[[object], quote.Written]) -> Callable[[object], quote.Written]:
    """Wrap a quoter so that an undefined value raises Jinja's own error, which names it."""

    def checked(value: object) -> quote.Written:
        if isinstance(value, jinja2.Undefined):
            str(value)
        return quoter(value)

    return checked


@lru_cache(maxsize=16)
def _environment(folders: tuple[Path, ...], kind: str) -> jinja2.Environment:
    # Templates may come from the project. They can compute with values but cannot reach Python.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        loader=_Loader(folders, kind),
        undefined=jinja2.StrictUndefined,
        finalize=_strict(_QUOTERS[kind]),
        # With a trailing blank, because bash's ${#list[@]} is not a comment.
        comment_start_string="{# ",
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own = {
        "sh": quote.sh,
        "name": quote.name,
        "number": quote.number,
        "comment": quote.comment,
        "sbatch": quote.sbatch,
    }
    environment.filters = {name: environment.filters[name] for name in _ALLOWED}
    environment.filters |= {name: _strict(function) for name, function in own.items()}
    environment.globals.clear()
    environment.globals["events"] = {kind: quote.Written(kind) for kind in KINDS}
    environment.globals["exit_sick"] = EXIT_SICK
    environment.globals["exit_codes"] = {name: quote.Written(code) for name, code in EXIT_CODES.items()}
    return environment


def folders(project_dir: Path | None) -> tuple[Path, ...]:
    """The folders in which templates are looked up, in order."""
    shipped_folder = shipped.templates_dir()
    own = shipped.project_templates(project_dir) if project_dir is not None else None
    return (shipped_folder,) if own is None else (own, shipped_folder)


def render_template(template: str, values: Mapping[str, Any], project_dir: Path | None = None) -> str:
    """Render a template such as `slurm/job.sbatch.j2`.

    Raises RenderError, e.g. `templates/slurm/job.sbatch.j2:12: 'jobb' is undefined; did you mean 'job'?`.
    """
    environment = _environment(folders(project_dir), kind_of(template))
    try:
        return environment.get_template(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        place = f"templates/{error.filename or error.name or template}:{error.lineno}"
        unknown = _undefined_at(environment, error, values)
        if unknown is not None:
            # If the name itself is wrong, that matters more than how it is quoted.
            raise RenderError(f"{place}: {_explain(f'{unknown!r} is undefined', values)}") from error
        raise RenderError(f"{place}: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        if error.name in shipped.IN_LIBRARY:
            raise RenderError(
                f"templates/{template} is a copy from an earlier version: it includes {error.name}, which "
                f"is in {shipped.LIBRARY} now. Eject {template} again and repeat your changes in it"
            ) from error
        raise RenderError(f"templates/{template}: there is no template {error.name!r}") from error
    except jinja2.UndefinedError as error:
        raise RenderError(f"{_place(error, template)}: {_explain(str(error), values)}") from error
    except (ValueError, TypeError, jinja2.TemplateError) as error:
        raise RenderError(f"{_place(error, template)}: {error}") from error


def _place(error: BaseException, template: str) -> str:
    """`templates/<name>:<line>` of the innermost template line that the error passed through."""
    place, traceback = f"templates/{template}", error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if filename.endswith(".j2"):
            place = f"templates/{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _undefined_at(
    environment: jinja2.Environment, error: jinja2.TemplateSyntaxError, values: Mapping[str, Any]
) -> str | None:
    """The first name on the error's line that neither `values` nor the template defines."""
    from jinja2 import meta, nodes

    if error.source is None:
        return None
    try:
        tree = environment.parse(error.source)
        unknown = meta.find_undeclared_variables(tree) - set(values)
    except jinja2.TemplateSyntaxError:
        return None
    # `x | default(...)` and `x is defined` use an undefined name on purpose.
    guards = (
        item for item in tree.find_all((nodes.Filter, nodes.Test)) if item.name in ("default", "defined")
    )
    unknown -= {item.node.name for item in guards if isinstance(item.node, nodes.Name)}
    names = (name for name in tree.find_all(nodes.Name) if name.lineno == error.lineno)
    return next((name.name for name in names if name.name in unknown), None)


def _explain(message: str, values: Mapping[str, Any]) -> str:
    unknown = message.split("'")[1] if message.count("'") >= 2 else ""
    hint = did_you_mean(unknown, values)
    return message + (hint and f"; {hint}")
