"""`launcher plan`: the seeds' figures, what is refused, and what it proposes instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, shard_of, state_bytes, states_of
from launcher.planning.fitting import Fit, changes_line, weigh
from launcher.planning.plan import make_plan
from launcher.render.shipped import clusters_dir
from launcher.spec.base import GIB
from launcher.spec.load import load_cluster, load_job
from launcher.spec.recipe import Recipe
from launcher.train.shapes import read_shapes
from launcher.train.task import load_task

ROOT = Path(__file__).parents[2]
GB = 10**9


def weighed(example: str, cluster: str, *sets: str) -> tuple[ModelShapes, Recipe, Fit]:
    job, profile = load_job(ROOT / f"examples/{example}.yaml", sets), load_cluster(clusters_dir() / cluster)
    assert job.task is not None
    plan = make_plan(job, profile)
    model = read_shapes(load_task(job.task, job.args, str(ROOT)), plan.recipe)
    return model, plan.recipe, weigh(model, job, profile, plan)


def matrix(rows: int, row: int, precision: str) -> ModelShapes:
    return ModelShapes((Parameter("w", (rows, row), 2 if precision == "bf16" else 4),), 0)


def on(ranks: int, rows: int, row: int, **fields: Any) -> Any:
    recipe = Recipe.model_validate({"micro_batch_size": 1, "grad_accum": 1, **fields})
    model = matrix(rows, row, recipe.precision)
    return states_of(model, recipe, Ranks(ranks, ranks, on_gpu=True)).gpu


def test_a_model_of_8_499_653_234_parameters_needs_what_its_report_says() -> None:
    fp32 = on(1, 8_499_653_234, 1, precision="fp32", optimizer="adamw", sharding="none")
    assert [round(fp32.parameters / GIB, 2), round(fp32.gradients / GIB, 2)] == [31.66, 31.66]
    assert round(fp32.optimizer / GIB, 2) == 63.33
    bf16 = on(1, 8_499_653_234, 1, precision="bf16", optimizer="adamw", sharding="none")
    assert round(bf16.total / GIB, 2) == 63.33


def test_13_14_billion_parameters_need_what_their_report_says() -> None:
    """26.28 GB of 8-bit states are two bytes a parameter; their scales are a 64th more."""
    fp32 = on(1, 51_328_125, 256, precision="fp32", optimizer="adamw", sharding="none")
    assert [round(fp32.parameters / GB, 2), round(fp32.optimizer / GB, 2)] == [52.56, 105.12]
    eight = on(1, 51_328_125, 256, precision="fp32", optimizer="adamw-8bit", sharding="none")
    assert round(eight.optimizer / (1 + 4 / 256) / GB, 2) == 26.28


def test_7_billion_parameters_in_bf16_are_56_gb_whole_and_7_on_each_of_eight() -> None:
    for sharding, size in (("ddp", 56), ("fsdp", 7)):
        held = on(8, 7_000_000, 1000, precision="bf16", optimizer="adamw", sharding=sharding)
        assert round(held.total / GB, 2) == size


def test_hybrid_shards_within_a_node_only() -> None:
    recipe = Recipe.model_validate(
        {
            "precision": "fp32",
            "optimizer": "adamw",
            "sharding": "hybrid",
            "micro_batch_size": 1,
            "grad_accum": 1,
        }
    )
    held = states_of(matrix(16, 256, "fp32"), recipe, Ranks(world=8, per_node=4, on_gpu=True)).gpu
    assert held.parameters == 16 * 256 * 4 / 4


def test_two_a5000_hold_13_billion_parameters_with_everything_on_the_host() -> None:
    _, _, fit = weighed("llama-13b", "runpod-2xa5000.yaml")
    assert fit.parameters == 13_142_798_336 and fit.rank.gpu.total == 0 and not fit.problems
    assert fit.host_per_node == 6 * fit.parameters  # 73.4 GiB: bf16 parameters, gradients, Lion's state
    _, _, small = weighed("llama-13b", "runpod-2xa5000.yaml", "resources.memory_per_node=62GiB")
    assert "73.44 GiB of host memory on each node, which has 62 GiB" in small.problems[0]


def test_one_a6000_holds_7_billion_parameters_in_bf16_with_8_bit_states() -> None:
    _, _, fit = weighed("llama-7b", "runpod-a6000.yaml")
    # 6 bytes a parameter, the scales, and 6 bytes more for each of the embedding's 32000 x 4096.
    assert round(fit.rank.gpu.total / GIB, 2) == 38.58 and not fit.problems


def test_the_8_billion_brain_does_not_fit_under_ddp_and_what_does_is_named() -> None:
    model, recipe, fit = weighed("brain-8b", "tensor01.yaml", "recipe.sharding=ddp", "args.parts=1")
    assert "no micro-batch helps" in fit.problems[0]
    assert [changes_line(one, recipe) for one in fit.alternatives] == ["sharding: fsdp, grad_sync: each"]
    # The allocation that failed in the field, in the first optimizer step: the codes of the giant matrix.
    giant = max(model.parameters, key=lambda p: p.numel)
    asked = state_bytes(recipe, giant, shard_of(giant, 1, 0)) / 2 / (1 + 4 / 256)
    assert round(asked / GIB, 2) == 6.26
    _, _, sharded = weighed("brain-8b", "tensor01.yaml")
    assert not sharded.problems and round(sharded.rank.gpu.total / GIB, 2) == 9.77


def launcher(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_STATE_HOME": str(folder)}
    command = [sys.executable, "-m", "launcher", "plan", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_states_that_do_not_fit_are_refused_with_json_on_stdout(tmp_path: Path) -> None:
    job = str(ROOT / "examples/llama-7b.yaml")
    done = launcher(tmp_path, job, "-c", "runpod-a6000", "-s", "recipe.optimizer=adamw", "--json")
    assert done.returncode == 4 and "states that fit: optimizer: adamw-8bit" in done.stderr
    said = json.loads(done.stdout)
    assert said["states"]["rank"]["gpu"]["parameters"] == 2 * said["states"]["parameters"]
    assert "not estimated yet" in said["note"]


def test_a_model_that_asks_for_values_gets_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from launcher.train import Task\n"
        "class Mine(Task):\n"
        "    def model(self): return torch.nn.Linear(2, int(torch.ones(()).item()))\n"
        "    def data(self, split): ...\n"
        "    def loss(self, model, batch): ...\n"
    )
    (tmp_path / "job.yaml").write_text("{name: j, task: 'mine:Mine', steps: 1, batch: {global: 1}}")
    done = launcher(tmp_path, "job.yaml", "-c", "local")
    assert done.returncode == 2 and "mine.py:4" in done.stderr and "meta device" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_model_of_a_command_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{name: j, command: 'python x.py', batch: {global: 1}}")
    done = launcher(tmp_path, "job.yaml", "-c", "local")
    assert done.returncode == 4 and "the model of a foreign command is not known" in done.stderr
