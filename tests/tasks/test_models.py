"""The models that come with launcher: their sizes, what they compute, and that they learn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from launcher.tasks import brain, llama, video
from launcher.tasks.images import DigitClassifier
from launcher.tasks.video_data import evenly
from launcher.train.task import Task


def filled(task: Task) -> nn.Module:
    with torch.device("meta"):
        model = task.model()
    model.to_empty(device="cpu")
    task.initialise(model, seed=0)
    return model


def parameters(task: Task) -> list[int]:
    with torch.device("meta"):
        return [parameter.numel() for parameter in task.model().parameters()]


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ("1b", 1_235_814_400),
        ("7b", 6_738_415_616),
        ("13.14b", 13_142_798_336),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_llama_shapes_have_the_published_sizes(shape: str, count: int) -> None:
    assert sum(parameters(llama.LanguageModel(shape))) == count


def test_the_sizes_of_the_field_reports_are_met() -> None:
    assert llama.SHAPES["13.14b"].layers == 57
    assert sum(parameters(llama.LanguageModel("13.14b"))) == pytest.approx(13.14e9, rel=0.005)
    counts = parameters(brain.BrainAutoencoder("8b"))
    assert sum(counts) == pytest.approx(8.36e9, rel=0.005)
    assert round(max(counts) / 2**30, 2) == 6.26  # GiB that one byte for each of its elements takes
    assert sum(parameters(brain.BrainAutoencoder("8b", parts=8))) == sum(counts)
    assert sum(parameters(video.VideoLanguageModel("2b"))) == pytest.approx(2e9, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_computes_what_transformers_computes(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    task = llama.LanguageModel("tiny", model={"tied": tied}, context=32)
    model, shape = filled(task), task.shape
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.dim, intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, rms_norm_eps=shape.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
            tie_word_embeddings=tied,
        )
    )  # fmt: skip
    names = {
        "tokens": "model.embed_tokens", "decoder.blocks": "model.layers", "decoder.norm": "model.norm",
        "head": "lm_head", "attention_norm": "input_layernorm", "attention.": "self_attn.",
        "feed_forward_norm": "post_attention_layernorm", "feed_forward.": "mlp.", "query": "q_proj",
        "key": "k_proj", "value": "v_proj", "out.": "o_proj.", "gate": "gate_proj", "up.": "up_proj.",
        "down": "down_proj",
    }  # fmt: skip
    renamed = {}
    for name, value in model.state_dict().items():
        for ours, other in names.items():
            name = name.replace(ours, other)
        renamed[name] = value
    assert not theirs.load_state_dict(renamed, strict=not tied).unexpected_keys
    theirs.tie_weights()
    batch = torch.stack([task.data("train")[index] for index in range(4)])
    expected = nn.functional.cross_entropy(
        theirs(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
    )
    torch.testing.assert_close(task.loss(model, batch)[0], expected, rtol=1e-5, atol=0)


def test_no_cast_spoils_the_rotary_positions() -> None:
    model = filled(llama.LanguageModel("tiny")).to(torch.bfloat16)
    assert not list(model.buffers())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cos, sin = llama.rotary_table(4096, 16, 10_000.0, torch.device("cpu"))
    assert float(cos[4095, 0, 0]) == pytest.approx(math.cos(4095), abs=1e-4)
    assert float(sin[4095, 0, 4]) == pytest.approx(math.sin(40.95), abs=1e-4)


@pytest.mark.parametrize("task", [llama.LanguageModel(context=8), video.VideoLanguageModel(max_frames=2)])
def test_targets_that_are_all_ignored_weigh_nothing_and_give_no_nan(task: Any) -> None:
    model, data = filled(task), task.data("train")
    if isinstance(task, video.VideoLanguageModel):
        batch = task.collate([data[0], data[1]])
        total, weight = model(batch["frames"], batch["tokens"], torch.full_like(batch["targets"], -100), 2)
    else:
        tokens = data[0][None, :-1]
        total, weight = model(tokens, torch.full_like(tokens, -100), 2)
        assert [float(value) for value in model(tokens[:0], tokens[:0], 1)] == [0, 0]
    total.backward()
    assert (float(total.detach()), int(weight)) == (0.0, 0)
    assert all(p.grad is None or not p.grad.isnan().any() for p in model.parameters())


def test_padding_behind_a_text_changes_no_loss() -> None:
    task = video.VideoLanguageModel(max_frames=3)
    model, data = filled(task), task.data("train")
    samples = [data[index] for index in range(3)]
    apart = sum(float(task.loss(model, task.collate([sample]))[0].detach()) for sample in samples)
    together = float(task.loss(model, task.collate(samples))[0].detach())
    assert together == pytest.approx(apart, rel=1e-5)


def test_frames_are_taken_evenly() -> None:
    assert evenly(12, 4).tolist() == [0, 3, 6, 9]
    assert evenly(12, 12).tolist() == list(range(12))
    assert evenly(2, 5).tolist() == [0, 0, 0, 1, 1]


def trained(task: Task, model: nn.Module, epochs: int, batch: int) -> nn.Module:
    data = task.data("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for indices in torch.randperm(len(data), generator=generator).split(batch)[:-1]:
            total, weight = task.loss(model, task.collate([data[int(index)] for index in indices]))
            (total / weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def test_the_classifier_reads_handwriting_it_has_not_seen() -> None:
    torch.manual_seed(0)
    task = DigitClassifier()
    model = trained(task, task.model(), epochs=4, batch=64)
    pictures, labels = task.data("eval")[:]
    assert float((model(pictures).argmax(dim=1) == labels).float().mean()) > 0.9


@pytest.mark.slow
def test_the_brain_autoencoder_predicts_most_of_the_voxels_variance() -> None:
    task = brain.BrainAutoencoder(parts=4)
    model = trained(task, filled(task), epochs=1, batch=32)
    data = task.data("eval")
    batch = default_collate([data[index] for index in range(len(data))])
    total, weight = task.loss(model, batch)
    assert float(total.detach()) / float(weight) < 0.5 * float(batch[3].var())
