"""Text arrives as it was written, numbers as numbers, by the type of each field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from launcher.spec.cluster import Cluster
from launcher.spec.errors import SpecError
from launcher.spec.field_types import _members
from launcher.spec.job import Job
from launcher.spec.load import from_record, load_cluster, load_job, read, validate, with_overrides
from launcher.spec.scheduler_section import annotation_of
from launcher.spec.yaml import Document, parse

JOB: dict[str, Any] = {"name": "j", "command": ["x"], "batch": {"global": 8}}
BASE = "name: j\nbatch: {global: 8}\n"
# What YAML reads as a number, a date, a truth value or nothing.
WRITTEN = [
    "3.10",
    "007",
    "1e-4",
    "yes",
    "Off",
    "true",
    "False",
    "0x10",
    "0o17",
    "0b1",
    "1_000",
    "+1",
    "-0",
    ".5",
    "1.",
]
WRITTEN += [
    "2026-01-02",
    "2026-13-45",
    "2026-11-21T08:54:01Z",
    "12:30:00",
    "~",
    "null",
    "NULL",
    ".inf",
    "-.INF",
    ".nan",
]
WRITTEN += [
    "7e10531",
    "1e999",
    "9" * 400,
    "9" * 5000,
    "=",
    "-",
    "1.2.3",
    "٣",
    "0x",
    "1__0",
    "1e5",
    "y",
    "n",
    "<<",
]


def job(tmp_path: Path, text: str, *sets: str) -> Job:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    return load_job(file, sets)


@pytest.mark.parametrize("text", WRITTEN)
def test_text_fields_keep_what_is_written(tmp_path: Path, text: str) -> None:
    value = "'-'" if text == "-" else text
    more = f"command: [x, {value}, 'y']\nenv: {{A: {value}}}\ntags: [{value}]\n"
    more += f"secrets: [{{name: B, file: {value}}}]\n"
    made = job(tmp_path, BASE + more)
    assert made.command == ("x", text, "y") and made.tags == (text,) and made.env == {"A": text}
    assert made.secrets[0].file == (None if text in ("~", "null", "NULL") else text)
    block = f"command:\n- x\n- {value}\nenv:\n  A: {value}\n"
    assert job(tmp_path, BASE + block).env == {"A": text}
    assert job(tmp_path, "command: x\n" + BASE, f"env.A={text}").env == {"A": text}


def test_every_text_field_of_job_and_cluster_takes_a_number_as_text() -> None:
    """By the type of each field: one that is added tomorrow is tried as well."""
    tried = []
    for model in (Job, Cluster):
        for path in _paths(model, lambda members: str in members):
            document = parse(_as_yaml(path, "007"), "f.yaml")
            try:
                validate(model, document)
            except SpecError as error:
                wrong = [one.message for one in error.problems if one.field == ".".join(path)]
                assert not any("must be text" in message for message in wrong), (path, wrong)
                assert not any(" 7" in message for message in wrong), (path, wrong)
            tried.append(".".join(path))
    assert {
        "name",
        "description",
        "node.gpu.type",
        "slurm.gres_type",
        "runpod.gpu_id",
        "train.nvme_dir",
    } <= set(tried)


def test_no_numeric_field_of_job_and_cluster_takes_a_boolean() -> None:
    """pydantic would take `true` as 1."""
    tried = []
    for model in (Job, Cluster):
        for path in _paths(model, lambda members: {int, float} & {*members} and not {str, bool} & {*members}):
            name = ".".join(path)
            prefix = "cluster." if model is Cluster else ""
            for document in (
                parse(_as_yaml(path, "true"), "f.yaml"),
                with_overrides(parse("{}", "f.yaml"), [f"{prefix}{name}=false"], of_cluster=model is Cluster),
                Document(_nested(path, True), "dict"),
            ):
                with pytest.raises(SpecError) as error:
                    validate(model, document)
                wrong = [one.message for one in error.value.problems if one.field == name]
                assert any(said.startswith("must be a ") for said in wrong), (name, wrong)
            tried.append(name)
    assert {"recipe.activation_budget", "steps", "train.lr", "node.cpus", "usd_per_gpu_hour"} <= set(tried)


def _paths(
    model: type[BaseModel], wanted: Callable[[list[Any]], Any], above: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    """Return the paths of the fields whose types are wanted."""
    found = []
    for name, info in model.model_fields.items():
        path = (*above, info.alias or name)
        members = list(_members(annotation_of(info)))
        if wanted(members):
            found.append(path)
        for member in members:
            if isinstance(member, type) and issubclass(member, BaseModel):
                found += _paths(member, wanted, path)
    return found


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _as_yaml(path: tuple[str, ...], text: str) -> str:
    return "".join(f"{{{key}: " for key in path) + text + "}" * len(path)


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    text = "name: 3.10\ntask: m:T\nsteps: 1_000\nbatch: {global: 0x10}\n"
    text += "train: {lr: 1e-4, workers: +2, seed: 007}\n"
    text += "args: {a: 1, b: 1.5, c: true, d: null, e: 2026-01-02, f: [1, {g: 2}], h: '1', i: yes}\n"
    text += "plan: {vary: {a: [1, 0.5]}}\nresources: {memory_per_node: 5e9, time: 3600}\n"
    made = job(tmp_path, text)
    assert (made.name, made.steps, made.batch.global_, made.train.seed) == ("3.10", 1000, 16, 7)
    assert (made.train.lr, made.resources.memory_per_node, made.resources.time) == (1e-4, 5_000_000_000, 3600)
    given = {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": None,
        "e": "2026-01-02",
        "f": [1, {"g": 2}],
        "h": "1",
        "i": "yes",
    }
    assert made.args == given and type(made.args["a"]) is int and made.plan.vary == {"a": (1, 0.5)}


def test_options_of_sbatch_keep_their_text(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "name: c\nscheduler: slurm\nslurm: {extra: {nice: 007, licenses: 1e3, spread-job: true, x: no}}\n"
    )
    cluster = load_cluster(file)
    assert cluster.slurm is not None
    assert cluster.slurm.extra == {"nice": "007", "licenses": "1e3", "spread-job": True, "x": "no"}
    assert from_record(Cluster, cluster.model_dump(mode="json"), "c").slurm == cluster.slurm


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_set_of_a_text_field_takes_any_text_as_it_is(text: str) -> None:
    assert from_record(Job, JOB, "j", [f"env.V={text}"]).env == {"V": text}
    assert from_record(Job, {**JOB, "plan": {}}, "j", [f"workdir=/{text}"]).workdir.startswith("/")


@pytest.mark.parametrize(
    "text",
    ["", " x", "x ", "foo # bar", "a\nb", "a: b", "- x", "{", "[", "'", "&a", "*a", "!x", "%", "@", "`"],
)
def test_set_of_a_text_field_is_no_yaml(tmp_path: Path, text: str) -> None:
    made = job(tmp_path, "command: x\n" + BASE, f"env.V={text}", f"image={text}")
    assert (made.env["V"], made.image) == (text, text)


def test_set_reads_other_fields_as_yaml(tmp_path: Path) -> None:
    sets = ["steps=1_000", "train.lr=1e-4", "tags=[3.10, 007]", "requeue=false", "recipe={precision: fp32}"]
    made = job(
        tmp_path, "command: x\n" + BASE, *sets, "command=python x.py # --lr 1e-4", "train.memory_alert=90%"
    )
    assert (made.steps, made.train.lr, made.tags, made.requeue) == (1000, 1e-4, ("3.10", "007"), False)
    assert made.recipe.precision == "fp32" and made.command == ("python", "x.py", "#", "--lr", "1e-4")
    made = job(
        tmp_path,
        "task: m:T\nsteps: 1\n" + BASE,
        *[f"args.{one}" for one in ("a=1", "b=a # b", "c= 1.5", "d=[x, 007]")],
    )
    assert made.args == {"a": 1, "b": "a # b", "c": 1.5, "d": ["x", 7]}
    made = job(
        tmp_path,
        "task: m:T\nsteps: 1\n" + BASE,
        "args.a='1'",
        "args.b=a: b",
        "args.c=",
        "image=null",
        "train.eval_every=null",
    )
    assert (
        made.args == {"a": "1", "b": "a: b", "c": ""} and made.image is None and made.train.eval_every is None
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: {A: }", "f.yaml:4: env.A: is empty; write '' for an empty text"),
        ("train: {lr: 1e999}", "f.yaml:4: train.lr: 1e999 is too large for a number"),
        ("train: {lr: .nan}", "f.yaml:4: train.lr: .nan is not a number"),
        ("train: {lr: -.inf}", "f.yaml:4: train.lr: -.inf is too large for a number"),
        ("train: {lr: 'inf'}", "f.yaml:4: train.lr: must be a finite number"),
        ("train: {lr: !!float abc}", "f.yaml:4: train.lr: "),
        ("steps: 1e30", "f.yaml:4: steps: 1e30 is too large for a number"),
        (f"steps: {'9' * 400}", f"f.yaml:4: steps: {'9' * 57}... is too large for a number"),
        (f"steps: {'9' * 5000}", "is too large for a number"),
        (f"resources: {{time: {'9' * 5000}h}}", "is too large"),
        (f"resources: {{time: '{'9' * 5000}:00:00'}}", "is too large"),
        (f"resources: {{memory_per_node: {'9' * 400}GB}}", "is too large"),
        ("train: {collective_timeout: 99999999999h}", "must be less than"),
    ],
)
def test_a_number_of_no_use_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        validate(Job, parse(f"command: x\n{BASE}{text}\n", "f.yaml"))
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_numbers_that_are_not_finite_are_refused_in_args_and_profiles() -> None:
    task = f"task: m:T\nsteps: 1\n{BASE}"
    for model, text in (
        (Job, f"{task}args: {{a: [1, {{b: 1e999}}]}}"),
        (Job, f"{task}plan: {{vary: {{a: [.inf, 1]}}}}"),
        (Cluster, "name: c\nscheduler: local\nusd_per_gpu_hour: .nan"),
        (Cluster, f"name: c\nscheduler: local\nnetwork: {{inter_node: {'9' * 400}Gb/s}}"),
    ):
        with pytest.raises(SpecError) as error:
            validate(model, parse(text, "f.yaml"))
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(SpecError, match="finite"):
        from_record(Job, {**JOB, "train": {"lr": float("inf")}}, "run.json")


def test_reading_twice_with_overrides_changes_no_first_reading(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: x\n" + BASE + "env: {A: 3.10}\n")
    assert load_job(file, ["env.A=2"]).env == {"A": "2"}
    assert load_job(file).env == {"A": "3.10"}
    assert isinstance(read(file), Document)


@pytest.mark.parametrize("text", ["true", "5", "1.50", "no"])
def test_a_command_that_looks_like_a_value_is_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.yaml"
    for command, sets in ((text, []), ("python x.py", [f"command={text}"])):
        file.write_text(f"name: a\ncommand: {command}\nbatch: {{global: 4}}\nsteps: 3\n")
        assert load_job(file, sets).command == (text,)
