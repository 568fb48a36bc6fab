"""`launcher plan` as a user calls it, on a model of 201 million parameters and on two GPUs of 23.6 GiB."""

from __future__ import annotations

import itertools
import json
import operator
import os
import pty
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launcher.report.run_report import report_of
from launcher.schedulers.rundir import status_of
from launcher.spec.fire_drill import DRILLS
from launcher.spec.quantities import GIB
from tests.lab import Lab

TASK = """
import torch
from torch import nn
from launcher.train import Task

class Stack(Task):
    def __init__(self, width=2048, depth=6):
        self.width, self.depth = width, depth

    def model(self):
        print("hello from the model")
        wide = 4 * self.width
        layers = [
            nn.Sequential(nn.Linear(self.width, wide), nn.GELU(), nn.Linear(wide, self.width))
            for _ in range(self.depth)
        ]
        return nn.Sequential(nn.Embedding(64, self.width), *layers, nn.Linear(self.width, 64))

    def blocks(self, model):
        return list(model)[1:-1]

    def data(self, split):
        return [torch.arange(512)] * 8

    def loss(self, model, batch):
        out = model(batch).flatten(0, 1).float()
        return nn.functional.cross_entropy(out, batch.flatten(), reduction="sum"), batch.numel()


class Asks(Stack):
    def model(self):
        return nn.Linear(2, 1 + int(nn.Linear(1, 1).weight.item() > 2))


class Real(Task):
    def model(self):
        return nn.Linear(8, 8)

    def data(self, split):
        return [torch.zeros(8)] * 8

    def loss(self, model, batch):
        return model(batch).float().square().sum(), batch.numel()
"""
PARAMETERS = 64 * 2048 + 6 * (2 * 4 * 2048**2 + 5 * 2048) + 2048 * 64 + 64
CLUSTER = """
name: {name}
scheduler: slurm
slurm: {{partition: gpu}}
max_nodes: 2
node: {{gpu: {{type: NVIDIA RTX A5000, count: {count}, memory: {memory}}}, cpus: 8, memory: 64GiB}}
usd_per_gpu_hour: {price}
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With what two GPUs need traced already."""
    lab = Lab(tmp_path_factory.mktemp("plan"))
    del lab.environ["COLUMNS"]
    lab.script(TASK, "stack.py")
    job: dict[str, Any] = {"task": "stack:Stack", "steps": 10, "batch": {"global": 16}}
    fixed = {"sharding": "fsdp", "activations": "keep", "grad_sync": "each"}
    lab.job(**job, resources={}, recipe=fixed)
    lab.job("cpu.yaml", **job)
    for name, count, memory, price in (
        ("two", 2, "23.6GiB", 0.27),
        ("one", 1, "23.6GiB", 0.1),
        ("small", 2, "3.9GiB", 0.1),
        ("tiny", 1, "1.6GiB", 0.1),
    ):
        text = CLUSTER.format(name=name, count=count, memory=memory, price=price)
        (lab.folder / f"{name}.yaml").write_text(text)
    return lab


def plan(lab: Lab, *arguments: str, job: str = "job.yaml") -> subprocess.CompletedProcess[str]:
    return lab.cli("plan", job, *arguments)


def told(lab: Lab, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = plan(lab, *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def question(lab: Lab, *arguments: str) -> dict[str, Any]:
    [one] = told(lab, *arguments)["questions"]
    return one


def needs(candidate: dict[str, Any]) -> float:
    return candidate["estimate"]["needed"] * (1 + candidate["estimate"]["band"])


@pytest.mark.slow
def test_json_has_every_peak_in_bytes_and_what_the_model_prints_goes_to_stderr(lab: Lab) -> None:
    done = plan(lab, "-c", "two.yaml", "--json")
    assert done.returncode == 0 and "hello from the model" in done.stderr
    said = json.loads(done.stdout)
    chosen, estimate = said["chosen"], said["chosen"]["estimate"]
    assert said["parameters"] == PARAMETERS and said["measured_on_gpu"] is True
    assert all(sum(peak["parts"].values()) == peak["allocated"] for peak in estimate["peaks"])
    whens = {peak["when"] for peak in estimate["peaks"]}
    assert whens == {"first step", "steady state", "resume", "evaluation", "checkpoint"}
    save = next(peak for peak in estimate["peaks"] if peak["when"] == "checkpoint")
    assert save["parts"]["parameters"] == pytest.approx(4 * PARAMETERS / 2, rel=1e-4)
    assert estimate["needed"] == estimate["reserved"] + sum(estimate["overhead"].values())
    assert said["fits"] and needs(chosen) < said["room"]["card"] == int(23.6 * GIB)
    time, accum = chosen["time"], chosen["recipe"]["grad_accum"]
    assert chosen["recipe"]["micro_batch_size"] * accum * 2 == time["samples"] == 16
    parts = sum(time[name] for name in ("compute", "memory", "exposed", "offload", "optimizer"))
    assert time["total"] == pytest.approx(parts)
    assert said["tokens_per_sample"] == 512
    needed = [estimate["needed"], *(rung["estimate"]["needed"] for rung in said["rungs"])]
    assert len(needed) > 2 and needed == sorted(needed, reverse=True)


def test_the_page_in_a_terminal_is_80_characters_wide(lab: Lab) -> None:
    done = plan(lab, "-c", "two.yaml", "--explain")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and max(map(len, lines)) <= 80
    bars = [line for line in lines if re.match(r"steady state +(forward|backward|optimizer) ", line)]
    assert len(bars) == 3 and all(re.search(r" P+O+\w*x+\.+ ", line) for line in bars)
    text = " ".join(done.stdout.split())
    assert f"{PARAMETERS:,} parameters" in text and "GPU capacity 23.6 GiB" in text
    assert "CHANGE NEEDED SAVED SPEED LOST" in text and "not modelled" in text
    assert "- optimizer: " in text and "- optimizer: " not in " ".join(
        plan(lab, "-c", "two.yaml").stdout.split()
    )


def test_without_explain_a_plan_is_the_answer_in_a_few_rows(lab: Lab) -> None:
    text = plan(lab, "-c", "two.yaml").stdout
    rows = [line for line in text.partition("\n\n")[0].splitlines() if line[0] != " "]
    names = [re.split(r"  +", row)[0] for row in rows]
    assert names[:3] == ["fits", "host memory", "time"] and names[-1] == "if memory runs out"
    assert len(names) <= 11 and re.match(r"fits +yes: [\d.]+ [GM]iB \+- \d+% of 23.6 GiB", rows[0])
    assert re.search(r"time +\S.*: \d+ steps, ", rows[2]) and "--explain" in text and "MODULE" not in text


def test_a_second_plan_takes_less_than_a_second_and_imports_no_torch(lab: Lab) -> None:
    plan(lab, "-c", "two.yaml")
    script = (
        "import resource, sys\n"
        "from launcher.cli.main import app\n"
        "app(['plan', 'job.yaml', '-c', 'two.yaml'], standalone_mode=False)\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('torch' in sys.modules, used.ru_utime + used.ru_stime, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=lab.folder, env=lab.environ, capture_output=True, text=True)
    torch, seconds = done.stderr.splitlines()[-1].split()
    assert torch == "False" and float(seconds) < 1.5
    assert "hello from the model" not in done.stderr


@pytest.mark.slow
def test_what_if_stands_beside_the_chosen_one(lab: Lab) -> None:
    asked = ("--what-if", "optimizer=adamw-8bit", "--what-if", "offload=cpu,sharding=ddp")
    eight, invalid = question(lab, "-c", "two.yaml", *asked)["answers"]
    assert eight["recipe"]["optimizer"] == "adamw-8bit" and eight["fits"]
    assert eight["estimate"]["needed"] < told(lab, "-c", "two.yaml")["chosen"]["estimate"]["needed"]
    assert not invalid["fits"] and "offload" in invalid["reason"]
    text = plan(lab, "-c", "two.yaml", *asked).stdout
    assert re.search(r"^chosen .* yes ", text, re.M) and re.search(
        r"^optimizer=adamw-8bit .* yes ", text, re.M
    )


def test_gpus_are_compared_and_the_fastest_comes_first(lab: Lab) -> None:
    asked = question(lab, "-c", "two.yaml", "--gpu", "RTX 3060", "--gpu", "A100 80GB")
    assert [one["label"] for one in asked["answers"]] == [
        "2 x A100 80GB (79.1 GiB)",
        "2 x RTX 3060 (11.7 GiB)",
    ]
    fast, slow = (one["time"]["samples_per_second"] for one in asked["answers"])
    assert fast > slow and asked["conclusion"] == "the fastest of --gpu: 2 x A100 80GB (79.1 GiB)"


@pytest.mark.slow
def test_one_sample_more_than_the_largest_micro_batch_does_not_fit(lab: Lab) -> None:
    asked = question(lab, "-c", "two.yaml", "--max-micro-batch")
    [answer] = asked["answers"]
    recipe = answer["recipe"]
    assert needs(answer) <= 23.6 * GIB and recipe["micro_batch_size"] > 8
    micro = recipe.pop("micro_batch_size") + 1
    fixed = [f"recipe.{name}={value}" for name, value in recipe.items() if value is not None]
    fixed += [f"recipe.micro_batch_size={micro}", f"batch.global={2 * micro * recipe['grad_accum']}"]
    sets = [text for one in fixed for text in ("--set", one)]
    done = plan(lab, "-c", "two.yaml", *sets)
    assert done.returncode == 4 and "more than it has" in done.stderr


@pytest.mark.slow
def test_the_stages_of_zero_are_shown_for_the_chosen_recipe(lab: Lab) -> None:
    zero = told(lab, "-c", "two.yaml", "--zero", "--set", "recipe.sharding=zero2")
    stages = {one["sharding"]: one for one in zero["zero"]["stages"]}
    assert zero["chosen"]["recipe"]["sharding"] == "fsdp-keep", "records have the canonical name"
    assert stages["fsdp-keep"]["estimate"]["needed"] > stages["fsdp"]["estimate"]["needed"]
    half = stages["ddp"]["optimizer"] / 2
    assert stages["ddp"]["total"] - stages["zero1"]["total"] == pytest.approx(half, rel=1e-3)
    shown = plan(lab, "-c", "two.yaml", "--zero", "--html", "zero.html").stdout
    assert "ZeRO-1, zero1" in shown and "bytes per parameter: 4 parameters, 4 gradients, 8" in shown
    assert "ZeRO-1, zero1" in (lab.folder / "zero.html").read_text()


@pytest.mark.slow
def test_the_fewest_gpus_are_those_on_which_it_fits(lab: Lab) -> None:
    """The states of 16 bytes a parameter are 3 GiB, a GPU has 3.9 with the CUDA context."""
    fixed = ("--set", "recipe.offload=none", "--set", "recipe.optimizer=adamw", "--min-gpus")
    asked = question(lab, "-c", "small.yaml", *fixed)
    alone, both = asked["answers"]
    assert not alone["fits"] and both["fits"] and both["label"] == "1 node(s) x 2"
    assert asked["conclusion"] == "the fewest: 2"


@pytest.mark.slow
def test_tokens_cost_what_the_profile_says_and_the_cheapest_cluster_comes_first(lab: Lab) -> None:
    asked = question(lab, "-c", "two.yaml", "-c", "one.yaml", "--tokens", "1e9")
    first, second = asked["answers"]
    assert [first["label"], second["label"]] == ["one", "two"] and first["usd"] < second["usd"]
    hours = 1e9 / 512 / second["time"]["samples_per_second"] / 3600
    assert second["hours"] == pytest.approx(hours) and second["usd"] == pytest.approx(hours * 2 * 0.27)
    assert asked["conclusion"] == "the cheapest: one"


@pytest.mark.slow
def test_the_largest_of_a_family_is_found_in_whatever_order_it_is_asked(lab: Lab) -> None:
    fixed = ("--set", "recipe.offload=none", "--set", "recipe.optimizer=adamw", "-c", "two.yaml")
    asked = question(lab, *fixed, "--largest", "depth=12,6000,6,600")
    assert [one["fits"] for one in asked["answers"]] == [True, True, False]
    assert [one["label"] for one in asked["answers"]] == ["depth=6", "depth=12", "depth=600"]
    assert asked["conclusion"] == "the largest that fits: depth=12; not tried: depth=6000"


def test_a_loss_in_parts_is_refused_for_a_task_that_computes_it_at_once(lab: Lab) -> None:
    done = plan(lab, "-c", "local", "--set", "recipe.loss_chunks=4", job="cpu.yaml")
    assert done.returncode == 4 and "recipe.loss_chunks: the task, or its model, computes" in done.stderr


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_what_would(lab: Lab) -> None:
    fixed = ("--set", "recipe.offload=none", "--set", "recipe.optimizer=adamw")
    done = plan(lab, "-c", "tiny.yaml", *fixed)
    assert done.returncode == 4 and not done.stdout
    assert "nothing fits" in done.stderr and re.search(r"fits: .*(offload|optimizer): ", done.stderr)
    said = told(lab, "-c", "tiny.yaml", *fixed, "--gpu", "A100 80GB", "--html", "no.html", code=4)
    assert "nothing fits" in said["refused"] and "chosen" not in said
    assert "nothing fits" in (lab.folder / "no.html").read_text()
    assert said["questions"][0]["answers"][0]["fits"], "on a larger GPU it does"


class Page(HTMLParser):
    """Bars, and whatever would leave the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.bars: list[list[int]] = []
        self.widths: list[float] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.rawdata

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.links += [str(found[name]) for name in ("src", "href", "action", "data") if name in found]
        if tag == "svg":
            self.bars.append([])
            self.widths.append(0.0)
        if tag == "rect" and "data-bytes" in found:
            self.bars[-1].append(int(found["data-bytes"] or 0))
            self.widths[-1] += float(found["width"] or 0)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_html_page_has_the_same_figures_and_reaches_nothing_outside(lab: Lab) -> None:
    name = "<b>name</b> & more"
    done = plan(
        lab,
        "-c",
        "two.yaml",
        "--set",
        f"name={name}",
        "--what-if",
        "optimizer=adamw-8bit",
        "--html",
        "p.html",
    )
    assert done.returncode == 0, done.stderr
    text = (lab.folder / "p.html").read_text()
    page, said = Page(text), told(lab, "-c", "two.yaml")
    assert not page.links and not {"script", "link", "img", "iframe", "b"} & {*page.tags}
    assert "://" not in text and "url(" not in text and "@import" not in text
    assert name in page.text and "prefers-color-scheme: dark" in text
    estimate = said["chosen"]["estimate"]
    outside = sum(estimate["overhead"].values())
    sums = [*sorted(peak["allocated"] + outside for peak in estimate["peaks"]), estimate["needed"]]
    drawn = [sum(bar) for bar in page.bars]
    assert [*sorted(drawn[:-1]), drawn[-1]] == sums
    shares = [100 * size / said["room"]["card"] for size in drawn]
    assert page.widths == pytest.approx(shares, abs=0.01)
    for rung in said["rungs"]:
        assert rung["words"].split("; saves")[0] in page.text
    assert "optimizer=adamw-8bit" in page.text


def test_a_cpu_is_planned_by_its_host_memory_alone_and_the_run_is_compared_with_it(lab: Lab) -> None:
    sets = ("-s", "task=stack:Real", "-s", "batch.global=8", "-s", "env.TRAIN_MEMORY_BUDGET=1GiB")
    done = plan(lab, "-c", "local", *sets, job="cpu.yaml")
    assert done.returncode == 0 and "yes, in host memory; the tensors of a rank need" in done.stdout
    assert "samples/s" not in done.stdout and "measurements on a GPU" not in done.stdout
    done = lab.cli("run", "cpu.yaml", "-c", "local", *sets, "--set", "steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(run := lab.newest(), status_of(run, "", run.read_state()), time.time())
    steady = next(one for one in report.moments if one.name == "tensors, steady state")
    assert {one.name for one in report.categories} >= {"parameters", "optimizer states", "gradients"}
    for one in (steady, *report.categories):
        assert one.measured == pytest.approx(one.planned, rel=0.06), one


def test_while_traces_are_made_a_terminal_shows_what_is_being_done(lab: Lab, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environ = {**lab.environ, "XDG_CACHE_HOME": str(tmp_path), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "launcher", "plan", "cpu.yaml", "--json"]
    with subprocess.Popen(
        command, cwd=lab.folder, env=environ, stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["parameters"] == PARAMETERS
    os.close(ours)
    assert b"tracing a step" in shown and b"hello from the model" in shown


UNKNOWN_HOST = (
    *("-c", "slurm-a100"),
    *("--set", "cluster.node.memory=null"),
    *("--set", "resources.gpus_per_node=0"),
)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-c", "two.yaml", "-c", "one.yaml"), 2, "add --tokens N"),
        (("-c", "two.yaml", "--gpu", "RTX A500"), 2, "known are B200, "),
        (("-c", "two.yaml", "--gpu", "A100 SXM"), 2, "name one of A100 80GB, A100 40GB"),
        (("-c", "two.yaml", "--what-if", "optimiser=adamw"), 2, "launcher: --what-if optim.*: .* mean"),
        (("-c", "two.yaml", "--largest", "depth={a"), 2, "launcher: --largest depth={a"),
        (("-c", "two.yaml", "--set", f"env.{DRILLS}=phase=x"), 2, "'x' is not a phase"),
        (("-c", "two.yaml", "--set", f"env.{DRILLS}=phase=probe,rank=2"), 4, "rank '2' is not one of the 2"),
        (("-c", "two.yaml", "--largest", "depth"), 2, "write an argument of the task and its values"),
        (("-c", "two.yaml", "--set", "task=stack:Asks"), 2, r"stack.py:\d+.*meta device"),
        (("-c", "two.yaml", "--set", "task=stack:Missing"), 2, "Missing"),
        (("-c", "two.yaml", "--set", "plan.params=5"), 2, "belongs to `command:`"),
        (("-c", "two.yaml", "--set", "workdir=nowhere"), 2, "is not a directory here"),
        (("-c", "local", "--set", "resources.gpus_per_node=0", "--min-gpus"), 2, "runs without GPUs"),
        (("-c", "local", "--set", "resources.gpus_per_node=0", "--gpu", "H100"), 2, "asks for no GPUs"),
        ((*UNKNOWN_HOST, "--max-micro-batch"), 2, "node.memory"),
        (("-c", "one.yaml", "--zero"), 2, "has one rank, so there is nothing to shard"),
        (("-c", "local", "--set", "task=null", "--set", "command=python x.py"), 4, "not know which model"),
    ],
)
def test_what_cannot_be_answered_gets_one_message(
    lab: Lab, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = plan(lab, *arguments)
    assert done.returncode == code and not done.stdout
    assert re.search(message, done.stderr) and "Traceback" not in done.stderr


def test_a_task_without_blocks_is_not_recomputed_and_one_without_tokens_not_priced_by_them(lab: Lab) -> None:
    sets = ("--set", "task=stack:Real", "--set", "recipe.activations=null")
    assert told(lab, "-c", "one.yaml", *sets)["chosen"]["recipe"]["activations"] == "keep"
    assert "kernel launches are not counted" in plan(lab, "-c", "one.yaml", *sets).stdout
    done = plan(lab, "-c", "one.yaml", "--tokens", "1e9", *sets)
    assert done.returncode == 2 and "has no tokens" in done.stderr


def test_a_command_is_planned_from_how_many_parameters_it_declares(lab: Lab) -> None:
    own = ("task=null", "steps=null", "command=python x.py {micro_batch_size}", "plan.params=1000000000")
    sets = [text for one in own for text in ("--set", one)]
    done = plan(lab, "-c", "two.yaml", "--json", *sets)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert 0 <= said["parameters"] - 10**9 < 4096 and said["chosen"]["estimate"]["basis"] == "formulas"
    shown = " ".join(plan(lab, "-c", "two.yaml", *sets).stdout.split())
    assert "planned as bf16-mixed, adamw, sharding fsdp, micro-batch" in shown
    assert "unknown: launcher predicts the time only of models" in shown and "the only recipe: " in shown


def rendered(lab: Lab, name: str, *sets: str) -> dict[str, Any]:
    options = [word for one in sets for word in ("--set", one)]
    done = lab.cli("render", "job.yaml", "-c", "two.yaml", "--out", name, *options)
    assert done.returncode == 0, done.stderr
    [written] = (lab.folder / name).rglob("plan.json")
    return json.loads(written.read_text())


PLAN, DRY_RUN = ("plan", "job.yaml"), ("submit", "job.yaml", "--dry-run")


def test_what_was_planned_is_what_is_submitted(lab: Lab) -> None:
    """Without torch and the user's code: from the traces that `launcher plan` has left."""
    said = told(lab, "-c", "two.yaml")
    plan = rendered(lab, "planned")
    assert plan["recipe"] == said["chosen"]["recipe"]
    assert plan["estimate"].items() <= said["chosen"]["estimate"].items()
    assert plan["parameters"] == PARAMETERS
    speeds = itertools.accumulate((1 - rung["slower"] for rung in said["rungs"]), operator.mul)
    assert plan["ladder_speed"] == pytest.approx([*speeds]) and len(plan["ladder"]) > 1
    for cluster in ("two.yaml", "slurm-h100"):
        lines = [lab.cli(*verb, "-c", cluster).stdout.splitlines() for verb in (PLAN, DRY_RUN)]
        planned, shown = ({line[:11].strip(): line[20:].strip() for line in each} for each in lines)
        assert shown["fits"].startswith(planned["fits"]) and " to spare" in shown["fits"]
    assert shown["time"].split(" predicted for ")[0] == planned["time"].split(":")[0]
    unknown = rendered(lab, "unknown", "args.width=1024")
    assert unknown["estimate"] is None and "run `launcher plan`" in unknown["warnings"][-1]
    assert unknown["recipe"]["micro_batch_size"] == 8  # starts at the largest, and steps down
    printed = lab.cli("render", "job.yaml", "-c", "two.yaml", "--set", "args.width=1024")
    assert "note: the recipe is not chosen by memory: run `launcher plan`" in printed.stderr
    assert "note:" not in printed.stdout


def test_a_cpu_plan_begins_with_what_this_machine_can_hold_and_a_fixed_one_is_refused(lab: Lab) -> None:
    sets = (
        *("--set", "resources.gpus_per_node=0"),
        *("--set", "resources.ranks_per_node=1"),
        *("--set", "batch.global=32768"),
    )
    fixed = ("--set", "recipe.micro_batch_size=32768")
    done = plan(lab, "-c", "local", *sets, *fixed, job="cpu.yaml")
    assert done.returncode == 4 and "of host memory per node" in done.stderr
    memory = ("--set", "resources.memory_per_node=16GiB")
    done = plan(lab, "-c", "local", *sets, *memory, "--json", job="cpu.yaml")
    assert done.returncode == 0, done.stderr
    begun = json.loads(done.stdout)["plan"]
    recipe, then = begun["recipe"], begun["ladder"][0]
    assert 1 < recipe["micro_batch_size"] < 32768
    assert recipe["micro_batch_size"] * recipe["grad_accum"] == 32768
    assert then["micro_batch_size"] == recipe["micro_batch_size"] // 2
    assert "the first rung of its ladder that fits in host memory" in begun["reason"]


@pytest.mark.slow
def test_an_offload_to_unknown_host_memory_is_chosen_with_its_condition(lab: Lab) -> None:
    unknown = ("-c", "tiny.yaml", "--set", "cluster.node.memory=null")
    said = plan(lab, *unknown, "--set", "recipe.offload=cpu", "--set", "recipe.sharding=fsdp")
    assert said.returncode == 0, said.stderr
    words = " ".join(said.stdout.split())
    assert re.search(r"fits yes, if each node has at least [\d.]+ GiB of host memory: ", words)
    assert "the recipe fits only if each node has at least" in words and words.count("`node.memory`") == 1
