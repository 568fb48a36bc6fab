"""The embedding and the head are gathered on their own: less memory, the same gradients bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from launcher.rundir.files import read_json_lines
from launcher.tasks.huggingface import CausalLM
from launcher.tasks.llama import LanguageModel
from launcher.train.outer_units import check_outer_units, embedding_and_head
from launcher.train.rank import SetupError
from tests.train.ragged import Ragged
from tests.train.runs import ALL_CASES, job, losses, measure, prepare, recipe, start

LAYERS = 3  # of outer_units.py
ARGS = {"layers": LAYERS, "dim": 32, "heads": 2, "context": 32}
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, {}), id="two ranks", marks=pytest.mark.slow),
        pytest.param((2, ALL_CASES), id="two ranks, all cases", marks=pytest.mark.slow),
        pytest.param((4, ALL_CASES), id="four ranks", marks=pytest.mark.thorough),
    ],
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ranks, env = request.param
    return measure("outer_units.py", tmp_path_factory.mktemp("units"), ranks, 2, env)


def test_the_gradients_are_those_of_a_step_with_both_in_the_root_bit_for_bit(
    measured: dict[str, Any],
) -> None:
    for name, found in measured.items():
        assert found["equal"], name
        assert found["apart"]["result"] == found["rooted"]["result"], name
        assert found["apart"]["names"] == found["rooted"]["names"], name


def test_a_micro_batch_gathers_and_reduces_each_of_them_once_in_however_many_parts_the_loss_is(
    measured: dict[str, Any],
) -> None:
    """Blocks are gathered twice unless they are kept; the embedding, the head and the root once."""
    for name, found in measured.items():
        blocks = LAYERS if name.startswith("fsdp-keep") else 2 * LAYERS
        apart, rooted = found["apart"]["collectives"], found["rooted"]["collectives"]
        assert (apart["all-gather"], rooted["all-gather"]) == (blocks + 3, blocks + 1), name
        assert (apart["reduce-scatter"], rooted["reduce-scatter"]) == (LAYERS + 3, LAYERS + 1), name
        assert found["apart"]["static"] and found["rooted"]["static"], name


def test_a_step_takes_less_memory(measured: dict[str, Any]) -> None:
    peaks = {name: (found["apart"]["peak"], found["rooted"]["peak"]) for name, found in measured.items()}
    for name, (apart, rooted) in peaks.items():
        # What is kept for the whole pass takes the same memory in any unit; the units reduce at other times.
        kept = name.startswith("fsdp-keep")
        assert apart == pytest.approx(rooted, rel=0.01) if kept else apart < rooted, (name, peaks)


def found_in(model: nn.Module, blocks: Any) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in embedding_and_head(model, blocks)]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ["tokens", "head"]),
        # The embedding's weight is used by no module of its own for the logits.
        ({"tied": True}, []),
        ({"hidden": 40_000, "vocabulary": 128}, []),  # a thousandth of a block
    ],
)
def test_a_llama_with_a_large_vocabulary_of_its_own_for_input_and_output_has_both(
    changes: dict[str, Any], found: list[str]
) -> None:
    task = LanguageModel(model=changes)
    model = task.model()
    assert found_in(model, task.blocks(model)) == found


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "llama", **CONFIG}, ["model.embed_tokens", "lm_head"]),
        ({"model_type": "qwen3", **CONFIG, "tie_word_embeddings": True}, []),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256}, []),  # tied
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_models_of_transformers_have_both_unless_they_are_tied(
    config: dict[str, Any], found: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = CausalLM(str(tmp_path))
    model = task.model()
    assert found_in(model, task.blocks(model)) == found


class Branches(nn.Module):
    """Two output layers, of which a step may use one; and an embedding that both could belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.heads = nn.ModuleDict({"one": nn.Linear(8, 64), "other": nn.Linear(8, 64)})


def test_where_it_is_not_clear_which_one_is_the_head_the_root_has_all() -> None:
    model = Branches()
    assert found_in(model, model.blocks) == []
    del model.heads["other"]
    assert found_in(model, model.blocks) == ["tokens", "heads.one"]
    nn.utils.parametrizations.weight_norm(model.heads["one"])
    assert found_in(model, model.blocks) == []


def test_a_head_with_a_hook_of_the_model_stays_in_the_root() -> None:
    """The hook would see the sum of a loss in parts, not the logits of each."""
    model = Branches()
    del model.heads["other"]
    model.heads["one"].register_forward_hook(lambda module, inputs, output: output * 0.5)
    assert found_in(model, model.blocks) == []
    with pytest.raises(SetupError, match=r"heads.one, which has a forward hook"):
        check_outer_units(model, list(model.blocks), [model.heads["one"]])


def test_a_task_has_no_units_of_its_own_unless_it_says_so() -> None:
    task = Ragged()
    assert list(task.outer_units(task.model())) == []


@pytest.mark.parametrize(
    ("units", "why"),
    [
        (lambda model: [model], "returned the whole model"),
        (lambda model: [model.blocks[0]], "blocks.0, which overlaps with a block"),
        (lambda model: [model.heads["other"], model.heads], "returned heads, which overlaps"),
        (lambda model: [model.tokens], "tokens, which shares a weight with another module"),
    ],
)
def test_units_that_fsdp_cannot_have_are_refused_with_what_to_do(units: Any, why: str) -> None:
    model = Branches()
    model.heads["one"].weight = model.tokens.weight
    with pytest.raises(SetupError, match=why):
        check_outer_units(model, list(model.blocks), units(model))


def test_a_weight_that_is_used_without_its_module_is_the_users_error_with_what_to_do(tmp_path: Path) -> None:
    fields = {"args": ARGS, "steps": 1}
    run = prepare(tmp_path / "run", job(task="outer_units:Direct", **fields))
    ended = start(run, recipe("fsdp"))
    assert ended.codes != {0: 0, 1: 0}
    assert "uses a weight outside of its module's forward" in ended.output
    assert "outer_units() of the task does not return its module" in " ".join(ended.output.split())
    run = prepare(tmp_path / "rooted", job(task="outer_units:DirectRooted", **fields))
    assert start(run, recipe("fsdp")).codes == {0: 0, 1: 0}


@pytest.mark.slow
def test_a_task_may_read_the_weight_of_a_head_that_was_called_in_steps_and_in_evaluation(
    tmp_path: Path,
) -> None:
    fields = {"args": ARGS, "steps": 2, "train": {"eval_every": 1}}
    found = {}
    for task in ("Reading", "ReadingRooted"):
        run = prepare(tmp_path / task, job(task=f"outer_units:{task}", **fields))
        ended = start(run, recipe("fsdp"))
        assert ended.codes == {0: 0, 1: 0}, ended.output
        found[task] = [(line["loss"], line["eval_loss"]) for line in read_json_lines(run.metrics)]
    assert found["Reading"] == found["ReadingRooted"]


@pytest.mark.slow
def test_a_checkpoint_of_a_run_with_both_in_the_root_goes_on_bit_for_bit(tmp_path: Path) -> None:
    train = {"checkpoint_every": 3}
    rooted = job(task="outer_units:Rooted", args=ARGS, train=train)
    run = prepare(tmp_path / "run", rooted)
    assert start(run, recipe("fsdp", loss_chunks=3)).codes == {0: 0, 1: 0}
    undisturbed = losses(run, attempt=0)
    (run.checkpoints / "step-00000006").rename(tmp_path / "put away")
    run = prepare(run.path, job(task="launcher.tasks.gpt:PydocGPT", args=ARGS, train=train))
    ended = start(run, recipe("fsdp", loss_chunks=3))
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert losses(run, attempt=1) == {step: undisturbed[step] for step in (4, 5, 6)}
