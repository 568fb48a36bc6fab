"""Models of transformers: what a checkpoint says is what is trained, sharded or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.tasks.huggingface import CausalLM
from launcher.train.task import TaskError
from tests.train.runs import measure

transformers = pytest.importorskip("transformers")


def llama(**fields: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=256, hidden_size=36, intermediate_size=50, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, **fields,
    )  # fmt: skip


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
    [(llama(), False), (llama(tie_word_embeddings=True), True), (gpt2(), True)],
    ids=["llama", "tied llama", "gpt2"],
)
def test_a_checkpoint_in_several_files_gives_transformers_own_logits(
    tmp_path: Path, config: Any, tied: bool
) -> None:
    theirs = checkpoint(config, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    task = CausalLM(str(tmp_path), context=32)
    model = built(task)
    tokens = torch.arange(64)[None]
    assert torch.equal(model(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert {type(block) for block in task.blocks(model)} == {type(theirs.base_model.get_submodule(
        "h.0" if config.model_type == "gpt2" else "layers.0"
    ))}  # fmt: skip
    total, weight = task.loss(model, torch.full((2, 9), 7))
    assert float(weight) == 16
    # transformers averages over the targets itself.
    expected = theirs(input_ids=torch.full((2, 9), 7), labels=torch.full((2, 9), 7)).loss
    assert float(total.detach()) / 16 == pytest.approx(float(expected.detach()), rel=1e-5)


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
    checkpoint(gpt2(), tmp_path / "three")
    config = json.loads((tmp_path / "three" / "config.json").read_text())
    (tmp_path / "three" / "config.json").write_text(json.dumps({**config, "n_layer": 4}))
    with pytest.raises(TaskError, match=r"three has no transformer\.h\.3\.ln_1\.weight.*\(12 in all\)"):
        built(CausalLM(str(tmp_path / "three"), context=32))
