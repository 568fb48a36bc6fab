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
            valid = document["openapi"].startswith("3.1") and "/v2/pods" in document["paths"]
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
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
        body_spec = self._operation(method, path).get("requestBody")
        return self._check(body_spec["content"]["application/json"]["schema"], body) if body_spec else []

    def wrong_query(self, method: str, path: str, query: dict[str, str]) -> list[str]:
        """Return what is wrong with query parameters."""
        parameters = [
            self._resolve(parameter) for parameter in self._operation(method, path).get("parameters", [])
        ]
        schemas = {
            parameter["name"]: parameter["schema"] for parameter in parameters if parameter["in"] == "query"
        }
        problems = [f"query parameter {name} is not known" for name in query if name not in schemas]
        for name in query.keys() & schemas.keys():
            problems += [
                f"{name}: {text}" for text in self._check(schemas[name], _typed(query[name], schemas[name]))
            ]
        return problems

    def wrong_answer(self, method: str, path: str, status: int, body: object) -> list[str]:
        """Return what is wrong with an answer."""
        answers = self._operation(method, path)["responses"]
        answer = self._resolve(answers.get(str(status)) or answers["default"])
        content = answer.get("content", {})
        media_type = content.get("application/json") or content.get("application/problem+json")
        if media_type is None:
            return [] if body is None else [f"{status} has no body in the document"]
        return self._check(media_type["schema"], body)

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        matches = [operations for pattern, operations in self._paths if pattern.fullmatch(path)]
        # A fixed path comes before one with a parameter, because the document lists them in this order.
        operation: dict[str, Any] = next(
            (operations[method.lower()] for operations in matches if method.lower() in operations), {}
        )
        return operation

    def _resolve(self, node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            target = self._document
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            node = target
        return node

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
    type_ = schema.get("type")
    if type_ == "array":
        return text.split(",")
    if type_ == "integer" and re.fullmatch(r"-?\d+", text):
        return int(text)
    if type_ == "boolean" and text in ("true", "false"):
        return text == "true"
    return text
