"""Check requests and answers against RunPod's own OpenAPI document, if it is given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator


class Contract:
    """RunPod's OpenAPI document, which requests and answers must match."""

    def __init__(self, file: Path) -> None:
        """Load the document. Raises ValueError if it is not RunPod's."""
        try:
            document = json.loads(file.read_text())
            known = document["openapi"].startswith("3.1") and "/v2/pods" in document["paths"]
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(
                f"{file}: not RunPod's OpenAPI 3.1 document of /v2 (https://api.runpod.io/v2/openapi.json)"
            )
        self._document = document
        self._paths = [
            (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), operations)
            for path, operations in document["paths"].items()
        ]
        self._checkers: dict[str, Draft202012Validator] = {}

    def wrong_body(self, method: str, path: str, body: object) -> list[str]:
        """Return what is wrong with a request body."""
        found = self._operation(method, path).get("requestBody")
        return self._check(found["content"]["application/json"]["schema"], body) if found else []

    def wrong_query(self, method: str, path: str, query: dict[str, str]) -> list[str]:
        """Return what is wrong with query parameters."""
        known = [self._resolve(one) for one in self._operation(method, path).get("parameters", [])]
        schemas = {one["name"]: one["schema"] for one in known if one["in"] == "query"}
        wrong = [f"query parameter {name} is not known" for name in query if name not in schemas]
        for name in query.keys() & schemas.keys():
            wrong += [
                f"{name}: {text}" for text in self._check(schemas[name], _typed(query[name], schemas[name]))
            ]
        return wrong

    def wrong_answer(self, method: str, path: str, status: int, body: object) -> list[str]:
        """Return what is wrong with an answer."""
        answers = self._operation(method, path)["responses"]
        found = self._resolve(answers.get(str(status)) or answers["default"])
        content = found.get("content", {})
        kind = content.get("application/json") or content.get("application/problem+json")
        if kind is None:
            return [] if body is None else [f"{status} has no body in the document"]
        return self._check(kind["schema"], body)

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        fits = [operations for pattern, operations in self._paths if pattern.fullmatch(path)]
        # A fixed path comes before one with a parameter, because the document lists them in this order.
        found: dict[str, Any] = next((one[method.lower()] for one in fits if method.lower() in one), {})
        return found

    def _resolve(self, one: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in one:
            found = self._document
            for part in one["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            one = found
        return one

    def _check(self, schema: dict[str, Any], value: object) -> list[str]:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._checkers:
            self._checkers[key] = Draft202012Validator({**self._document, **schema})
        return [
            f"{'.'.join(map(str, error.absolute_path)) or 'body'}: {error.message[:300]}"
            for error in self._checkers[key].iter_errors(value)
        ]


def _typed(text: str, schema: dict[str, Any]) -> object:
    """Return a query parameter with its type in the JSON Schema."""
    kind = schema.get("type")
    if kind == "array":
        return text.split(",")
    if kind == "integer" and re.fullmatch(r"-?\d+", text):
        return int(text)
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    return text
