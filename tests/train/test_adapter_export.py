"""`launcher export` of a training with an adapter: peft loads it, and the merged model equals it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

from launcher.api.merged_adapter import export_merged
from launcher.cli.main import app
from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.events import AdapterWarning
from launcher.train.adapters.frozen import FrozenWeights
from launcher.train.adapters.nf4 import NF4Linear, PackedPart, Packing
from launcher.train.checkpoints.content import Stored, Weight
from launcher.train.checkpoints.export import ExportError, export
from launcher.train.checkpoints.folder import MARKER, complete_checkpoints
from tests.train.adapted import Encoder
from tests.train.runs import job, prepare, recipe, start

TOKENS = torch.arange(24).reshape(2, 12) * 5 % 64


FSDP = {"sharding": "fsdp"}
TENSOR, PIPELINE = ({"sharding": "none", "accumulation": 2, name: 2} for name in ("tensor", "pipeline"))


def trained(folder: Path, kind: str, *, tied: bool = False, pretrained: bool = True, **fields: Any) -> RunDir:
    """A run of three steps on two ranks, over a model of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    np.random.default_rng(0).integers(0, 64, 2000, dtype=np.uint16).tofile(folder / "tokens.bin")
    args = {"path": str(folder / "model"), "pretrained": pretrained, "context": 12,
            "data": str(folder / "tokens.bin")}  # fmt: skip
    asked = job(
        task="launcher.tasks.huggingface:CausalLM",
        args=args,
        adapter={"kind": kind, "rank": 4, "alpha": 64, **fields.pop("adapter", {})},
        train={"lr": 0.05, "probe": "never"},
        steps=3,
    )
    run = prepare(folder / "run", asked)
    ended = start(run, recipe(**{**FSDP, **fields}))
    assert set(ended.codes.values()) == {0}, ended.output
    return run


def exported(run: RunDir, to: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["export", str(run.path), "--to", str(to), *options])
    assert done.exit_code == 0, done.output
    return done.output


def refused(run: RunDir, to: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["export", str(run.path), "--to", str(to), *options])
    assert done.exit_code == 4 and not to.exists(), done.output
    return done.output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("lora", 1), *(pytest.param("qlora", ranks, marks=pytest.mark.slow) for ranks in (1, 2))],
)
def test_a_weight_that_is_read_or_has_two_names_is_trained_evaluated_and_merged(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    keeps = kind == "lora"
    asked = job(
        task="adapted:Encoder",
        args={"keeps": keeps},
        adapter={"kind": kind, "rank": 4},
        train={"lr": 0.02, "probe": "never", "eval_every": 1},
        steps=3,
    )
    run = prepare(tmp_path / "run", asked)
    ended = start(run, recipe("fsdp" if ranks > 1 else "none", micro=8 // ranks), ranks)
    assert set(ended.codes.values()) == {0}, ended.output
    losses = [row["eval_loss"] for row in run.read_metrics()]
    exported(run, tmp_path / "adapter")
    exported(run, tmp_path / "merged", "--merge")
    task = Encoder(keeps)
    model, held_out = task.model(), task.data("eval")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    loss, weight = task.loss(model.eval(), held_out)
    assert loss.item() / weight == pytest.approx(losses[-1], rel=1e-5), "evaluation has the adapter"
    assert len(set(losses)) == 3
    after = model.state_dict()
    assert torch.equal(after["blocks.0.again.weight"], after["blocks.0.up.weight"])
    moved = {name for name in after if not torch.allclose(after[name], before[name], atol=0.05)}
    layers = ("encoder.linear1", "encoder.linear2", "up", "again", "read")
    assert moved == {f"blocks.{number}.{layer}.weight" for number in (0, 1) for layer in layers}

    told = [event for event in run.read_events() if isinstance(event, AdapterWarning)]
    unchanged = [["blocks.0.kept", "blocks.1.kept"]] if keeps else []
    assert [event.names for event in told] == [*unchanged, ["blocks.0.read", "blocks.1.read"]]
    assert all(event.reason in ended.output for event in told)


def test_an_adapter_is_not_exported_without_a_buffer_that_the_training_changed(tmp_path: Path) -> None:
    asked = job(task="adapted:Following", adapter={"kind": "lora"}, train={"probe": "never"}, steps=1)
    run = prepare(tmp_path / "run", asked)
    ended = start(run, recipe("none", micro=8), 1)
    assert set(ended.codes.values()) == {0}, ended.output
    said = refused(run, tmp_path / "adapter")
    assert "peft's format has no place: level; export the whole model with --merge" in " ".join(said.split())
    exported(run, tmp_path / "merged", "--merge")
    assert load_file(tmp_path / "merged" / "model.safetensors")["level"] != 0


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("task", "layer", "message"),
    [
        ("Normed", "blocks.0.up", r"cannot be added to blocks\.0\.up\.weight: it is computed from other"),
        (
            "Tied",
            "blocks.0.read",
            r"blocks\.0\.read\.weight, blocks\.1\.read\.weight differ, but they are one",
        ),
    ],
)
def test_a_merge_that_would_lose_an_adapter_is_refused(
    tmp_path: Path, task: str, layer: str, message: str
) -> None:
    asked = job(task=f"adapted:{task}", adapter={"kind": "lora"})
    sizes = {"A": (16, 64), "B": (64, 16)}
    matrices = {f"{layer}.lora_{name}.default.weight": torch.ones(size) for name, size in sizes.items()}
    checkpoint = tmp_path / "checkpoint"
    save({"model": matrices}, checkpoint_id=checkpoint, no_dist=True)
    replace_json(checkpoint / MARKER, {"step": 1, "adapter": {"kind": "lora"}})
    frozen = FrozenWeights(asked, recipe("none"), str(Path(__file__).parent))
    with pytest.raises(ExportError, match=message):
        export(checkpoint, tmp_path / "merged", frozen=frozen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "mesh"), [(False, FSDP), (True, FSDP), (False, TENSOR), (True, TENSOR), (False, PIPELINE)]
)
def test_peft_and_transformers_load_the_adapter_and_the_merged_model_equals_it(
    tmp_path: Path, tied: bool, mesh: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    run = trained(tmp_path, "lora", tied=tied, **mesh)
    assert "wrote adapter_model.safetensors" in exported(run, tmp_path / "adapter")
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = logits(base)
    own = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    theirs = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"))
    assert torch.equal(own, theirs) and not torch.allclose(own, before, atol=1e-2)

    assert "wrote model.safetensors" in exported(run, tmp_path / "merged", "--merge")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), own, atol=1e-4)
    assert ("lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")) or tied


@pytest.mark.slow
def test_an_adapter_on_a_tied_output_layer_unties_the_merged_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    run = trained(tmp_path, "lora", tied=True, adapter={"targets": ["q_proj", "lm_head"]})
    exported(run, tmp_path / "adapter")
    exported(run, tmp_path / "merged", "--merge")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    own = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not merged.config.tie_word_embeddings
    assert torch.allclose(logits(merged), own, atol=1e-4)
    written = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert written == {*merged.state_dict()}, "the frozen weights were not in the checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [FSDP, TENSOR])
def test_four_bit_weights_are_merged_as_the_training_saw_them(tmp_path: Path, mesh: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    run = trained(tmp_path, "qlora", adapter={"targets": ["q_proj", "down_proj"]}, **mesh)
    exported(run, tmp_path / "adapter")
    exported(run, tmp_path / "merged", "--merge")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for layer in base.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, NF4Linear(child, torch.float32))
    for module in base.modules():
        if isinstance(module, NF4Linear):
            weight = torch.nn.Parameter(module.weight, requires_grad=False)
            module.__class__ = torch.nn.Linear
            del module.packed
            module.weight = weight
    own = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), own, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_merge_over_other_weights_is_refused_and_so_is_a_resume(tmp_path: Path, weight: str) -> None:
    transformers = pytest.importorskip("transformers")
    run = trained(tmp_path, "lora")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.get_parameter(weight).add_(0.5)
    model.save_pretrained(tmp_path / "model")
    said = refused(run, tmp_path / "merged", "--merge")
    assert "the adapter was trained over other weights than the task's model has now" in said
    ended = start(run, recipe("fsdp"))
    assert set(ended.codes.values()) != {0}
    assert "its adapter was trained over other frozen weights" in ended.output


def test_a_merge_has_the_precision_of_the_attempt_that_wrote_the_checkpoint(tmp_path: Path) -> None:
    run = trained(tmp_path, "lora")
    ended = start(run, recipe("fsdp", precision="bf16"))  # no step is left
    assert set(ended.codes.values()) == {0}, ended.output
    exported(run, tmp_path / "merged", "--merge")
    assert {weight.dtype for weight in load_file(tmp_path / "merged/model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_every_frozen_weight_has_its_value_in_a_merge(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        attention_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    asked = job(
        task="launcher.tasks.huggingface:CausalLM", args={"path": str(tmp_path)}, adapter={"kind": kind}
    )
    frozen = FrozenWeights(asked, recipe("none"), str(tmp_path))
    for name, weight in model.state_dict().items():
        packed = kind == "qlora" and "_proj.weight" in name
        assert torch.allclose(frozen.read(name), weight, atol=0.5 if packed else 0), name


def test_packed_weights_are_those_of_bitsandbytes() -> None:
    """On a CPU, bitsandbytes 0.50 decodes only rows of whole blocks correctly: those of a view here."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for shape in ((64, 64), (48, 80), (128, 96), (7, 33), (300, 200)):
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            packing = Packing(shape, dtype)
            found = packing.unpack(packing.pack(weight))
            assert (found - weight).abs().mean() < 0.08, "as near as 4 bits are"
            layer = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
            layer.weight = torch.nn.Parameter(weight)
            assert torch.equal(NF4Linear(layer, dtype).weight, found)
            if weight.numel() % 64 == 0:
                blocks = weight.view(-1, 64)
                codes, state = functional.quantize_4bit(blocks, compress_statistics=True, quant_type="nf4")
                assert torch.equal(found.view(-1, 64), functional.dequantize_4bit(codes, state))


def test_a_part_of_packed_weights_has_the_values_of_the_whole() -> None:
    pytest.importorskip("bitsandbytes")
    for shape, rows, columns in (
        ((300, 256), slice(0, 150), slice(0, 256)),
        ((300, 256), slice(200, 300), slice(0, 256)),
        ((1000, 192), slice(0, 1000), slice(64, 192)),
        ((1000, 640), slice(0, 1000), slice(320, 640)),
        ((64, 33), slice(0, 64), slice(0, 33)),
        ((256, 33), slice(64, 128), slice(0, 33)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            whole, weight = (
                Packing(shape, dtype),
                torch.randn(shape, generator=torch.Generator().manual_seed(2)),
            )
            part = PackedPart.of(whole, rows, columns)
            assert part is not None
            packed = part.pack(weight)
            assert packed.numel() == part.elements
            assert torch.equal(part.unpack(packed), whole.unpack(whole.pack(weight))[rows, columns])
    assert PackedPart.of(Packing((64, 96), torch.float32), slice(0, 64), slice(0, 48)) is None
    assert PackedPart.of(Packing((65, 33), torch.float32), slice(33, 65), slice(0, 33)) is None
    assert PackedPart.of(Packing((1, 64), torch.float32), slice(1, 1), slice(0, 64)) is None


def test_a_checkpoint_that_the_training_removes_during_an_export_is_said_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, "lora")
    checkpoint = complete_checkpoints(run.checkpoints)[3]
    read, kept = Stored.read, tmp_path / "kept"

    def removed_first(stored: Stored, weights: list[Weight]) -> dict[str, torch.Tensor]:
        checkpoint.rename(kept)
        return read(stored, weights)

    removed = "step-00000003 was removed during the export, as a training does with old checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(Stored, "read", removed_first)
        with pytest.raises(ExportError, match=removed):
            export(checkpoint, tmp_path / "out")
    for write in (lambda: export(checkpoint, tmp_path / "out"), lambda: merge(run, checkpoint, tmp_path)):
        with pytest.raises(ExportError, match=removed):
            write()
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def merge(run: RunDir, checkpoint: Path, folder: Path) -> object:
    return export_merged(run, checkpoint, folder / "out", None)


def test_checkpoints_that_were_copied_into_the_directory_of_a_new_run_are_merged(tmp_path: Path) -> None:
    run = trained(tmp_path, "lora")
    replace_json(run.plan, {"recipe": run.read_recipe(run.attempt(0))})
    shutil.rmtree(run.path / "attempts")
    exported(run, tmp_path / "merged", "--merge")
