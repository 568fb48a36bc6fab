"""Tensor parallelism: ranks that share the layers train as one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.train.checkpoints.export import export
from launcher.train.compiling.compiling import missing_compiler
from launcher.train.tensor.cut_adapter import PARTIAL_GRADIENTS
from launcher.train.tensor.replicated_gradients import COMPARED
from tests.train.runs import measure

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

LOSS, NORM, MOVED = 3e-7, 2e-6, 6e-5
"""Largest relative differences of a loss, a norm and the sum of all updates in 5 steps. Two ranks of FSDP,
which only add gradients in another order, differ from one process by up to 1.3e-7, 4e-7 and 1.5e-5. Another
processor has other kernels: on one, FSDP alone and with tensor parallelism differ by 1.1e-6 and 4.6e-5."""
ONE_BF16 = 2**-8
"Relative distance of neighbouring numbers in bfloat16: the difference of a norm in `bf16-mixed`."
NORMED = {"loss": 5e-6, "norm": 5e-5}
"BatchNorm of a few samples amplifies roundings: the same, from FSDP with and without tensor parallelism."
ALONE, TENSOR = {"sharding": "none"}, {"sharding": "none", "tensor": 2}
FSDP, BOTH = {"sharding": "fsdp"}, {"sharding": "fsdp", "tensor": 2}
MODELS = ("llama", "gpt", "video", "brain", "qwen3 of transformers", "giant")
FURTHER: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "offload and adam-mini": ("llama", {"activations": "offload", "optimizer": "adam-mini"}, LOSS, NORM),
    "compress": ("gpt", {"activations": "compress"}, 2e-5, 1e-3),
    "lora": ("lora", {}, LOSS, NORM),
    "qlora": ("qlora", {}, LOSS, NORM),
}
"Parts of a row are compressed in other groups than the row."
MORE = (
    "gpt lora",
    "gpt qlora",
    "lora of transformers",
    "tied",
    "parts",
    "llama of transformers",
    "cohere of transformers",
    "giant lora",
)


def run(mode: str, folder: Path, ranks: int, cases: Any = None, **more: Any) -> Any:
    folder.mkdir()
    env = {"MODE": mode, "CASES": json.dumps(cases), **more.pop("env", {})}
    return measure("tensors.py", folder, ranks, env=env, **more)


def far(folder: Path, other: Path, label: str, name: str | None = None) -> tuple[bool, float]:
    """Whether both began with the same values, and how far apart they ended, relative to the updates."""
    ours, theirs = torch.load(folder / f"{label}.pt"), torch.load(other / f"{name or label}.pt")

    def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([value.double().flatten() for value in values.values()])

    assert list(ours["first"]) == list(theirs["first"])
    same = all(torch.equal(value, theirs["first"][key]) for key, value in ours["first"].items())
    moved = (flat(ours["last"]) - flat(ours["first"])).norm()
    return same, float((flat(ours["last"]) - flat(theirs["last"])).norm() / moved)


def check(found: dict[str, Any], expected: dict[str, Any], loss: float = LOSS, norm: float = NORM) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=loss)
    assert found["norms"] == pytest.approx(expected["norms"], rel=norm)
    assert found["weights"] == expected["weights"], "each sample counts once"
    assert expected["losses"][-1] < expected["losses"][0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return run("trained", folder / "alone", 1, cases_of(ALONE))


@pytest.fixture(scope="module")
def shared(folder: Path) -> dict[str, Any]:
    return run("trained", folder / "shared", 2, cases_of(TENSOR))


def cases_of(mesh: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    further = {label: (name, {**mesh, **fields}) for label, (name, fields, _, _) in FURTHER.items()}
    return {name: (name, mesh) for name in MODELS} | further


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_that_share_the_layers_train_like_one_process(
    model: str, alone: dict[str, Any], shared: dict[str, Any], folder: Path
) -> None:
    check(shared[model], alone[model])
    same, distance = far(folder / "alone", folder / "shared", model)
    assert same, "the initial values are the same bits"
    assert distance < MOVED


@pytest.mark.parametrize("label", FURTHER)
def test_so_do_they_with_further_recipes_and_an_adapter(
    label: str, alone: dict[str, Any], shared: dict[str, Any]
) -> None:
    check(shared[label], alone[label], *FURTHER[label][2:])


@pytest.mark.thorough
@pytest.mark.parametrize("model", MORE)
def test_so_do_models_with_tied_weights_or_a_matrix_in_parts(model: str, tmp_path: Path) -> None:
    expected = run("trained", tmp_path / "alone", 1, {model: (model, ALONE)})
    found = run("trained", tmp_path / "shared", 2, {model: (model, TENSOR)})
    check(found[model], expected[model], **(NORMED if model == "parts" else {}))
    same, distance = far(tmp_path / "alone", tmp_path / "shared", model)
    assert same and distance < MOVED


@pytest.mark.slow
def test_other_orders_of_sums_alone_are_as_far_apart(alone: dict[str, Any], folder: Path) -> None:
    # BatchNorm is of a rank's samples, and dropout differs on other ranks.
    models = [name for name in MODELS if name not in ("brain", "giant")]
    run("trained", folder / "reordered", 2, {name: (name, FSDP) for name in models})
    distances = {name: far(folder / "alone", folder / "reordered", name)[1] for name in models}
    assert MOVED / 10 < max(distances.values()) < MOVED, distances


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "llama" else pytest.mark.thorough)
        for name in MODELS + MORE
    ],
)
def test_it_goes_together_with_fsdp(model: str, tmp_path: Path) -> None:
    expected = run("trained", tmp_path / "fsdp", 2, {model: (model, FSDP)})
    found = run("trained", tmp_path / "both", 4, {model: (model, BOTH)})
    check(found[model], expected[model], **(NORMED if model in ("brain", "parts") else {}))
    same, distance = far(tmp_path / "fsdp", tmp_path / "both", model)
    assert same and distance < (10 if model == "parts" else 1) * MOVED


# (recipe, tolerance of the loss and of the norm in 5 steps): other roundings of 16-bit products, and other
# blocks of 8-bit states, make the larger ones. tests/train/recipes.py has those of a whole curve.
RECIPES: dict[str, tuple[dict[str, Any], float, float]] = {
    "bf16": ({"precision": "bf16"}, 3e-4, 2e-2),
    "bf16-mixed": ({"precision": "bf16-mixed"}, 2e-4, ONE_BF16),
    "fp16-mixed": ({"precision": "fp16-mixed", "grad_scaler": True}, 5e-5, 5e-4),
    "adamw-bf16": ({"optimizer": "adamw-bf16"}, 5e-6, 5e-5),
    "adamw-8bit": ({"optimizer": "adamw-8bit"}, 2e-5, 1e-3),
    "8-bit embeddings": ({"optimizer": "adamw-8bit", "embedding_states": "8-bit"}, 2e-5, 1e-3),
    "lion": ({"optimizer": "lion"}, LOSS, NORM),
    "lion-8bit": ({"optimizer": "lion-8bit"}, 1e-4, 2e-3),
    "cpu-optimizer": ({"offload": "cpu-optimizer"}, LOSS, NORM),
    "selective": ({"activations": "selective"}, LOSS, NORM),
    "every-second": ({"activations": "every-second"}, LOSS, NORM),
    "checkpoint": ({"activations": "checkpoint"}, LOSS, NORM),
    "offload": ({"activations": "offload"}, LOSS, NORM),
    "adam-mini": ({"optimizer": "adam-mini"}, LOSS, NORM),
    "compress": ({"activations": "compress"}, 1e-4, 5e-3),
    "adam-mini on the host": ({"optimizer": "adam-mini", "offload": "cpu-optimizer"}, LOSS, NORM),
    "loss in parts": ({"loss_chunks": 3}, LOSS, NORM),
    "accumulation": ({"accumulation": 2}, LOSS, NORM),
    "step in backward": ({"optimizer_step": "backward", "train": {"clip_norm": None}}, LOSS, NORM),
}
SHARDED: dict[str, tuple[dict[str, Any], float, float]] = {
    "fsdp-keep": ({"sharding": "fsdp-keep"}, LOSS, NORM),
    "offload": ({"offload": "cpu"}, LOSS, NORM),
    "one synchronisation": ({"grad_sync": "last", "accumulation": 2}, LOSS, NORM),
    "activations on the host": RECIPES["offload"],
    "offload of everything": (
        {"offload": "cpu", "activations": "offload", "optimizer": "adam-mini"},
        LOSS,
        NORM,
    ),
    **{
        name: RECIPES[name]
        for name in ("bf16-mixed", "adamw-8bit", "step in backward", "loss in parts", "compress", "adam-mini")
    },
}


@pytest.mark.slow
def test_each_recipe_gives_what_it_gives_without_tensor_parallelism(tmp_path: Path) -> None:
    cases = {name: fields for name, (fields, _, _) in RECIPES.items()}
    expected = run(
        "trained", tmp_path / "one", 1, {n: ("llama", {**ALONE, **fields}) for n, fields in cases.items()}
    )
    found = run(
        "trained", tmp_path / "two", 2, {n: ("llama", {**TENSOR, **fields}) for n, fields in cases.items()}
    )
    for name, (_, loss, norm) in RECIPES.items():
        check(found[name], expected[name], loss, norm)


@pytest.mark.slow
def test_each_rank_reads_its_part_of_weights_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**CONFIG)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "weights")
    env, parts = {"WEIGHTS": str(tmp_path / "weights")}, {"loss_chunks": 3}

    def trained(folder: str, ranks: int, mesh: dict[str, Any]) -> dict[str, Any]:
        model = "weights of transformers"
        cases = {"whole": (model, mesh), "in parts": (model, {**mesh, **parts})}
        return run("trained", tmp_path / folder, ranks, cases, env=env)

    expected = trained("alone", 1, ALONE)
    for folder, ranks, mesh in (("tensor", 2, TENSOR), ("both", 4, BOTH)):
        found = trained(folder, ranks, mesh)
        for name in found:
            check(found[name], expected[name])
            same, distance = far(tmp_path / "alone", tmp_path / folder, name)
            assert same and distance < MOVED


WITH_ADAPTER = (
    "bf16-mixed",
    "adamw-8bit",
    "step in backward",
    "loss in parts",
    "checkpoint",
    "compress",
    "offload",
)
"Of RECIPES, alone and with FSDP."


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize(("ranks", "mesh"), [(2, TENSOR), (4, BOTH), (4, {"sharding": "zero1", "tensor": 2})])
def test_so_does_each_recipe_of_an_adapter(
    kind: str, ranks: int, mesh: dict[str, Any], tmp_path: Path
) -> None:
    names = [name for name in WITH_ADAPTER if "zero1" not in mesh.values() or name != "step in backward"]
    made = {name: RECIPES[name] for name in names}
    found, expected = (
        run("trained", tmp_path / str(count), count, {n: (kind, {**on, **made[n][0]}) for n in names})
        for count, on in ((ranks, mesh), (1, ALONE))
    )
    for name, (_, loss, norm) in made.items():
        check(found[name], expected[name], loss, norm)


def test_what_an_adapter_drops_differs_only_where_each_rank_has_a_part_of_it(tmp_path: Path) -> None:
    found = run("dropped", tmp_path / "dropped", 2)
    # Backward adds up the gradient of the input of each of the two layers that are cut by outputs, once.
    assert found.pop("exchanged") == (2 if PARTIAL_GRADIENTS else 4)
    assert found == {"same masks": {"0": True, "2": True, "3": False}, "same state": True}


REPLICAS: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "ddp": ("llama", {"sharding": "ddp"}, LOSS, NORM),
    "zero1": ("llama", {"sharding": "zero1", "accumulation": 2}, LOSS, NORM),
    "zero1, tied": ("tied", {"sharding": "zero1"}, LOSS, NORM),
    "zero1, whole layers": ("gpt", {"sharding": "zero1"}, LOSS, NORM),
    "zero1, adamw-8bit": ("llama", {"sharding": "zero1", "optimizer": "adamw-8bit"}, 2e-5, 1e-3),
    "zero1, adam-mini": ("llama", {"sharding": "zero1", "optimizer": "adam-mini"}, LOSS, NORM),
    "zero1, on the host": ("gpt", {"sharding": "zero1", "offload": "cpu-optimizer"}, LOSS, NORM),
    "ddp, bf16-mixed": ("llama", {"sharding": "ddp", "precision": "bf16-mixed"}, 2e-4, ONE_BF16),
}


@pytest.mark.slow
def test_groups_with_copies_of_the_model_train_like_copies(tmp_path: Path) -> None:
    cases = {name: (model, fields) for name, (model, fields, _, _) in REPLICAS.items()}
    expected = run("trained", tmp_path / "copies", 2, cases)
    shared = {name: (model, {**fields, "tensor": 2}) for name, (model, fields) in cases.items()}
    found = run("trained", tmp_path / "groups", 4, shared)
    for name, (_, _, loss, norm) in REPLICAS.items():
        check(found[name], expected[name], loss, norm)
        same, distance = far(tmp_path / "copies", tmp_path / "groups", name)
        assert same and (distance < MOVED or loss > LOSS), (name, distance)


@pytest.mark.thorough
@pytest.mark.parametrize("hybrid", [False, True])
def test_each_recipe_of_fsdp_does_too(hybrid: bool, tmp_path: Path) -> None:
    cases = {n: one for n, one in SHARDED.items() if not (hybrid and one[0].get("sharding"))}
    both = {"sharding": "hybrid", "tensor": 2} if hybrid else BOTH
    expected = run(
        "trained", tmp_path / "fsdp", 2, {n: ("llama", {**FSDP, **one[0]}) for n, one in cases.items()}
    )
    found = run(
        "trained",
        tmp_path / "both",
        4,
        {n: ("llama", {**both, **one[0]}) for n, one in cases.items()},
        per_node=2 if hybrid else None,
    )
    for name, (_, loss, norm) in cases.items():
        check(found[name], expected[name], loss, norm)


ZERO1 = {"sharding": "zero1", "tensor": 2}
ALIKE = ("llama", "lion", "gpt", "mini", "lora", "qlora")
"Cases whose losses are the same on any mesh: the others draw dropout, or have BatchNorm of other samples."


def read(folder: Path, before: Path, ranks: int, mesh: dict[str, Any], names: dict[str, Any]) -> Any:
    cases = {label: (name, {**mesh, **fields}) for label, (name, fields) in names.items()}
    return run("restored", folder, ranks, cases, env={"FROM": str(before)})


@pytest.mark.slow
@pytest.mark.parametrize("writer", [BOTH, ZERO1], ids=["fsdp", "zero1"])
def test_a_checkpoint_is_resumed_bit_for_bit_and_read_on_any_other_mesh(writer: Any, tmp_path: Path) -> None:
    names = {"llama": ("llama", {}), "brain": ("brain", {}), "lion": ("tied", {"optimizer": "lion"})}
    eight = {"optimizer": "adamw-8bit"}
    names |= {name: (name, {}) for name in ("lora", "lora dropout", "qlora")}
    names["mini"] = ("llama", {"optimizer": "adam-mini", "activations": "offload"})
    names |= {"8 bit": ("llama", eight), "blocks": ("wide", eight), "dropout": ("dropout", {})}
    cases = {label: (name, {**writer, **fields}) for label, (name, fields) in names.items()}
    saved = run("saved", tmp_path / "saved", 4, cases)
    for label, found in saved.items():
        assert found["restored"] == 2 and found["different"] == [[]] * 4, label
        assert found["losses"][0] == found["losses"][1], label
    same_parts = ZERO1 if writer is BOTH else BOTH
    for number, (ranks, mesh) in enumerate(((2, FSDP), (2, TENSOR), (1, ALONE), (4, same_parts))):
        found = read(tmp_path / str(number), tmp_path / "saved", ranks, mesh, names)
        if mesh is not same_parts:
            assert "were saved in 2 x 2 shards and cannot be read in" in found.pop("8 bit")
        for label, one in found.items():
            assert one["different"] == [], (label, ranks, mesh)
            if label in ALIKE:
                assert one["loss"] == pytest.approx(saved[label]["losses"][0][0], rel=LOSS)


@pytest.mark.parametrize(
    "names",
    [
        {"llama": ("llama", {})},
        pytest.param(
            {
                "lion": ("tied", {"optimizer": "lion"}),
                "gpt": ("gpt", {}),
                "brain": ("brain", {}),
                "blocks": ("wide", {"optimizer": "adamw-8bit"}),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["", "more"],
)
def test_copies_of_groups_go_on_in_one_process_and_then_in_shards(names: Any, tmp_path: Path) -> None:
    cases = {label: (name, {**ZERO1, **fields}) for label, (name, fields) in names.items()}
    saved, before = run("saved", tmp_path / "saved", 4, cases), tmp_path / "saved"
    for hop, (ranks, mesh) in enumerate(((1, ALONE), (4, BOTH))):
        folder = tmp_path / str(hop)
        for label, one in read(folder, before, ranks, mesh, names).items():
            assert one["different"] == [], (label, mesh)
            if label in ALIKE:
                assert one["loss"] == pytest.approx(saved[label]["losses"][0][hop], rel=LOSS)
        before = folder


@pytest.mark.slow
def test_an_export_has_whole_tensors_under_the_names_of_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run("saved", tmp_path / "saved", 2, {"llama": ("llama", TENSOR)})
    run("trained", tmp_path / "alone", 1, {"llama": ("llama", ALONE)})
    checkpoint = tmp_path / "saved" / "llama" / "checkpoints" / "step-00000002"
    [file] = export(checkpoint, tmp_path / "exported")
    found, whole = load_file(file), torch.load(tmp_path / "saved" / "llama" / "whole-2.pt")
    names = torch.load(tmp_path / "alone" / "llama.pt")["first"].keys()
    assert found.keys() == names
    assert all(torch.equal(found[name], whole[name]) for name in names)


@pytest.mark.slow
def test_a_handover_is_taken_on_the_same_mesh_and_on_others(tmp_path: Path) -> None:
    eight, mini = {"optimizer": "adamw-8bit"}, {"optimizer": "adam-mini"}
    cases = {
        "same": ("llama", TENSOR, {**TENSOR, "activations": "checkpoint"}),
        "same in 8 bit": ("llama", {**TENSOR, **eight}, {**TENSOR, **eight}),
        "to fsdp": ("tied", TENSOR, FSDP),
        "from fsdp": ("brain", FSDP, TENSOR),
        "lora": ("lora dropout", TENSOR, TENSOR),
        "lora to fsdp": ("lora", TENSOR, FSDP),
        "qlora to fsdp": ("qlora", TENSOR, FSDP),
        "from fsdp with adam-mini": ("llama", {**FSDP, **mini}, {**TENSOR, **mini}),
        "to fsdp with adam-mini": ("llama", {**TENSOR, **mini}, {**FSDP, **mini}),
        "to fsdp in 8 bit": ("llama", {**TENSOR, **eight}, {**FSDP, **eight}),
    }
    found = run("handed", tmp_path / "handed", 2, cases)
    layout = "the state has another layout: other shapes, sharding, tensor"
    assert found.pop("to fsdp in 8 bit")["resumed"] == [0, None, layout]
    for name, one in found.items():
        assert one["resumed"] == [2, "shared-memory", None] and one["different"] == [], name


@pytest.mark.slow
def test_of_copies_of_a_group_a_handover_has_one(tmp_path: Path) -> None:
    ddp = {"sharding": "ddp", "tensor": 2}
    cases = {
        "ddp": ("llama", ddp, ddp),
        "ddp to fsdp": ("gpt", ddp, BOTH),
        "ddp in 8 bit": ("llama", {**ddp, "optimizer": "adamw-8bit"}, {**ddp, "optimizer": "adamw-8bit"}),
        "zero1": ("llama", ZERO1, ZERO1),
        "zero1 to tensor and fsdp": ("tied", ZERO1, BOTH),
    }
    found = run("handed", tmp_path / "handed", 4, cases)
    for name, one in found.items():
        assert one["resumed"] == [2, "shared-memory", None] and one["different"] == [], name
        # Ranks 2 and 3 have copies of all that ranks 0 and 1 have, apart from states under ZeRO-1.
        assert [size > 0 for size in one["written"]] == [True] * 2 + [name.startswith("zero1")] * 2, name


def test_copies_of_whole_layers_stay_equal_if_their_gradients_do_not(tmp_path: Path) -> None:
    backward = {"optimizer_step": "backward", "train": {"clip_norm": None}}
    cases = {"after": ("brain", TENSOR), "backward": ("brain", {**TENSOR, **backward})}
    found = run("drifting", tmp_path / "drifting", 2, cases)
    assert found == {name: {"copies": 21, "same": True} for name in cases}


def test_a_gradient_of_a_part_of_the_activations_is_not_taken_for_that_of_a_whole_layer(
    tmp_path: Path,
) -> None:
    backward = {"optimizer_step": "backward", "train": {"clip_norm": None}}
    meshes = {"after": TENSOR, "backward": {**TENSOR, **backward}}
    found = run("partly", tmp_path / "partly", 2, meshes)
    whole = run(
        "partly", tmp_path / "whole", 1, {name: {**mesh, "tensor": 1} for name, mesh in meshes.items()}
    )
    for name in meshes:
        told = found[f"Tempered {name}"]
        assert "the ranks of a group have different gradients of blocks." in told
        assert "mlp.1.scale, which is whole on each of them" in told
        for task in ("Planned", "Tempered"):
            assert found[f"Planned {name}"] == pytest.approx(whole[f"{task} {name}"], rel=NORM)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [BOTH, {**TENSOR, "pipeline": 2}], ids=["fsdp", "pipeline"])
def test_every_rank_is_told_of_it_also_those_without_the_parameter(mesh: Any, tmp_path: Path) -> None:
    """One of two shards of a parameter of one element is empty, and one of two stages does not have it."""
    found = run("partly", tmp_path / "partly", 4, {"mesh": mesh})
    assert "blocks.1.mlp.1.scale, which is whole on each of them" in found["Tempered mesh"]
    assert len(found["Planned mesh"]) == 2


def test_a_gradient_that_could_be_rounding_is_told_once_by_one_rank(tmp_path: Path) -> None:
    first, second = run("faint", tmp_path / "faint", 2)
    assert first.count("different gradients of blocks.1.mlp.1.scale") == 1 and "may be rounding" in first
    assert not second


def test_steps_that_overflow_are_not_compared(tmp_path: Path) -> None:
    found = run("overflowing", tmp_path / "overflowing", 2)
    assert len(found["norms"]) == 3 and not {*found["norms"]} - {"inf", "nan"}
    assert "mlp.1.scale, which is whole on each of them" in found["told"]


def test_float8_layers_that_ranks_share_are_scaled_as_on_one_rank(tmp_path: Path) -> None:
    """A value at the border of two float8 numbers may be rounded to either one, after sums in another order:
    gradients differ by up to 5e-3, those of float8 and bf16-mixed by up to 9e-2."""
    models = ("gpt", "llama")

    def trained(ranks: int, **mesh: Any) -> Any:
        cases = {name: (name, {"precision": "float8", **mesh}) for name in models}
        return run("trained", tmp_path / str(ranks), ranks, cases)

    cut, one = trained(2, **TENSOR), trained(1, **ALONE)
    for label in models:
        assert cut[label]["float8"] == one[label]["float8"] > 0
        assert cut[label]["losses"] == pytest.approx(one[label]["losses"], rel=1e-3)
        assert cut[label]["norms"] == pytest.approx(one[label]["norms"], rel=2e-2)


def test_a_gradient_that_is_zero_in_the_first_steps_is_compared_once_it_is_not(tmp_path: Path) -> None:
    found = run("late", tmp_path / "late", 2)
    assert "mlp.1.scale, which is whole on each of them" in found["told"]
    assert found["step"] > 2 * COMPARED


COMPILES = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
RECOMPUTED = {"compile": True, "activations": "checkpoint"}


@COMPILES
@pytest.mark.parametrize(
    "cases",
    [
        {"eager, recomputed": {"activations": "checkpoint"}},
        pytest.param(
            {
                "eager": {},
                "compiled": {"compile": True},
                "compiled, recomputed": RECOMPUTED,
                "selective": {**RECOMPUTED, "activations": "selective"},
                "budget": {**RECOMPUTED, "activations": "budget", "activation_budget": 0.0},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["", "more"],
)
def test_ranks_drop_other_activations_where_they_are_cut_and_the_same_ones_where_they_are_not(
    cases: Any, tmp_path: Path
) -> None:
    """What each rank drops is read from gradients, and output and gradients follow from it."""
    for passes in run("masked", tmp_path / "masked", 2, cases).values():
        for one in passes:
            (first, after), (second, same) = one["dropped"]
            assert first != second and after == same
            assert one["output"] < 1e-6 and one["gradient"] < 1e-6
        assert passes[0]["dropped"] != passes[1]["dropped"]


BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven": ("llama", {}),
    "gpt": ("gpt", {}),
    "video": ("video", {}),
    "brain": ("brain", {}),
    "norms of heads": ("qwen3 of transformers", {}),
    "lora": ("lora", {}),
    "checkpoint": ("llama", {"activations": "checkpoint"}),
    "selective": ("llama", {"activations": "selective"}),
    "every second": ("llama", {"activations": "every-second"}),
    "budget": ("llama", {"activations": "budget", "activation_budget": 0.3}),
}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("llama", BOTH),
    "fsdp, recomputed": ("gpt", {**BOTH, "activations": "checkpoint"}),
    "ddp": ("llama", {"sharding": "ddp", "tensor": 2}),
    "zero1": ("gpt", ZERO1),
    "pipeline": ("llama", {**TENSOR, "pipeline": 2, "accumulation": 2}),
}


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "label"), [*((2, label) for label in BLOCKS), *((4, label) for label in MESHES)]
)
def test_compiled_blocks_that_ranks_share_train_like_eager_ones(
    ranks: int, label: str, tmp_path: Path
) -> None:
    name, fields = (BLOCKS | MESHES)[label]
    fields = {**TENSOR, **fields}
    plain = {key: value for key, value in fields.items() if not key.startswith("activation")}
    cases = {"eager": (name, plain), "compiled": (name, {**fields, "compile": True})}
    found = run("trained", tmp_path / "trained", ranks, cases)
    check(found["compiled"], found["eager"], **(NORMED if name == "brain" else {}))
    same, distance = far(tmp_path / "trained", tmp_path / "trained", "compiled", "eager")
    assert same and distance < (10 if name == "brain" else 1) * MOVED


@COMPILES
@pytest.mark.slow
def test_a_compiled_run_with_dropout_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    found = run("saved", tmp_path / "saved", 2, {"dropout": ("dropout", {**TENSOR, "compile": True})})
    assert found["dropout"]["restored"] == 2 and found["dropout"]["different"] == [[]] * 2
    assert found["dropout"]["losses"][0] == found["dropout"]["losses"][1]


def test_what_cannot_be_cut_is_told_and_dropout_differs_where_activations_are_cut(tmp_path: Path) -> None:
    found = run("refused", tmp_path / "refused", 2)
    assert "Planless does not say how its layers are cut, and none is so large" in found["no plan"]
    assert "Its linear and embedding layers are layers.*.up. Return a plan" in found["no plan"]
    assert "names layers.*.upp, which the model does not have" in found["other names"]
    assert "a projection to 1 attention heads" in found["heads"]
    assert "model.layers.0.mlp.experts of Qwen3MoeForCausalLM has the style moe_tp_exp" in found["experts"]
    assert "attention.out of shape (64, 64) is packed in blocks of 64 values" in found["packed"]
    assert "no RowwiseParallel layer adds them up" in found["never whole"]
    assert all("the ranks of a group have different losses" in said for said in found["losses"])
    assert "create_graph=True through wide, which several ranks share" in found["gradient of a gradient"]
    assert "with tensor: 2 each rank has a part of it: call the module" in found["weight alone"]
    rounding, wrong = found["cancelling"][:2], found["cancelling"][2:]
    assert rounding == ["not refused"] * 2 and all("have different losses" in said for said in wrong)
    kept, *recomputed = found["across blocks"]
    assert recomputed == [kept, kept], "the recomputation draws the same numbers"
    assert found["same masks"] == {"1": False, "3": True}
    assert found["same state"]
