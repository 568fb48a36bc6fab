"""JSON Schemas that an editor uses to complete and check the files."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from pydantic import BaseModel

from launcher.spec import cluster, job, recipe

MODELS: dict[str, type[BaseModel]] = {"job": job.Job, "cluster": cluster.Cluster}


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `job` or `cluster`. Raises KeyError for another name."""
    schema = MODELS[name].model_json_schema(by_alias=True)
    models = {model.__name__: model for module in (job, cluster, recipe) for model in _models(module)}
    models |= {mark.name: mark.section_class for mark in cluster.SECTIONS.values()}
    models["RecipeChoice"] = recipe.Recipe  # has the same fields, with descriptions
    for title, definition in {**schema.get("$defs", {}), MODELS[name].__name__: schema}.items():
        if title in models:
            for field, text in descriptions(models[title]).items():
                definition["properties"][field]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _models(module: Any) -> list[type[BaseModel]]:
    return [
        value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, BaseModel)
    ]


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the string below each field of a model, by the field's name in a file.

    pydantic's `use_attribute_docstrings` does the same, but adds 60 ms to every start of launcher.
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        text = below.value if isinstance(below, ast.Expr) else None
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            info = model.model_fields.get(field.target.id)  # None for a class variable
            if info is not None:
                texts[info.alias or field.target.id] = " ".join(text.value.split())
    return texts
