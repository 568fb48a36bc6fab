"""JSON Schemas, so that an editor completes and checks the files."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from launcher.spec.cluster import Cluster
from launcher.spec.job import Job

MODELS: dict[str, type[BaseModel]] = {"job": Job, "cluster": Cluster}


def json_schema(name: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `job` or `cluster`. Raises KeyError for another name."""
    schema = MODELS[name].model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
