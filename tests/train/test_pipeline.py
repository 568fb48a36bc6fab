"""Pipeline parallelism: a model in stages trains like the whole one, restarts and resumes like it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import remove_handover
from launcher.spec.events import Resumed
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import EXIT_OOM
from launcher.tasks.gpt import PydocGPT
from launcher.train.checkpoints.export import export
from tests.train.runs import any_error, error, job, losses, measure, prepare, recipe, start

GPT = {"layers": 3, "dim": 16, "heads": 2, "context": 16}
SUPERVISED = {"LAUNCHER_SUPERVISED": "1"}
STEPS = 5
ORDER = 1e-6
"Relative difference of losses and norms whose sums have another order, in fp32."
NORM_OVER_4_BITS = 2e-6
"The same, of the norm of an adapter over packed weights. Measured 1.2e-6."
ADAM = 2e-4
"""Difference of parameters after five steps of 1e-3. Where a gradient is as small as its rounding, Adam makes
a step of full size of it. Measured 1.2e-5 to 7.7e-5 on two processors; five steps the other way are 1e-2."""
FSDP = {"sharding": "fsdp"}
INTERLEAVED = {"virtual_stages": 2}
ZERO_BUBBLE = {"schedule": "zero-bubble"}

TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt, 1f1b": ("gpt", {}),
    "gpt, by hand, fsdp": ("gpt", {"stages": [1, 3], **FSDP}),
    "gpt, interleaved": ("gpt", INTERLEAVED),
    "llama, interleaved, fsdp": ("llama", {"activations": "checkpoint", **INTERLEAVED, **FSDP}),
    "llama, gpipe": ("llama", {"schedule": "gpipe"}),
    "brain": ("brain", {}),
    "gpt, zero-bubble": ("gpt", ZERO_BUBBLE),
    "llama, zero-bubble, fsdp": ("llama", {"activations": "checkpoint", **ZERO_BUBBLE, **FSDP}),
    "lora": ("lora", {}),
    "floats, bf16": ("conditioned", {"precision": "bf16", **ZERO_BUBBLE}),
    "floats, bf16-mixed": ("conditioned", {"precision": "bf16-mixed", **FSDP}),
    "floats, in place": ("in place", ZERO_BUBBLE),
}
TWO_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt, gpipe": ("gpt", {"schedule": "gpipe"}),
    "lora, interleaved": ("gpt lora", {**INTERLEAVED, **FSDP}),
    "lora, zero-bubble": ("lora", {"precision": "bf16-mixed", **ZERO_BUBBLE}),
    "lora of transformers": ("lora of transformers", {"activations": "checkpoint", **ZERO_BUBBLE, **FSDP}),
    "lora, on the host": ("lora", {"activations": "offload", "offload": "cpu-optimizer"}),
    "lora, compressed": ("gpt lora", {"activations": "compress", "optimizer": "adam-mini"}),
    "qlora": ("qlora", {}),
    "qlora, fsdp": ("qlora", {"precision": "bf16-mixed", "activations": "checkpoint", **FSDP}),
    "qlora, zero-bubble": ("qlora", {"optimizer": "adamw-8bit", **ZERO_BUBBLE}),
    "video": ("video", {}),
    "llama, fsdp, last": ("llama", {"grad_sync": "last", **FSDP}),
    "transformers": ("transformers", {}),
    "transformers, interleaved": ("transformers", {**INTERLEAVED, **FSDP}),
    "llama, interleaved by hand": ("llama", {"stages": [2, 1, 1, 1], **INTERLEAVED}),
    "gpt, interleaved, last": ("gpt", {"grad_sync": "last", **INTERLEAVED, **FSDP}),
    "gpt, interleaved, kept": ("gpt", {"sharding": "fsdp-keep", "compile": True, **INTERLEAVED}),
    "gpt, interleaved, offloaded": ("gpt", {"offload": "cpu", **INTERLEAVED, **FSDP}),
    "transformers, loss in parts": ("transformers", {"loss_chunks": 3, **FSDP}),
    "transformers, zero-bubble": ("transformers", {**ZERO_BUBBLE, **FSDP}),
    "video, zero-bubble": ("video", ZERO_BUBBLE),
    "brain, bf16": ("brain", {"precision": "bf16"}),
    "floats, zero-bubble, fsdp, bf16": ("conditioned", {"precision": "bf16", **ZERO_BUBBLE, **FSDP}),
    "floats, interleaved, bf16": ("conditioned", {"precision": "bf16", **INTERLEAVED}),
    "brain, zero-bubble": ("brain", ZERO_BUBBLE),
    **{
        f"zero-bubble, {', '.join(map(str, fields.values()))}": ("gpt", {**ZERO_BUBBLE, **fields})
        for fields in (
            {"precision": "bf16"},
            {"precision": "bf16-mixed"},
            {"precision": "bf16-mixed", **FSDP},
            {"precision": "fp16-mixed", "grad_scaler": True, **FSDP},
            {"grad_sync": "last", **FSDP},
            {"sharding": "fsdp-keep"},
            {"activations": "checkpoint"},
            {"activations": "every-second"},
            {"activations": "selective", **FSDP},
            {"activations": "offload"},
            {"activations": "compress"},
            {"loss_chunks": 3},
            {"offload": "cpu", **FSDP},
            {"offload": "cpu-optimizer"},
            {"offload": "cpu-optimizer", **FSDP},
        )
    },
    **{
        ", ".join(map(str, fields.values())): ("gpt", fields)
        for fields in (
            {"precision": "bf16"},
            {"precision": "bf16-mixed"},
            {"precision": "bf16-mixed", **FSDP},
            {"precision": "fp16-mixed", "grad_scaler": True, **FSDP},
            {"activations": "checkpoint", **FSDP},
            {"activations": "selective"},
            {"activations": "offload"},
            {"loss_chunks": 3, **FSDP},
            {"optimizer": "adamw-8bit", **FSDP},
            {"offload": "cpu", **FSDP},
            {"offload": "cpu-optimizer"},
            {"compile": True, **FSDP},
        )
    },
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "2 x 2, 1f1b": ("gpt", FSDP),
    "2 x 2, gpipe, last": ("gpt", {"schedule": "gpipe", "grad_sync": "last", **FSDP}),
    "2 x 2, kept": ("gpt", {"sharding": "fsdp-keep"}),
    "2 x 2, recomputed": ("llama", {"activations": "checkpoint", "loss_chunks": 2, **FSDP}),
    "2 x 2, video": ("video", FSDP),
    "4": ("gpt", {"pipeline": 4}),
    "4, zero-bubble": ("gpt", {"pipeline": 4, **ZERO_BUBBLE}),
    "2 x 2, zero-bubble": ("llama", {**ZERO_BUBBLE, **FSDP}),
    "2 x 2, zero-bubble, last": ("gpt", {"grad_sync": "last", **ZERO_BUBBLE, **FSDP}),
    "2 x 2, zero-bubble, zero1": ("gpt", {"sharding": "zero1", **ZERO_BUBBLE}),
    "2 x 2, zero-bubble, ddp": ("gpt", {"sharding": "ddp", "activations": "checkpoint", **ZERO_BUBBLE}),
    "2 x 2, interleaved": ("llama", {**INTERLEAVED, **FSDP}),
    "2 x 2, zero1, interleaved, 8 bit": (
        "llama",
        {"sharding": "zero1", "optimizer": "adamw-8bit", "grad_sync": "last", **INTERLEAVED},
    ),
    "2 x 2, zero1, transformers": ("transformers", {"sharding": "zero1", "activations": "checkpoint"}),
    "2 x 2, zero1, on the host": ("gpt", {"sharding": "zero1", "offload": "cpu-optimizer"}),
    "2 x 2, ddp, gpipe": ("gpt", {"sharding": "ddp", "schedule": "gpipe", "loss_chunks": 3}),
    "2 x 2, ddp, bf16-mixed": ("gpt", {"sharding": "ddp", "precision": "bf16-mixed"}),
    "2 x 2, lora, zero1": ("gpt lora", {"sharding": "zero1"}),
    "2 x 2, second derivatives": ("forces", {"grad_sync": "last", **ZERO_BUBBLE, **FSDP}),
    "2 x 2, qlora": ("qlora", {"activations": "checkpoint", **FSDP}),
    "2 x 2, interleaved, kept": ("gpt", {"sharding": "fsdp-keep", "optimizer": "adamw-8bit", **INTERLEAVED}),
}

TENSOR = {"tensor": 2}
BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", TENSOR),
    "llama": ("llama", {"schedule": "gpipe", **TENSOR}),
}
"Two stages of two tensor-parallel ranks. Llama's send their part of a sequence, the others all of it."
BOTH_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers", {"schedule": "gpipe", **TENSOR}),
    "video": ("video", TENSOR),
    "lora": ("lora", TENSOR),
    "gpt lora": ("gpt lora", {**ZERO_BUBBLE, **TENSOR}),
    "qlora": ("qlora", {"activations": "checkpoint", **TENSOR}),
    "brain": ("brain", {"micro": 8, "accumulation": 1, **TENSOR}),
    **{
        f"llama, {', '.join(map(str, fields.values()))}": ("llama", {**fields, **TENSOR})
        for fields in (
            {"activations": "checkpoint", "loss_chunks": 3},
            {"activations": "offload", "optimizer": "adam-mini"},
            {"activations": "selective"},
            {"optimizer": "lion"},
            {"offload": "cpu-optimizer"},
            {"stages": [1, 4]},
            INTERLEAVED,
            ZERO_BUBBLE,
            FSDP,  # one shard
        )
    },
}
EIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {**TENSOR, **FSDP}),
    "gpt, interleaved": ("gpt", {**TENSOR, **INTERLEAVED, **FSDP}),
    "gpt, zero-bubble": ("gpt", {**TENSOR, **ZERO_BUBBLE, **FSDP}),
    "llama, zero1": ("llama", {"sharding": "zero1", **TENSOR}),
    "gpt, ddp": ("gpt", {"sharding": "ddp", **TENSOR}),
    "llama": ("llama", {"grad_sync": "last", "schedule": "gpipe", **TENSOR, **FSDP}),
    "lora": ("lora", {**TENSOR, **FSDP}),
    "llama, kept": ("llama", {"sharding": "fsdp-keep", "activations": "checkpoint", **TENSOR}),
    "transformers": ("transformers", {"loss_chunks": 2, **TENSOR, **FSDP}),
    "video, offloaded": ("video", {"offload": "cpu", **TENSOR, **FSDP}),
}


def compare(
    cases: dict[str, tuple[str, dict[str, Any]]], folder: Path, ranks: int, per_node: int | None = None
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return what each case found in stages, and what the same recipe finds in one process."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    found = []
    for world in (ranks, 1):
        asked = {
            name: {"task": task, "recipe_fields": {"pipeline": 2, **fields} if world > 1 else whole(fields)}
            for name, (task, fields) in cases.items()
        }
        env = {"CASES": json.dumps(asked), "CONFIG": str(folder / "config.json")}
        nodes = per_node if world > 1 else None
        found.append(torch.load(measure("pipelines.py", folder / f"{world}", world, nodes, env)))
    return {name: (found[0][name], found[1][name]) for name in cases}


def whole(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what of a recipe is the same in one process. Several data-parallel ranks share the batch."""
    own = ["pipeline", "virtual_stages", "tensor", "stages", "schedule"]
    own += ["micro", "accumulation"] if "sharding" in fields else []
    kept = {name: value for name, value in fields.items() if name not in own}
    return {**kept, "sharding": "fsdp"} if kept.get("sharding") == "hybrid" else kept


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: those of packed weights may be NaN, which no NaN equals."""
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("cases", [TWO, pytest.param(TWO_MORE, marks=pytest.mark.thorough)], ids=["", "more"])
def test_two_stages_end_with_the_bits_of_one_process(
    cases: dict[str, tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    for name, (staged, one) in compare(cases, tmp_path, ranks=2).items():
        first, last = map(set, staged["of each rank"])
        assert first and last and not first & last, name
        assert staged["parameters"].keys() == one["parameters"].keys(), name
        for part, value in one["parameters"].items():
            assert torch.equal(bits(staged["parameters"][part]), bits(value)), (name, part)
        for what in ("losses", "weights", "evaluated"):
            assert staged[what] == one[what], (name, what)
        # get_total_norm of bf16 gradients is in bf16.
        assert staged["norms"] == pytest.approx(one["norms"], rel=5e-3 if name.endswith("bf16") else ORDER), (
            name
        )


REPLICAS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("gpt", {"sharding": "zero1"}),
    "second derivatives": ("forces", {"sharding": "zero1", "activations": "checkpoint", **ZERO_BUBBLE}),
}


@pytest.mark.parametrize(
    "cases", [REPLICAS, pytest.param(FOUR, marks=pytest.mark.thorough)], ids=["", "more"]
)
def test_four_ranks_train_like_one(cases: dict[str, tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    for name, (staged, one) in compare(cases, tmp_path, ranks=4).items():
        _close(name, staged, one)


@pytest.mark.parametrize(
    "cases",
    [pytest.param(BOTH, marks=pytest.mark.slow), pytest.param(BOTH_MORE, marks=pytest.mark.thorough)],
    ids=["", "more"],
)
def test_two_stages_that_share_their_layers_train_like_one_rank(
    cases: dict[str, tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    for name, (staged, one) in compare(cases, tmp_path, ranks=4).items():
        _close(name, staged, one)


@pytest.mark.thorough
def test_eight_ranks_in_all_three_dimensions_train_like_one(tmp_path: Path) -> None:
    for name, (staged, one) in compare(EIGHT, tmp_path, ranks=8).items():
        _close(name, staged, one)


@pytest.mark.thorough
def test_hybrid_in_each_stage_trains_like_one_rank(tmp_path: Path) -> None:
    """Eight ranks on four nodes: each stage has two shards on each of two nodes."""
    hybrid = {"sharding": "hybrid", "micro": 1, "accumulation": 2}
    for name, (staged, one) in compare({"hybrid": ("gpt", hybrid)}, tmp_path, ranks=8, per_node=2).items():
        _close(name, staged, one)


def _close(name: str, staged: dict[str, Any], one: dict[str, Any]) -> None:
    for what in ("losses", "norms", "weights", "evaluated"):
        rel = NORM_OVER_4_BITS if "qlora" in name and what == "norms" else ORDER
        assert staged[what] == pytest.approx(one[what], rel=rel), (name, what)
    assert staged["parameters"].keys() == one["parameters"].keys(), name
    for part, value in one["parameters"].items():
        assert (staged["parameters"][part] - value).abs().max() < ADAM, (name, part)


def gpt(**fields: Any) -> Job:
    train = {"lr": 1e-2, "checkpoint_every": None, **fields.pop("train", {})}
    args = {**GPT, **fields.pop("args", {})}
    return job(task="launcher.tasks.gpt:PydocGPT", args=args, steps=STEPS, train=train, **fields)


def staged(sharding: str = "none", accumulation: int = 4, **fields: Any) -> Recipe:
    return recipe(sharding, micro=2, accumulation=accumulation, pipeline=2, **fields)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two stages, dropout, clipping, a checkpoint after the third step and after the last one."""
    run = prepare(tmp_path_factory.mktemp("pipeline") / "run", gpt(args={"dropout": 0.2}, train=SAVING))
    ended = start(run, staged(), env=SUPERVISED)
    assert ended.codes == {0: 0, 1: 0}, ended.output
    reasons = {event.kind: event.as_json().get("reason") for event in run.read_events()}
    assert "a stage that runs out of memory leaves its neighbours waiting" in reasons["recovery-off"]
    return run


SAVING = {"checkpoint_every": 3, "keep_checkpoints": 3}


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("backward", 0),
        *(
            pytest.param(phase, rank, marks=pytest.mark.thorough)
            for phase, rank in (
                ("forward", 0),
                ("forward", 1),
                ("backward", 1),
                ("data", 0),
                ("optimizer", 1),
            )
        ),
    ],
)
def test_a_stage_out_of_memory_ends_all_at_once_and_no_step_is_lost(
    undisturbed: RunDir, tmp_path: Path, phase: str, rank: int
) -> None:
    run = prepare(tmp_path / "run", gpt(args={"dropout": 0.2}))
    _restarts_after(run, staged(), 2, f"rank={rank},step=3,phase={phase}", rank)
    assert losses(run) == losses(undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ["forward", "backward", "evaluation", "checkpoint"])
@pytest.mark.parametrize("rank", ["all", "1", "last"])
def test_four_ranks_in_two_stages_lose_no_step(tmp_path: Path, phase: str, rank: str) -> None:
    evaluates = STEPS if phase == "evaluation" else None  # 590 micro-batches, which take 10 s
    asked = gpt(args={"dropout": 0.2}, train={"eval_every": evaluates, "checkpoint_every": 2})
    runs = [prepare(tmp_path / name, asked) for name in ("run", "undisturbed")]
    two = staged("fsdp", accumulation=2)
    assert set(start(runs[1], two, ranks=4).codes.values()) == {0}
    step = {"checkpoint": 2, "evaluation": STEPS}.get(phase, 4)
    drill = f"rank={rank},step={step},phase={phase}"
    _restarts_after(runs[0], two, 4, drill, {"all": None, "1": 1, "last": 3}[rank], resumed=None)
    assert losses(runs[0]) == losses(runs[1])


def _restarts_after(
    run: RunDir, chosen: Recipe, ranks: int, drill: str, failing: int | None, resumed: int | None = 2
) -> None:
    ended = start(run, chosen, ranks=ranks, env={**SUPERVISED, "TRAIN_MEMORY_FAIL": drill})
    assert EXIT_OOM in (ended.codes.values() if failing is None else [ended.codes[failing]]), ended.output
    again = start(run, chosen, ranks=ranks, env=SUPERVISED)
    remove_handover(run, 0)
    assert set(again.codes.values()) == {0}, again.output
    [found] = [(one.step, one.from_) for one in run.read_events() if isinstance(one, Resumed)]
    assert resumed is None or found == (resumed, "shared-memory")


@pytest.mark.slow
def test_interleaved_stages_lose_no_step_and_their_checkpoint_is_read_on_other_meshes(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", gpt(args={"layers": 4}, train=SAVING))
    _restarts_after(run, staged(**INTERLEAVED), 2, "rank=1,step=3,phase=backward", 1)
    before = losses(run)
    for attempt, (then, ranks) in enumerate(((staged(), 2), (recipe("none", micro=8), 1)), start=2):
        shutil.rmtree(run.checkpoints / "step-00000005")
        assert set(start(run, then, ranks=ranks).codes.values()) == {0}
        expected = {step: before[step] for step in (4, 5)}
        assert losses(run, attempt=attempt) == pytest.approx(expected, rel=ORDER)
    shutil.rmtree(run.checkpoints / "step-00000005")
    assert set(start(run, staged(**INTERLEAVED)).codes.values()) == {0}
    assert losses(run, attempt=4) == pytest.approx(expected, rel=ORDER)


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two stages of two ranks that share their layers, with dropout, clipping and checkpoints."""
    run = prepare(tmp_path_factory.mktemp("sharing") / "run", gpt(args={"dropout": 0.2}, train=SAVING))
    ended = start(run, staged(tensor=2), ranks=4, env=SUPERVISED)
    assert set(ended.codes.values()) == {0}, ended.output
    return run


@pytest.mark.parametrize(
    "drill",
    [
        pytest.param("rank=3,step=3,phase=backward,allocation=9", marks=pytest.mark.slow),
        *(
            pytest.param(f"rank={rank},step=3,phase={phase}", marks=pytest.mark.thorough)
            for rank, phase in (
                (0, "forward"),
                (1, "backward"),
                (2, "forward"),
                (2, "data"),
                (3, "optimizer"),
            )
        ),
    ],
)
def test_stages_that_share_layers_lose_no_step_either(sharing: RunDir, tmp_path: Path, drill: str) -> None:
    run = prepare(tmp_path / "run", gpt(args={"dropout": 0.2}))
    _restarts_after(run, staged(tensor=2), 4, drill, int(drill[len("rank=")]))
    assert losses(run) == losses(sharing)


@pytest.mark.slow
def test_stages_that_share_layers_resume_bit_for_bit(sharing: RunDir, tmp_path: Path) -> None:
    run = without(sharing, tmp_path, 5)
    assert set(start(run, staged(tensor=2), ranks=4).codes.values()) == {0}
    assert losses(run, attempt=1) == {step: losses(sharing)[step] for step in (4, 5)}
    mine, theirs = (tensors(one, tmp_path / f"{one.path.parent.name}.pt") for one in (run, sharing))
    assert mine.keys() == theirs.keys() and len(mine) > 60
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    [file] = export(run.checkpoints / "step-00000005", tmp_path / "exported")
    exported = load_file(file)
    assert exported.keys() == dict(PydocGPT(**GPT).model().named_parameters()).keys()
    assert all(torch.equal(value, mine[name]) for name, value in exported.items())


@pytest.mark.slow
def test_their_checkpoint_is_read_on_a_mesh_of_other_dimensions_and_by_one_rank(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", gpt(train={**SAVING, "checkpoint_every": 2}))
    assert set(start(run, staged(tensor=2), ranks=4).codes.values()) == {0}
    before = losses(run)
    shutil.rmtree(run.checkpoints / "step-00000005")
    shutil.rmtree(run.checkpoints / "step-00000004")
    both = recipe("fsdp", micro=4, tensor=2)
    assert set(start(run, both, ranks=4).codes.values()) == {0}
    assert losses(run, attempt=1) == pytest.approx({step: before[step] for step in (3, 4, 5)}, rel=ORDER)
    shutil.rmtree(run.checkpoints / "step-00000005")
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 0}
    assert losses(run, attempt=2) == pytest.approx({5: before[5]}, rel=ORDER)
    shutil.rmtree(run.checkpoints / "step-00000005")
    assert set(start(run, staged(tensor=2, schedule="gpipe"), ranks=4).codes.values()) == {0}
    assert losses(run, attempt=3) == pytest.approx({5: before[5]}, rel=ORDER)


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(undisturbed: RunDir, tmp_path: Path) -> None:
    run = without(undisturbed, tmp_path, 5)
    ended = start(run, staged())
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert losses(run, attempt=1) == {step: losses(undisturbed)[step] for step in (4, 5)}
    mine, theirs = (tensors(one, tmp_path / f"{one.path.parent.name}.pt") for one in (run, undisturbed))
    assert mine.keys() == theirs.keys() and len(mine) > 60
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    export(run.checkpoints / "step-00000005", tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        (staged(), 2),
        (recipe("none", micro=4, accumulation=2, tensor=2), 2),
        (recipe("fsdp", micro=4, tensor=2), 4),
    ],
    ids=["pipeline", "tensor", "both"],
)
def test_an_adapter_loses_no_step_and_its_checkpoint_is_read_by_one_rank_and_back(
    tmp_path: Path, mesh: Recipe, ranks: int
) -> None:
    adapter = {"kind": "lora", "rank": 4}
    asked = gpt(adapter={**adapter, "dropout": 0.2}, train=SAVING)
    runs = [prepare(tmp_path / name, asked) for name in ("run", "undisturbed")]
    assert set(start(runs[1], mesh, ranks=ranks).codes.values()) == {0}
    _restarts_after(runs[0], mesh, ranks, "rank=1,step=3,phase=backward", 1)
    assert losses(runs[0]) == losses(runs[1])

    run = prepare(tmp_path / "exact", gpt(adapter=adapter, train=SAVING))
    assert set(start(run, mesh, ranks=ranks).codes.values()) == {0}
    before = losses(run)
    for attempt, (then, count) in enumerate(((recipe("none", micro=8), 1), (mesh, ranks)), start=1):
        shutil.rmtree(run.checkpoints / "step-00000005")
        assert set(start(run, then, ranks=count).codes.values()) == {0}
        expected = {step: before[step] for step in (4, 5)}
        assert losses(run, attempt=attempt) == pytest.approx(expected, rel=ORDER)
    assert losses(run, attempt=2) == expected


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = prepare(tmp_path_factory.mktemp("plain") / "run", gpt(train=SAVING))
    assert start(run, staged()).codes == {0: 0, 1: 0}
    return run


@pytest.mark.parametrize(
    ("then", "ranks"),
    [
        pytest.param(recipe("none", micro=8), 1, id="one rank"),
        pytest.param(recipe("fsdp", micro=4), 2, id="fsdp 2", marks=pytest.mark.slow),
        pytest.param(staged("fsdp", 2), 4, id="pipeline 2 x fsdp 2", marks=pytest.mark.slow),
        pytest.param(staged(schedule="gpipe", stages=(1, 2)), 2, id="another cut", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_read_on_another_mesh(
    tmp_path: Path, plain: RunDir, then: Recipe, ranks: int
) -> None:
    run = without(plain, tmp_path, 5)
    ended = start(run, then, ranks=ranks)
    assert set(ended.codes.values()) == {0}, ended.output
    expected = {step: losses(plain)[step] for step in (4, 5)}
    assert losses(run, attempt=1) == pytest.approx(expected, rel=ORDER)


@pytest.mark.slow
def test_a_checkpoint_of_the_whole_model_is_read_by_stages(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", gpt(train=SAVING))
    assert start(run, recipe("none", micro=2, accumulation=4), ranks=1).codes == {0: 0}
    shutil.rmtree(run.checkpoints / "step-00000005")
    ended = start(run, staged())
    assert ended.codes == {0: 0, 1: 0}, ended.output
    before, after = losses(run, attempt=0), losses(run, attempt=1)
    assert after == pytest.approx({step: before[step] for step in (4, 5)}, rel=ORDER)


@pytest.mark.slow
def test_batch_norm_statistics_of_all_stages_reach_another_mesh(tmp_path: Path) -> None:
    """An evaluation right after the change of the mesh reads them."""
    asked = job(
        task="launcher.tasks.brain:BrainAutoencoder",
        model={"batch_norm": True},
        steps=2,
        train={"eval_every": 2},
    )
    run = prepare(tmp_path / "run", asked)
    assert start(run, staged()).codes == {0: 0, 1: 0}
    exported = {}
    for name, chosen, ranks in (("stages", staged(), 2), ("one", recipe("none", micro=2, accumulation=4), 1)):
        longer = prepare(run.path, asked.model_copy(update={"steps": asked.steps + 1}))
        copy = RunDir(shutil.copytree(longer.path, tmp_path / name))
        ended = start(copy, chosen, ranks=ranks)
        assert set(ended.codes.values()) == {0}, ended.output
        exported[name] = tensors(copy, tmp_path / f"{name}.pt", step=3)
    statistics = [name for name in exported["one"] if name.endswith("running_mean")]
    assert len(statistics) == 8
    for name in statistics:
        assert torch.allclose(exported["one"][name], exported["stages"][name], rtol=1e-5), name


def test_a_task_that_does_not_say_how_to_cut_its_model_is_refused(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job())
    start(run, staged())
    told = any_error(run.attempt(0))
    assert told["failure"] == "user-error"
    assert "needs pipeline() of the task, which Ragged does not have" in told["exception"]


@pytest.mark.slow
def test_a_block_that_passes_on_no_gradient_to_the_stage_before_is_refused(tmp_path: Path) -> None:
    task = {"task": "conditioned:Conditioned", "args": {"cut_at": 2}}
    run = prepare(tmp_path / "run", job(**task, steps=1))
    start(run, staged())
    told = error(run.attempt(0), 1)
    assert told["failure"] == "user-error"
    assert "the loss does not depend on the output of the previous stage" in told["exception"]


def without(run: RunDir, folder: Path, step: int) -> RunDir:
    """Return a copy of the run as it was before this checkpoint."""
    copy = RunDir(shutil.copytree(run.path, folder / "copy"))
    shutil.rmtree(copy.checkpoints / f"step-{step:08d}")
    return copy


def tensors(run: RunDir, into: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(run.checkpoints / f"step-{step:08d}", into)
    content = torch.load(into, weights_only=False)
    states = content["optimizer"]["state"].items()
    return content["model"] | {f"{name} {key}": v for name, one in states for key, v in one.items()}
