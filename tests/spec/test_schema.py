"""The generated schemas accept what launcher accepts."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from launcher.spec.load import load_cluster, load_job
from launcher.spec.schema import json_schema

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted((ROOT / "clusters").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_profile_loads_and_fits_the_schema(file):
    assert load_cluster(file).name == file.stem
    jsonschema.validate(YAML(typ="safe").load(file.read_text()), json_schema("cluster"))


@pytest.mark.parametrize(
    "file",
    [ROOT / "templates/job/job.yaml", *sorted((ROOT / "examples").glob("*.yaml"))],
    ids=lambda file: file.stem,
)
def test_the_starter_and_every_example_load_and_fit_the_schema(file):
    load_job(file)
    jsonschema.validate(YAML(typ="safe").load(file.read_text()), json_schema("job"))


def test_the_schema_refuses_an_unknown_field():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "x", "batch": {"globl": 1}}, json_schema("job"))


def test_the_schema_explains_each_field_as_the_source_does():
    schema = json_schema("job")
    assert schema["$defs"]["Resources"]["properties"]["time"]["description"].startswith("Wall-clock limit")
    assert schema["$defs"]["Batch"]["properties"]["global"]["description"].startswith(
        "Samples per optimizer step"
    )
    assert "without a shell" in schema["properties"]["command"]["description"]


def test_the_schema_takes_a_count_as_a_user_writes_it():
    job = {"name": "x", "command": "python x.py", "batch": {"global": 1}}
    jsonschema.validate({**job, "plan": {"params": 8.5e9}}, json_schema("job"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "plan": {"params": 8.55}}, json_schema("job"))
