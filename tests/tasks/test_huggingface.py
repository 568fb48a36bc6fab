"""Models of transformers: what a checkpoint says is what is trained, sharded or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.tasks.huggingface import CausalLM
from launcher.train.checkpoints.content import Weight
from launcher.train.checkpoints.export import export, say_dtype
from launcher.train.task import TaskError
from tests.tasks.test_text import word_tokenizer
from tests.train.runs import job, measure, prepare, recipe, start

transformers = pytest.importorskip("transformers")


def llama(**fields: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=256, hidden_size=36, intermediate_size=50, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, **fields,
    )  # fmt: skip


def tied_llama() -> Any:
    return llama(tie_word_embeddings=True)


def gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=256, n_embd=36, n_layer=3, n_head=6, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def checkpoint(config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def built(task: CausalLM) -> Any:
    with torch.device("meta"):
        model = task.model()
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    task.initialise(model, seed=0)
    return model.eval()


@pytest.mark.parametrize(
    ("config", "tied"),
    [(llama, False), (tied_llama, True), (gpt2, True)],
    ids=["llama", "tied llama", "gpt2"],
)
def test_a_checkpoint_in_several_files_gives_transformers_own_logits(
    tmp_path: Path, config: Callable[[], Any], tied: bool
) -> None:
    theirs = checkpoint(config(), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    task = CausalLM(str(tmp_path), context=32)
    model = built(task)
    tokens = torch.arange(64)[None]
    assert torch.equal(model(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert {type(block) for block in task.blocks(model)} == {type(theirs.base_model.get_submodule(
        "h.0" if config is gpt2 else "layers.0"
    ))}  # fmt: skip
    total, weight = task.loss(model, torch.full((2, 9), 7))
    assert float(weight) == 16
    # transformers averages over the targets itself.
    expected = theirs(input_ids=torch.full((2, 9), 7), labels=torch.full((2, 9), 7)).loss
    assert float(total.detach()) / 16 == pytest.approx(float(expected.detach()), rel=1e-5)


def mixtral() -> Any:
    return transformers.MixtralConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=12,
    )  # fmt: skip


def deepseek() -> Any:
    return transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


@pytest.mark.parametrize("config", [mixtral, deepseek])
def test_experts_that_are_stored_one_by_one_and_the_bias_of_their_router_are_read(
    tmp_path: Path, config: Callable[[], Any]
) -> None:
    theirs = checkpoint(config(), tmp_path)
    for name, buffer in theirs.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.linspace(1, -1, len(buffer)))
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.1." in name for name in stored)
    model = built(CausalLM(str(tmp_path), context=32))
    tokens = torch.arange(64)[None]
    assert torch.equal(model(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


@pytest.mark.skipif(transformers.__version__ < "5", reason="before transformers 5, each expert was a module")
def test_a_rank_reads_only_the_experts_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = checkpoint(mixtral(), tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    task = CausalLM(str(tmp_path), context=32)
    task.model()
    assert task.weights is not None
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        part = distribute_tensor(torch.empty_like(theirs.get_parameter(name)), mesh, [Shard(0)])
        read: list[str] = []
        for stored, file in list(task.weights._file.items()):
            monkeypatch.setitem(task.weights._file, stored, Read(file, read))
        assert task.weights.fill(part, [name])
    finally:
        dist.destroy_process_group()
    assert torch.equal(part.to_local(), theirs.get_parameter(name)[3:6])
    assert {int(stored.split(".")[5]) for stored in read} == {3, 4, 5}


class Read:
    """A file of safetensors that notes what is read whole."""

    def __init__(self, file: Any, read: list[str]) -> None:
        self.file, self.read, self.get_slice = file, read, file.get_slice

    def get_tensor(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.file.get_tensor(name)


def test_a_config_alone_begins_at_random_with_its_buffers_right_in_bf16(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    task = CausalLM(str(tmp_path / "config.json"), context=32)
    with torch.device("meta"):
        model = task.model().to(torch.bfloat16)  # as a recipe of pure bf16 does
    model.to_empty(device="cpu")
    task.initialise(model, seed=0)
    theirs = transformers.AutoModelForCausalLM.from_config(llama()).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, theirs)
    weights = dict(model.named_parameters())
    assert float(weights["model.layers.0.mlp.up_proj.weight"].detach().std()) == pytest.approx(0.02, rel=0.1)
    assert set(weights["model.norm.weight"].tolist()) == {1.0}


@pytest.mark.slow
def test_tied_weights_stay_one_parameter_on_two_ranks_and_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = checkpoint(gpt2(), tmp_path / "gpt2")
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "gpt2"))
    script = str(Path(__file__).parent / "tied.py")
    one, two = (measure(script, tmp_path / str(ranks), ranks) for ranks in (1, 2))
    assert one["tied"] == two["tied"] == [True, True]
    assert one["losses"][2] == one["losses"][3] and two["losses"][2] == two["losses"][3]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert one["losses"][2] < one["losses"][0]
    assert one["parameters"] == sum(parameter.numel() for parameter in theirs.parameters())


def test_what_is_wrong_with_a_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere is neither a config file nor a directory"):
        CausalLM("nowhere")
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=r"has no \*\.safetensors"):
        CausalLM(str(tmp_path), context=32, pretrained=True)
    with pytest.raises(TaskError, match="context: 65 is more than the 64 positions"):
        CausalLM(str(tmp_path), context=65)
    transformers.Qwen3MoeConfig(output_router_logits=True).save_pretrained(tmp_path / "experts")
    with pytest.raises(TaskError, match="asks for the experts' auxiliary loss"):
        CausalLM(str(tmp_path / "experts"))
    checkpoint(gpt2(), tmp_path / "three")
    config = json.loads((tmp_path / "three" / "config.json").read_text())
    (tmp_path / "three" / "config.json").write_text(json.dumps({**config, "n_layer": 4}))
    with pytest.raises(TaskError, match=r"three has no transformer\.h\.3\.ln_1\.weight.*\(12 in all\)"):
        built(CausalLM(str(tmp_path / "three"), context=32))


def test_weights_that_the_config_leaves_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tied_llama(), tmp_path)
    built(CausalLM(str(tmp_path), context=32))
    assert capsys.readouterr().out == ""
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}  # as earlier versions wrote it
    save_file(old, tmp_path / "model-old.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    written["weight_map"] |= dict.fromkeys(old, "model-old.safetensors")
    index.write_text(json.dumps(written))
    built(CausalLM(str(tmp_path), context=32))
    said = capsys.readouterr().out
    assert "config.json leaves out of the model: model.layers.2.input_layernorm.weight, " in said
    assert "layers.1." not in said and "inv_freq" not in said


def test_tied_weights_that_are_stored_with_different_values_are_refused(tmp_path: Path) -> None:
    """transformers unties them; one parameter cannot have both values."""
    transformers.AutoModelForCausalLM.from_config(tied_llama()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    built(CausalLM(str(tmp_path), context=32))
    save_file(weights | {"lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    with pytest.raises(TaskError, match=r"lm_head\.weight.* have different values, but the config ties them"):
        built(CausalLM(str(tmp_path), context=32))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("pytorch_model.bin", "", r"has no \*\.safetensors"),
        (INDEX, "", "json is not the index of a checkpoint"),
        (
            INDEX,
            '{"weight_map": {"a": "model-1.safetensors"}}',
            f"has no model-1.safetensors, which its {INDEX}",
        ),
    ],
)
def test_a_checkpoint_without_safetensors_does_not_begin_at_random(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(TaskError, match=message):
        CausalLM(str(tmp_path), context=32)
    assert CausalLM(str(tmp_path), context=32, pretrained=False).weights is None


def test_quantized_weights_are_not_taken_for_their_codes(tmp_path: Path) -> None:
    checkpoint(llama(), tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        codes = {
            name: weight.to(torch.float8_e4m3fn) if "mlp" in name else weight
            for name, weight in load_file(file).items()
        }
        save_file(codes, file)
    with pytest.raises(TaskError, match=r"layers\.0\.mlp\.\w+\.weight is quantized to F8_E4M3"):
        built(CausalLM(str(tmp_path), context=32))


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", [True, False])
def test_transformers_loads_what_export_writes(tmp_path: Path, pretrained: bool) -> None:
    checkpoint(llama(), tmp_path / "model")
    transformers.GenerationConfig(do_sample=True, top_k=7).save_pretrained(tmp_path / "model")
    word_tokenizer(tmp_path / "words")
    (tmp_path / "text.txt").write_text("red green red " * 200)
    args = {
        "path": str(tmp_path / "model"),
        "pretrained": pretrained,
        "context": 8,
        "data": str(tmp_path / "text.txt"),
        "tokenizer": str(tmp_path / "words"),
    }
    run = prepare(tmp_path / "run", job(task="launcher.tasks.huggingface:CausalLM", args=args, steps=2))
    ended = start(run, recipe("fsdp"))
    assert set(ended.codes.values()) == {0}, ended.output
    assert "torchao" not in ended.output and "_pytree" not in ended.output, "warnings of libraries"
    (run.checkpoints / "beside-weights" / "secret").symlink_to("/etc/passwd")
    out = tmp_path / "out"
    export(run.checkpoints / "step-00000002", out)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    halved = tmp_path / "halved"
    export(run.checkpoints / "step-00000002", halved, torch.bfloat16)
    assert json.loads((halved / "config.json").read_text())["dtype"] == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(halved)
    assert model.dtype is torch.bfloat16 and model.generation_config.top_k == 7
    assert not (out / "secret").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    ours = load_file(out / "model.safetensors")
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(out).tokenize("green red") == ["green", "red"]


def test_text_is_encoded_by_the_tokenizer_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, text = tmp_path / "model", tmp_path / "text.txt"
    checkpoint(llama(), model)
    text.write_text("red green red")
    task = CausalLM(str(model), context=3, data=str(text), held_out=0)
    assert task.data("train")[0].tolist() == [*b"red "]
    assert (
        "has no tokenizer, and the job names none: each byte of the data is a token"
        in capsys.readouterr().out
    )
    word_tokenizer(model)
    read, read_bytes = list[str](), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.suffix) or read_bytes(path))
    task = CausalLM(str(model), context=3, data=str(text), held_out=0)
    assert task.data("train")[0].tolist() == [2, 3, 2, 1]
    assert ".json" in read and ".safetensors" not in read, "weights may be larger than the host's memory"
    assert capsys.readouterr().out == ""


def test_a_tokenizer_of_one_file_is_exported_and_every_part_of_a_config_says_the_type(tmp_path: Path) -> None:
    config = llama()
    config.save_pretrained(tmp_path / "model")
    word_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    task = CausalLM(str(tmp_path / "model"), context=8, data=str(tmp_path / "tokens.bin"))
    task.export_files(tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("green") == ["green"]

    inner = {"torch_dtype": "float32", "quantization_config": {"dtype": "float32"}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner, "dtype": "float32"}))
    weights = [Weight("w", torch.Size([8]), torch.bfloat16), Weight("n", torch.Size([2]), torch.float32)]
    say_dtype(tmp_path / "config.json", weights)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {"text_config": {**inner, "torch_dtype": "bfloat16"}, "dtype": "bfloat16"}


@pytest.mark.parametrize("config", [llama, tied_llama, gpt2], ids=["llama", "tied", "gpt2"])
def test_a_loss_in_parts_is_that_of_all_logits_and_so_are_the_gradients(
    tmp_path: Path, config: Callable[[], Any]
) -> None:
    checkpoint(config(), tmp_path)
    task = CausalLM(str(tmp_path), context=32)
    assert task.uses_loss_chunks
    tokens = torch.arange(3 * 33).view(3, 33)
    found, shapes = [], list[tuple[int, ...]]()
    for chunks in (1, 5):
        task.loss_chunks, model = chunks, built(task)
        head = model.get_output_embeddings()
        head.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
        total, weight = task.loss(model, tokens)
        total.backward()
        found.append((float(total.detach()), float(weight), [p.grad for p in model.parameters()]))
    assert shapes == [(3, 32, 256), ()], "the output layer returns all logits, or the loss"
    (whole, weight, gradients), (parts, same, theirs) = found
    assert parts == pytest.approx(whole, rel=1e-6) and weight == same == 96
    for one, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "unchanged"), [("Qwen3Config", True), ("Gemma2Config", False), ("CohereConfig", False)]
)
def test_a_model_that_changes_its_logits_computes_the_loss_at_once(
    tmp_path: Path, family: str, unchanged: bool
) -> None:
    getattr(transformers, family)(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    ).save_pretrained(tmp_path)  # fmt: skip
    assert CausalLM(str(tmp_path), context=8).uses_loss_chunks == unchanged
