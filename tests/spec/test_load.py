"""What a user reads when a file is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.spec.errors import SpecError
from launcher.spec.load import load_cluster, load_job

GOOD = """\
name: demo
task: pkg.mod:Task
batch: {global: 8}
steps: 10
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "job.yaml") -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write


def problems(call) -> list[str]:
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value).splitlines()


def test_a_good_file_loads_with_its_defaults(write):
    job = load_job(write(GOOD))
    assert (job.batch.global_, job.steps, job.recipe.precision, job.retries.lower) == (8, 10, None, 8)


def test_an_unknown_field_is_named_with_its_line_and_the_nearest_known_one(write):
    text = GOOD.replace("{global: 8}", "\n  globl: 8")
    assert "job.yaml:4: batch.globl: unknown field; did you mean 'global'?" in problems(
        lambda: load_job(write(text))
    )


def test_every_error_is_reported_at_once_in_the_order_of_the_file(write):
    text = """\
name: demo
steps: ten
batch:
  globl: 8
resources: {gpus: 2}
recipe:
  precision: bf17
retries:
  lower: -1
secrets: [A, {name: B, enf: C}]
"""
    found = problems(lambda: load_job(write(text)))
    assert [line.split(": ")[1] for line in found] == [
        "give `task:` (built-in entrypoint) or `command:` (any script)",
        "steps",
        "batch.global",
        "batch.globl",
        "resources.gpus",
        "recipe.precision",
        "retries.lower",
        "secrets.1.enf",
    ]
    assert "job.yaml:7: recipe.precision: 'bf17' is not known; did you mean 'bf16'?" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [unclosed", "job.yaml:1"),
        ("a: 1\na: 2\n", 'job.yaml:2: found duplicate key "a"'),
        ("- a\n- b\n", "job.yaml: must be a mapping of fields, `name: value`"),
        ("", "job.yaml: must be a mapping of fields, `name: value`"),
        ("\tname: x\n", "job.yaml:1: "),
    ],
)
def test_text_that_is_no_yaml_mapping_gets_one_message_with_its_line(write, text, message):
    assert message in "\n".join(problems(lambda: load_job(write(text))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("command: python x.py", "give either `task:` or `command:`, not both"),
        ("epochs: 2", "give either `steps:` or `epochs:`, not both"),
        ("env: {A: x}\nsecrets: [A]", "env.A: is in `env:` and in `secrets:`"),
        ("env: {LAUNCHER_X: y}", "launcher's own"),
        ('env: {A: "x\\0y"}', "NUL byte"),
        ("env: {TRAIN_MEMORY_BUDGET: 0}", "job.yaml:5: env.TRAIN_MEMORY_BUDGET: '0' is too little memory"),
        ("env: {TRAIN_MEMORY_BUDGET: abc}", "env.TRAIN_MEMORY_BUDGET: 'abc' is not a size"),
        ("env: {TRAIN_MEMORY_FAIL: blub}", "env.TRAIN_MEMORY_FAIL: 'blub' is not a key"),
        ("resources: {time: soon}", "'soon' is not a duration; write for example 90m"),
        ("resources: {memory_per_node: 64Gi}", "'64Gi' is not a size; write for example 48GiB"),
        ("resources: {time: 0}", "must be greater than 0"),
        ("resources: {memory_per_node: 64}", "64 bytes are too few; write the unit, for example 64GiB"),
        ("resources: {memory_per_node: -5}", "must be greater than 0"),
        ("tags: gpu", "tags: must be a list, not 'gpu'"),
        ("model: 8", "model: must be a mapping of fields, not 8"),
        (
            "plan: {model: llama}",
            "'llama' does not have the form of this field: Model that a `command:` trains",
        ),
        ("recipe: full", "write `recipe: auto` or the fields to fix"),
    ],
)
def test_each_mistake_says_what_to_do(write, change, message):
    assert message in "\n".join(problems(lambda: load_job(write(GOOD + change + "\n"))))


def test_set_overrides_any_field_and_its_errors_name_the_option(write):
    job = load_job(write(GOOD), ["batch.global=16", "recipe.precision=bf16", "env.A=b c", "tags=[x, y]"])
    assert (job.batch.global_, job.recipe.precision, job.env, job.tags) == (
        16,
        "bf16",
        {"A": "b c"},
        ("x", "y"),
    )
    found = problems(lambda: load_job(write(GOOD), ["batch.global=0", "recipe.optimiser=adamw"]))
    assert found[0].startswith("--set batch.global=0: batch.global: must be greater than 0")
    assert "--set recipe.optimiser=adamw: recipe.optimiser: unknown field; did you mean 'optimizer'?" in found


def test_an_override_changes_a_field_of_the_one_before(write):
    whole = "recipe={precision: bf16, sharding: fsdp}"
    fields = load_job(write(GOOD), [whole, "recipe.sharding=ddp", "recipe.tensor=2"]).recipe
    assert (fields.precision, fields.sharding, fields.tensor) == ("bf16", "ddp", 2)
    assert load_job(write(GOOD), ["recipe.tensor=2", whole]).recipe.tensor is None
    found = problems(lambda: load_job(write(GOOD), ["recipe={sharding: [}", "recipe.tensor=2"]))
    assert found[0].startswith("--set recipe={sharding: [}")


def test_a_value_set_too_deep_is_blamed_on_the_option(write):
    found = problems(lambda: load_job(write(GOOD), ["env.A.B=3"]))
    assert found[0].startswith("--set env.A.B=3: env.A:")


def test_set_without_a_value_says_how_to_write_it(write):
    assert problems(lambda: load_job(write(GOOD), ["batch"])) == [
        "--set batch: write a field and its value, such as train.lr=1e-4"
    ]


def test_set_takes_text_with_equals_signs_and_braces(write):
    job = load_job(write(GOOD), ["env.OPTS=a=b,c={d}"])
    assert job.env["OPTS"] == "a=b,c={d}"


def test_a_wrong_profile_names_its_own_file(write):
    text = "name: x\nscheduler: slurm\nslurm:\n  partitoin: gpu\n"
    assert problems(lambda: load_cluster(write(text, "c.yaml"))) == [
        "c.yaml:4: slurm.partitoin: unknown field; did you mean 'partition'?"
    ]


def test_a_wrong_item_of_a_list_is_one_problem_that_says_what_is_expected(write):
    rented = "name: x\nscheduler: runpod\nrunpod:\n  cpu_id: a\n  vcpu: 2\n  clouds: [SECUR]\n"
    assert problems(lambda: load_cluster(write(rented, "c.yaml"))) == [
        "c.yaml:6: runpod.clouds.0: 'SECUR' is not known; did you mean 'SECURE'?"
    ]
    hosts = "name: x\nscheduler: ssh\nssh:\n  hosts: ['ssh://host:22']\n"
    assert problems(lambda: load_cluster(write(hosts, "c.yaml"))) == [
        "c.yaml:4: ssh.hosts.0: 'ssh://host:22' is not a host: write user@host, or a name of your ssh config "
        "(which has the port, too)"
    ]
    none = "name: x\nscheduler: ssh\nssh: {hosts: []}\n"
    (said,) = problems(lambda: load_cluster(write(none, "c.yaml")))
    assert said.startswith("c.yaml:3: ssh.hosts: ") and "at least 1 item" in said


def test_a_section_of_another_scheduler_is_refused(write):
    text = "name: x\nscheduler: local\nslurm: {partition: gpu}\n"
    assert (
        "c.yaml:3: slurm: is given but scheduler is local"
        in problems(lambda: load_cluster(write(text, "c.yaml")))[0]
    )


COMMAND = """\
name: demo
command: python train.py
batch: {global: 8}
"""


def test_what_a_plan_is_told_of_a_command(write):
    told = "plan: {model: hf:config.json, length: 4096}"
    assert load_job(write(COMMAND + told)).plan.length == 4096
    assert load_job(write(COMMAND + "plan: {params: 8.5e9}")).plan.params == 8_500_000_000
    assert load_job(write(COMMAND), ["plan.params=8.5e9"]).plan.params == 8_500_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (COMMAND + "plan:\n  model: hf:a", "job.yaml:5: plan.model: needs `length:`"),
        (COMMAND + "plan:\n  length: 8", "job.yaml:5: plan.length: belongs to `model:`"),
        (COMMAND + "plan:\n  params: 8.55", "job.yaml:5: plan.params: must be a whole number, not 8.55"),
        (COMMAND + "plan: {model: hf:a, length: 8,\n  params: 8}", "job.yaml:5: plan.params: give either"),
        (COMMAND + "plan:\n  vary: {a: [2, 1]}", "job.yaml:5: plan.vary: belongs to `task:`"),
        (GOOD + "plan:\n  params: 8", "job.yaml:6: plan.params: belongs to `command:`"),
        (GOOD + "plan:\n  vary:\n    a: [1, 2]", "job.yaml:7: plan.vary.a: must be in falling order"),
        (GOOD + "plan: {vary: {a: [2]}}", "plan.vary.a: needs the job's own value and a lower one"),
        (GOOD + "args: {a: 3}\nplan: {vary: {a: [2, 1]}}", "plan.vary.a: begins with 2, but args has 3"),
    ],
)
def test_a_plan_section_that_does_not_go_with_the_job_is_refused(write, text, message):
    assert message in "\n".join(problems(lambda: load_job(write(text))))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("recipe.precision=fp16", "did you mean 'fp16-mixed'?"),
        ("recipe.precision=fp8", "one of fp32, bf16, bf16-mixed, fp16-mixed, float8"),
        ("recipe.offload=nvme", "did you mean 'nvme-optimizer'?"),
        ("recipe.tensor_parallel=8", "did you mean 'tensor'?"),
        ("recipe.zero_stage=3", "known here: precision, "),
    ],
)
def test_a_name_of_other_tools_leads_to_what_was_meant_or_to_all_names(write, given: str, hint: str) -> None:
    (found,) = problems(lambda: load_job(write(GOOD), [given]))
    assert hint in found
