"""Models that a job declares, and models that cannot be traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.memory.states import Ranks
from launcher.planning.model_source import NoTraceError
from launcher.planning.recipe_and_ladder import Decider
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.train.rank import SetupError
from launcher.train.task import Task, TaskError
from launcher.train.tracing.declared_model import DeclaredSource
from launcher.train.tracing.task_source import TaskSource
from tests.train.test_tracing import Blocks, recipe

ONE = Ranks(1, 1, on_gpu=True)
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA accepts its devices here")


def job(**fields: Any) -> Job:
    return Job.model_validate({"name": "declared", "batch": {"global": 8}, "steps": 1, **fields})


@pytest.mark.slow
def test_a_commands_model_is_traced_from_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    plan = {"model": "hf:model", "length": 48}
    source = DeclaredSource(job(command=["python", "mine.py"], plan=plan), tmp_path)
    assert source.files() == [tmp_path / "model" / "config.json"]
    assert source.about().tokens_per_sample == 48
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert source.shapes("bf16").numel == theirs
    kept, recomputed = (
        source.trace(recipe(sharding="none", activations=activations), ONE)
        for activations in ("keep", "checkpoint")
    )
    most = [max(m.at(64) for m in trace.highest()["backward"]) for trace in (kept, recomputed)]
    assert most[0] > most[1]
    assert recomputed.work.backward_flops.at(1) > kept.work.backward_flops.at(1)


def test_a_declared_model_that_is_not_there_is_named_by_the_jobs_field(tmp_path: Path) -> None:
    plan = {"model": "hf:model", "length": 48}
    with pytest.raises(TaskError, match=r"plan.model: .*/model is neither"):
        DeclaredSource(job(command=["python", "mine.py"], plan=plan), tmp_path)


def test_what_is_wrong_with_a_declared_model_is_said_of_the_jobs_fields(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    encoder = {"model_type": "vit", "hidden_size": 32}
    for name, content in (("short", config), ("typeless", {"hidden_size": 32}), ("encoder", encoder)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    for name, said in (
        ("short", r"^plan\.length: 65 is more"),
        ("typeless", r"^plan\.model: transformers"),
        ("encoder", r"^plan\.model: .* of type vit, which is not a causal language model"),
    ):
        source = DeclaredSource(job(command="x", plan={"model": f"hf:{name}", "length": 65}), tmp_path)
        with pytest.raises(TaskError, match=said):
            source.about()


def test_a_model_that_asks_for_values_is_named_with_what_to_do(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_tracing:Blocks", args={"asks": True}), tmp_path)
    with pytest.raises(NoTraceError, match=r"_local_scalar_dense.*must not depend on"):
        source.trace(recipe(sharding="none"), ONE)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"layers": [8, 4]}, r"plan.vary.layers: begins with 8, but PydocGPT has the default 4"),
        ({"frames": [8, 4]}, r"plan.vary.frames: begins with 8, but PydocGPT has no default"),
    ],
)
def test_what_may_be_lowered_begins_with_the_tasks_default(
    tmp_path: Path, vary: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        TaskSource(job(task="launcher.tasks.gpt:PydocGPT", plan={"vary": vary}), tmp_path).about()
    good = job(task="launcher.tasks.gpt:PydocGPT", plan={"vary": {"context": [128, 64]}})
    source = TaskSource(good, tmp_path)
    assert source.about().tokens_per_sample == 128
    assert source.about({"context": 64}).tokens_per_sample == 64


class Unnumbered(Task):
    """A convolution, and results whose number depends on values."""

    def model(self) -> nn.Module:
        return nn.Conv1d(2, 2, 3)

    def data(self, split: str) -> Any:
        return [torch.zeros(2, 9) for _ in range(8)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch).unique().sum(), len(batch)


def test_an_operator_of_torch_is_named_as_such(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_declared:Unnumbered"), tmp_path)
    assert not source.about().linear
    with pytest.raises(NoTraceError, match=r"aten\._unique2.* is an operator of torch"):
        source.trace(recipe(sharding="none"), ONE)


class Scripted(Unnumbered):
    def model(self) -> nn.Module:
        return nn.Sequential(torch.jit.script(super().model()))


def test_torchscript_is_named_as_such(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_declared:Scripted"), tmp_path)
    with pytest.raises(NoTraceError, match=r"^0: .*TorchScript.* the module before torch\.jit\.script"):
        source.trace(recipe(sharding="none"), ONE)


class ScriptedActivation(Unnumbered):
    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), torch.jit.script(nn.GELU()))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), len(batch)


def test_torchscript_without_parameters_is_traced(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_declared:ScriptedActivation"), tmp_path)
    assert source.trace(recipe(sharding="none"), ONE, exact=True)


class ScriptedBlock(ScriptedActivation):
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model]


def test_blocks_with_torchscript_are_not_recomputed(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_declared:ScriptedBlock"), tmp_path)
    assert source.about().blocks and not source.about().recomputable
    with pytest.raises(SetupError, match=r"TorchScript.* keep or offload"):
        source.trace(recipe(sharding="none", activations="checkpoint"), ONE)
    node = {"gpu": {"type": "NVIDIA RTX A6000", "count": 1, "memory": "48GiB"}, "memory": "500GiB"}
    cluster = Cluster.model_validate({"name": "one", "scheduler": "local", "node": node})
    decider = Decider(source.job, cluster, source)
    assert decider.decide().plan.recipe.activations in ("keep", "offload")
    assert set(decider.space().axes["activations"]) == {"keep", "offload"}
    assert any("TorchScript" in note for note in decider.notes)


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-layers", "fsdp-keep"])
def test_the_whole_model_may_be_the_only_block(tmp_path: Path, sharding: str) -> None:
    source = TaskSource(job(task="tests.train.test_declared:ScriptedBlock"), tmp_path)
    assert source.trace(recipe(sharding=sharding), Ranks(2, 2, on_gpu=True))


class NamesCuda(Blocks):
    def model(self) -> nn.Module:
        return super().model().cuda()

    def data(self, split: str) -> Any:
        return [row.to("cuda:0") for row in super().data(split)]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        batch = batch.cuda(non_blocking=True).to(torch.device("cuda"), torch.float32).to(0)
        zeros = torch.zeros(16, device=f"cuda:{torch.cuda.current_device()}") + batch.new_ones(16, device=0)
        sum_, weight = super().loss(model, batch + zeros - 1)
        return sum_, torch.tensor(weight, device="cuda")


@WITHOUT_GPU
def test_code_that_names_a_cuda_device_is_traced(tmp_path: Path) -> None:
    sources = [
        TaskSource(job(task=f"tests.train.test_declared:{task}"), tmp_path)
        for task in ("Blocks", "NamesCuda")
    ]
    plain, named = (source.trace(recipe(sharding="fsdp"), Ranks(2, 2, on_gpu=True)) for source in sources)
    assert named.work.backward_flops == plain.work.backward_flops
    assert sources[0].about() == sources[1].about()
    assert sources[0].shapes("bf16-mixed") == sources[1].shapes("bf16-mixed")
    assert not sources[0].names_cuda and sources[1].names_cuda
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda|nvidia"):
        NamesCuda().model()


@WITHOUT_GPU
def test_code_that_names_a_cuda_device_fails_in_a_plan_for_the_cpu_as_in_the_run(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_declared:NamesCuda"), tmp_path, "cpu")
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda|nvidia"):
        source.about()


class WithoutWeight(Unnumbered):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).square().sum()


def test_a_loss_of_another_form_is_refused_before_the_run(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_declared:WithoutWeight"), tmp_path)
    for exact in (False, True):
        with pytest.raises(TaskError, match=r"^loss\(\) of WithoutWeight must return \(sum, weight\)"):
            source.trace(recipe(sharding="none"), ONE, exact=exact)


class NeedsAllBlocks(Blocks):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        result = super().loss(model, batch)
        return result if len(model.layers) == 8 else None


def test_a_loss_is_judged_with_all_blocks_of_the_model(tmp_path: Path) -> None:
    source = TaskSource(job(task="tests.train.test_declared:NeedsAllBlocks"), tmp_path)
    assert source.trace(recipe(sharding="none"), ONE)


class Experts(Blocks):
    def parallel_plan(self, model: nn.Module) -> Any:
        raise SetupError("experts cannot be divided")


def test_a_model_that_tensor_parallelism_cannot_divide_is_planned_without_it(tmp_path: Path) -> None:
    """As CausalLM says of transformers' Mixtral and Qwen 3 MoE."""
    source = TaskSource(job(task="tests.train.test_declared:Experts"), tmp_path)
    assert not source.about().tensor
    assert source.trace(recipe(), Ranks(2, 2, on_gpu=True)).highest()
    with pytest.raises(SetupError, match="experts cannot be divided"):
        source.trace(recipe(sharding="none", tensor=2), Ranks(2, 2, on_gpu=True))
