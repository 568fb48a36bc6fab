"""Run on ranks by test_tensor.py: built-in models, trained alone and on meshes with tensor parallelism."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

import launcher.train.task
from launcher.rundir.layout import RunDir
from launcher.spec.adapter import Adapter
from launcher.spec.job import Job
from launcher.spec.mesh import data_ranks
from launcher.tasks.gpt import PydocGPT
from launcher.train import model
from launcher.train.activations.activations import apply_activations
from launcher.train.adapters.adapter import with_adapter
from launcher.train.adapters.nf4 import NF4Linear
from launcher.train.checkpoints.folder import CheckpointError
from launcher.train.compiling.compiling import apply_compile
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.float8 import to_float8
from launcher.train.giant_layers import giant_layers
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, SetupError, join_ranks, this_place, this_rank
from launcher.train.scaler import START
from launcher.train.task import Task, TaskError
from launcher.train.tensor.replicated_gradients import COMPARED
from launcher.train.tensor_parallel import ReplicatedInCutRegion, parallelize, styles_of
from runs import HERE, recipe
from saves import bits, different, everywhere

STEPS, BATCH = 5, 8
LLAMA, BRAIN = "launcher.tasks.llama:LanguageModel", "launcher.tasks.brain:BrainAutoencoder"
HUGGING_FACE = "launcher.tasks.huggingface:CausalLM"
NORMED = {"model": {"batch_norm": True}, "batch": {"global": 32}}
JOBS: dict[str, dict[str, Any]] = {
    # Ranks have 16 and 15 tokens of a sequence, and unequal parts of the feed-forward layers.
    "llama": {"task": LLAMA, "args": {"context": 31, "model": {"hidden": 191}}},
    "tied": {"task": LLAMA, "args": {"context": 16, "model": {"tied": True, "vocabulary": 257}}},
    "wide": {"task": LLAMA, "args": {"context": 16, "model": {"dim": 512, "hidden": 512, "layers": 1}}},
    "gpt": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 2, "dim": 32, "heads": 2, "context": 32},
    },
    "dropout": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 1, "dim": 16, "heads": 2, "context": 8, "dropout": 0.3},
    },
    "video": {"task": "launcher.tasks.video:VideoLanguageModel", "args": {"max_frames": 5}},
    "brain": {"task": BRAIN, **NORMED},
    "lora": {"task": LLAMA, "args": {"context": 31}, "adapter": {"kind": "lora", "rank": 4}},
    "qlora": {
        "task": LLAMA,
        "args": {"context": 31, "model": {"dim": 128, "hidden": 256}},
        "adapter": {"kind": "qlora", "rank": 4},
    },
    "gpt qlora": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 2, "dim": 128, "heads": 2, "context": 32},
        "adapter": {"kind": "qlora", "rank": 4, "targets": ["qkv", "mlp.2"]},
    },
    "lora dropout": {
        "task": LLAMA,
        "args": {"context": 16},
        "adapter": {"kind": "lora", "rank": 4, "dropout": 0.3},
    },
    "gpt lora": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 2, "dim": 32, "heads": 2, "context": 32},
        "adapter": {"kind": "lora", "rank": 4, "targets": ["qkv", "out", "mlp.0", "mlp.2", "head"]},
    },
    "lora of transformers": {
        "task": HUGGING_FACE,
        "args": {"path": "qwen3", "context": 24},
        "adapter": {"kind": "lora", "rank": 4},
    },
    "parts": {"task": BRAIN, "args": {"parts": 4}, **NORMED},
    "giant": {"task": "tensors:Giant"},
    "giant lora": {
        "task": "tensors:Giant",
        "adapter": {"kind": "lora", "rank": 4, "targets": ["wide", "norms.1", "voxels"]},
    },
    "llama of transformers": {"task": HUGGING_FACE, "args": {"path": "llama", "context": 24}},
    "qwen3 of transformers": {"task": HUGGING_FACE, "args": {"path": "qwen3", "context": 24}},
    "cohere of transformers": {"task": HUGGING_FACE, "args": {"path": "cohere", "context": 24}},
    "experts of transformers": {"task": HUGGING_FACE, "args": {"path": "qwen3_moe", "context": 24}},
    "weights of transformers": {
        "task": HUGGING_FACE,
        "args": {"path": os.environ.get("WEIGHTS"), "context": 24},
    },
}
MORE_JOBS: dict[str, dict[str, Any]] = json.loads(os.environ.get("JOBS", "{}"))
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "cohere": {"use_qk_norm": True, "tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
"What the configs of models of transformers have beside CONFIG."


def job(name: str, **train: Any) -> Job:
    settings = {"lr": 1e-3, "warmup_steps": 2, "clip_norm": 0.5, "checkpoint_every": None, **train}
    fields = {"name": "tensor", "batch": {"global": BATCH}, "steps": STEPS, "train": settings}
    made = Job.model_validate({**fields, **(JOBS | MORE_JOBS)[name]})
    if made.args.get("path") in OF_TRANSFORMERS:
        kind = made.args["path"]
        path = Path(sys.argv[1]).parent / f"{kind}-{os.environ.get('RANK', 0)}.json"
        path.write_text(json.dumps({"model_type": kind, **CONFIG, **OF_TRANSFORMERS[kind]}))
        made.args["path"] = str(path)
    return made


def trainer(rank: Rank, name: str, folder: Path | None = None, **fields: Any) -> Trainer:
    """`fields`: of the recipe; `train`: of the job."""
    asked = job(name, **fields.pop("train", {}))
    chosen = recipe(**fields)
    data = data_ranks(chosen, rank.world)
    micro = asked.batch.global_ // data // chosen.grad_accum
    changes = {"recipe": chosen.model_copy(update={"micro_batch_size": micro}), "job": asked}
    if folder is not None:
        changes["run"] = RunDir(folder)
    return Trainer(Rank(**{**vars(rank), **changes}), Where(), Unlimited())


def trained(rank: Rank, out: Path) -> Any:
    """The loss and norm of each step of each of CASES; and in a file, the whole parameters.

    Float8 is emulated: the same roundings, without the matrix products of a GPU.
    """
    model.to_float8 = partial(to_float8, emulate=True)
    results: dict[str, Any] = {}
    for label, (name, fields) in json.loads(os.environ["CASES"]).items():
        made = trainer(rank, name, **fields)
        first = whole(made)
        steps = [made.train_step(step) for step in range(1, STEPS + 1)]
        last = whole(made)
        if rank.first:
            torch.save({"first": first, "last": last}, out.parent / f"{label}.pt")
        results[label] = {
            "float8": sum(type(module).__name__ == "Float8Linear" for module in made.model.modules()),
            "losses": [step.loss for step in steps],
            "norms": [step.grad_norm for step in steps],
            "weights": [step.weight for step in steps],
        }
        del made
        gc.collect()
    return results


@torch.no_grad()
def whole(made: Trainer) -> dict[str, torch.Tensor]:
    """Without weights that are packed in 4 bits: each rank has its own, which are no parts of a tensor."""
    state = made.model.state_dict()
    packed = {f"{name}.packed" for name, one in made.model.named_modules() if isinstance(one, NF4Linear)}
    kept = {name: value for name, value in state.items() if name not in packed}
    return {name.removeprefix("module."): full(value).clone() for name, value in kept.items()}


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def saved(rank: Rank, out: Path) -> Any:
    """Each of CASES trained to the end with a checkpoint after the second step, and again from there."""
    results: dict[str, Any] = {}
    for label, (name, fields) in json.loads(os.environ["CASES"]).items():
        folder = out.parent / label
        made = trainer(rank, name, folder, **fields)
        for step in (1, 2):
            made.train_step(step)
        _save(made, 2)
        rest = range(3, STEPS + 1)
        losses = [made.train_step(step).loss for step in rest]
        again = trainer(rank, name, folder, **fields)
        results[label] = {
            "restored": again.checkpoints.restore(),
            "losses": [losses, [again.train_step(step).loss for step in rest]],
            "different": everywhere(different(bits(made), bits(again))),
        }
    return results


def _save(made: Trainer, step: int) -> None:
    """Save a checkpoint, and the whole state in a file beside it."""
    made.checkpoints.save(step)
    kept = whole_state(made)
    if made.rank.first:
        torch.save(kept, made.rank.run.path / f"whole-{step}.pt")


def restored(rank: Rank, out: Path) -> Any:
    """The newest checkpoints in FROM, read on other ranks: what differs from the saved state. The next step,
    and a checkpoint after it."""
    results: dict[str, Any] = {}
    for label, (name, fields) in json.loads(os.environ["CASES"]).items():
        folder = out.parent / label
        if rank.first:
            shutil.copytree(Path(os.environ["FROM"]) / label, folder)
        dist.barrier()
        made = trainer(rank, name, folder, **fields)
        try:
            step = made.checkpoints.restore()
        except CheckpointError as error:
            results[label] = str(error)
            continue
        differ = different(torch.load(folder / f"whole-{step}.pt"), whole_state(made))
        results[label] = {"different": differ, "loss": made.train_step(step + 1).loss}
        _save(made, step + 1)
    return results


def handed(rank: Rank, out: Path) -> Any:
    """The state of two steps, given under the first recipe of each of CASES and taken under the second."""
    results: dict[str, Any] = {}
    for label, (name, given, taken) in json.loads(os.environ["CASES"]).items():
        folder = out.parent / label
        made = trainer(rank, name, folder, **given)
        made.handover.resume()
        for step in (1, 2):
            made.train_step(step)
        written = made.handover.bytes()
        made.handover.give()
        dist.barrier()
        again = trainer(rank, name, folder, **taken)
        resumed = again.handover.resume()
        results[label] = {
            "written": everywhere(written),
            "resumed": [resumed.step, resumed.source, resumed.skipped],
            "different": different(whole_state(made), whole_state(again)) if resumed.step else [],
        }
    return results


@torch.no_grad()
def whole_state(made: Trainer) -> dict[str, torch.Tensor]:
    found = whole(made)
    for name, p in made.model.named_parameters():
        found |= {
            f"{name} {key}": full(value).clone() for key, value in made.optimizer.state.get(p, {}).items()
        }
    return found


def told(rank: Rank, out: Path) -> Any:
    """What ends the first step of each of CASES, by rank."""
    results: dict[str, Any] = {}
    for label, (name, fields) in json.loads(os.environ["CASES"]).items():
        try:
            trainer(rank, name, **fields).train_step(1)
        except (SetupError, TaskError) as error:
            results[label] = str(error)
        gc.collect()
    return everywhere(results)


def drifting(rank: Rank, out: Path) -> Any:
    """What rank 1 has of the whole parameters, if its kernels add the gradients of whole layers otherwise."""
    results: dict[str, Any] = {}
    for label, (name, fields) in json.loads(os.environ["CASES"]).items():
        made = trainer(rank, name, **fields)
        plain = [p for p in made.model.parameters() if not isinstance(p, DTensor)]
        for p in plain:
            p.register_hook(lambda gradient: gradient * (1 + rank.number / 1000))
        for step in (1, 2):
            made.train_step(step)
        sums = everywhere([float(p.detach().double().sum()) for p in plain])
        results[label] = {"copies": len(plain), "same": sums[0] == sums[1]}
    return results


class Planless(Task):
    def __init__(self, heads: int = 0) -> None:
        self.heads = heads

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8)}) for _ in range(2))}
        )

    def data(self, split: Any) -> Any:
        return []

    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise NotImplementedError


class Giant(Planless):
    """A task without a plan of its own, for which small layers count as giant."""

    def model(self) -> nn.Module:
        return Autoencoder()

    def parallel_plan(self, model: nn.Module) -> Any:
        with patch.object(launcher.train.task, "giant_layers", partial(giant_layers, least=2000)):
            return super().parallel_plan(model)

    def blocks(self, model: nn.Module) -> Any:
        return [model.wide, model.narrow]

    def data(self, split: Any) -> Any:
        return list(1 + torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) / 10)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch) - batch).square().mean(dim=1).sum(), len(batch)


class GradientPenalty(Giant):
    """A loss that contains a gradient."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x = batch.clone().requires_grad_()
        [gradient] = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum(), len(batch)


class WeightAlone(Giant):
    """A loss that computes with the weight of a cut layer."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        hidden = functional.linear(functional.pad(batch, (0, 1)), model.narrow.weight)
        return hidden.square().sum(), len(batch)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(101, 20), nn.Linear(20, 102)
        self.norms = nn.Sequential(nn.LayerNorm(102), nn.Linear(102, 7))
        self.voxels, self.drop = nn.Linear(7, 100), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu_(self.narrow(functional.pad(x, (0, 1), value=1.0)))
        hidden = hidden * self.narrow.out_features**-0.5
        return self.voxels(self.norms(self.drop(self.wide(hidden)).add_(1.0)))


class Misnamed(Planless):
    def parallel_plan(self, model: nn.Module) -> Any:
        return {"layers.*.upp": ColwiseParallel()}


class Cut(Planless):
    """Dropout after a layer that cuts, and after the one that adds up."""

    def model(self) -> nn.Module:
        drop = nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(4, 64), drop, nn.Linear(64, 64), nn.Dropout(0.5))

    def parallel_plan(self, model: nn.Module) -> Any:
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}


class NeverWhole(Cut):
    """The last layers get a part of the activations, and nothing adds up or gathers."""

    def parallel_plan(self, model: nn.Module) -> Any:
        return {"0": ColwiseParallel()}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))


class Pair(nn.Module):
    """Two layers that share activations, with a dropout of whole activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.drop(x) + self.down(hidden)


class Wrong(Planless):
    """A plan whose ranks compute different things."""

    def model(self) -> nn.Module:
        return Pair()

    def parallel_plan(self, model: nn.Module) -> Any:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def data(self, split: Any) -> Any:
        return list(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).square().sum(), len(batch)


class Cancelling(Wrong):
    """A loss whose summands cancel. On the second rank they differ by a share, as in another order."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share * dist.get_rank()

    def model(self) -> nn.Module:
        return nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    def loss(self, model: Any, batch: Any) -> Any:
        found = model["down"](model["up"](batch))
        return (found - found.detach() + self.share * found.detach().abs()).sum(), len(batch)


class Across(Wrong):
    """A block that cuts activations, and one that adds them up, with dropout in both."""

    def model(self) -> nn.Module:
        first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        return nn.Sequential(first, nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4), nn.Dropout(0.5)))

    def blocks(self, model: nn.Module) -> Any:
        return list(model.children())

    def parallel_plan(self, model: nn.Module) -> Any:
        return {"0.0": ColwiseParallel(), "1.1": RowwiseParallel()}


def refused(rank: Rank, out: Path) -> Any:
    """The words of what cannot be done, and where dropout differs between ranks."""

    def words(work: Callable[[], object]) -> str:
        try:
            work()
        except (SetupError, TaskError) as error:
            return str(error)
        return "not refused"

    def steps_of(name: str, **fields: Any) -> str:
        return words(lambda: trainer(rank, name, sharding="none", tensor=2, **fields).train_step(1))

    mesh = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tensor",))
    heads = {"task": LLAMA, "args": {"model": {"heads": 4, "kv_heads": 1}}}
    JOBS["heads"] = heads
    JOBS["narrow qlora"] = {"task": LLAMA, "adapter": {"kind": "qlora"}}
    found: dict[str, Any] = {
        "no plan": words(lambda: styles_of(Planless().model(), Planless(), rank.world)),
        "other names": words(lambda: styles_of(Misnamed().model(), Misnamed(), rank.world)),
        "heads": words(lambda: trainer(rank, "heads", sharding="none", tensor=2)),
        "packed": words(lambda: trainer(rank, "narrow qlora", sharding="none", tensor=2)),
        "experts": words(lambda: trainer(rank, "experts of transformers", sharding="none", tensor=2)),
    }
    JOBS["wrong"], JOBS["across"] = {"task": "tensors:Wrong"}, {"task": "tensors:Across"}
    later = {"optimizer_step": "backward", "train": {"clip_norm": None}}
    found["losses"] = [steps_of("wrong"), steps_of("wrong", **later)]
    JOBS["penalty"] = {"task": "tensors:GradientPenalty"}
    found["gradient of a gradient"] = steps_of("penalty")
    JOBS["weight"] = {"task": "tensors:WeightAlone"}
    found["weight alone"] = steps_of("weight")
    found["cancelling"] = []
    for share in (1e-6, 0.1):
        JOBS["cancelling"] = {"task": "tensors:Cancelling", "args": {"share": share}}
        found["cancelling"] += [steps_of("cancelling"), steps_of("cancelling", **later)]
    found["across blocks"] = []
    for kind in ("keep", "checkpoint", "selective"):
        made = trainer(rank, "across", sharding="none", tensor=2, accumulation=2, activations=kind)
        found["across blocks"].append([made.train_step(step).grad_norm for step in (1, 2, 3)])
    never = NeverWhole().model()
    parallelize(never, NeverWhole(), styles_of(never, NeverWhole(), rank.world), mesh)
    found["never whole"] = words(lambda: never(torch.ones(4, 4)))
    torch.manual_seed(0)
    model, dropped = Cut().model(), {}
    parallelize(model, Cut(), styles_of(model, Cut(), rank.world), mesh)
    for name in ("1", "3"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda _, __, y, name=name: dropped.update({name: (y == 0).tolist()}))
    model(torch.ones(1, 4))
    masks = everywhere(dropped)
    found["same masks"] = {name: masks[0][name] == masks[1][name] for name in ("1", "3")}
    found["same state"] = len({tuple(state) for state in everywhere(torch.get_rng_state().tolist())}) == 1
    return found


class Adapted(Cut):
    """Two layers that cut, of which the second follows the first, and one that adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = Adapter(kind="lora", dropout=0.5, targets=("0", "2", "3"))

    def model(self) -> nn.Module:
        return Joined(nn.Linear(64, 64), nn.Identity(), nn.Linear(64, 64), nn.Linear(64, 64))

    def blocks(self, model: nn.Module) -> Any:
        return [model]

    def parallel_plan(self, model: nn.Module) -> Any:
        return {"0": ColwiseParallel(), "2": ColwiseParallel(), "3": RowwiseParallel()}


class Joined(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, _, other, last = self
        return last(one(x) + other(x))


def dropped(rank: Rank, out: Path) -> Any:
    """Where what an adapter drops is the same on two ranks."""
    mesh = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    task, masks = Adapted(), dict[str, Any]()
    made = with_adapter(task.model(), task, recipe("none"))
    parallelize(made, task, styles_of(made, task, rank.world), mesh)
    for name in ("0", "2", "3"):
        dropout = made.get_submodule(name).lora_dropout["default"]
        dropout.register_forward_hook(
            lambda _, __, y, name=name: masks.update({name: (y.to_local() == 0).tolist()})
        )
    y = made(torch.ones(1, 64, requires_grad=True))
    with CommDebugMode() as exchanged:
        y.sum().backward()
    masks = everywhere(masks)
    return {
        "exchanged": exchanged.get_total_counts(),
        "same masks": {name: masks[0][name] == masks[1][name] for name in masks[0]},
        "same state": len({tuple(state) for state in everywhere(torch.get_rng_state().tolist())}) == 1,
    }


def masked(rank: Rank, out: Path) -> Any:
    """For each of CASES, fields of a recipe: what each rank drops in a block in two passes, before and after
    the layer that adds up, and how far the output and a gradient are from what these masks make of them."""
    mesh = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tensor",))
    results: dict[str, Any] = {}
    for label, fields in json.loads(os.environ["CASES"]).items():
        torch.manual_seed(0)
        block, chosen = Cut().model(), recipe(sharding="none", tensor=rank.world, **fields)
        numbers = parallelize(block, Cut(), styles_of(block, Cut(), rank.world), mesh)
        apply_activations([block], chosen, rank.device, Unlimited())
        apply_compile([block], chosen, rank.device, Unlimited(), numbers=numbers)
        x, found = torch.randn(1, 4), []
        for _ in range(2):
            block.zero_grad()
            y = block(x)
            y.sum().backward()
            first, second = ([local(p) for p in block[at].parameters()] for at in (0, 2))
            # A hidden value that was dropped has no gradient in the second weight.
            kept = 2.0 * (local(block[2].weight.grad).abs().sum(0) != 0)
            hidden = functional.linear(x, *first) * kept
            after, added = 2.0 * (y != 0), functional.linear(hidden, second[0])
            dist.all_reduce(added)
            gradient = ((after @ second[0]) * kept).T @ x
            found.append(
                {
                    "dropped": everywhere([kept.tolist(), after.tolist()]),
                    "output": float((y - (added + second[1]) * after).abs().max()),
                    "gradient": float((local(block[0].weight.grad) - gradient).abs().max()),
                }
            )
        results[label] = found
    return results


class Tempered(PydocGPT):
    """Has a parameter without an entry in the plan, used where a rank has a part of the activations."""

    factor = 1.0

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.blocks[-1].mlp[1] = Scaled(self.factor)
        return model


class Faint(Tempered):
    """The gradient of its parameter is so small that it could be rounding."""

    factor = 1e-4


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.scale, self.factor = nn.Parameter(torch.ones(1)), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * (1 + self.factor * (self.scale - 1)))


class Late(Tempered):
    """What its MLPs return is left out in the first steps, so that they have no gradient."""

    def loss(self, model: Any, batch: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        kept = [block.mlp[2].forward for block in model.blocks]
        for block, forward in zip(model.blocks, kept, strict=True):
            block.mlp[2].forward = partial(_times, forward, float(self.steps > 2 * COMPARED))
        try:
            return super().loss(model, batch)
        finally:
            for block in model.blocks:
                del block.mlp[2].forward


def _times(forward: Any, factor: float, x: torch.Tensor) -> torch.Tensor:
    return forward(x * factor)


class Planned(Tempered):
    def parallel_plan(self, model: nn.Module) -> Any:
        return super().parallel_plan(model) | {"blocks.1.mlp.1": ReplicatedInCutRegion()}


def partly(rank: Rank, out: Path) -> Any:
    """What ends a step if a parameter in a cut region is not in the plan, and the losses if it is."""
    results: dict[str, Any] = {}
    for label, fields in json.loads(os.environ["CASES"]).items():
        for task in (Tempered, Planned):
            name = f"{task.__name__} {label}"
            JOBS[name] = {**JOBS["gpt"], "task": f"tensors:{task.__name__}"}
            try:
                made = trainer(rank, name, **fields)
                results[name] = [made.train_step(step).grad_norm for step in (1, 2)]
            except TaskError as error:
                results[name] = str(error)
    told = everywhere(results)
    alike = {name: all(one[name] == told[0][name] for one in told) for name in results}
    return {name: told[0][name] if alike[name] else "ranks differ" for name in results}


def overflowing(rank: Rank, out: Path) -> Any:
    """What ends a step with a parameter in a cut region, after COMPARED steps that overflow."""
    JOBS["overflowing"] = {**JOBS["gpt"], "task": "tensors:Tempered"}
    half = {"precision": "fp16-mixed", "grad_scaler": True}
    made = trainer(rank, "overflowing", sharding="none", tensor=2, **half)
    norms = []
    try:
        for step in range(1, COMPARED + 2):
            made.scaler.factor = 2.0**40 if step <= COMPARED else START
            norms.append(str(made.train_step(step).grad_norm))
    except TaskError as error:
        return {"norms": norms, "told": str(error)}
    return {"norms": norms, "told": "not refused"}


def faint(rank: Rank, out: Path) -> Any:
    """What is printed of a parameter in a cut region whose gradient is always small."""
    JOBS["faint"] = {**JOBS["gpt"], "task": "tensors:Faint", "steps": 4 * COMPARED}
    made, printed = trainer(rank, "faint", sharding="none", tensor=2, precision="bf16-mixed"), io.StringIO()
    with redirect_stdout(printed):
        for step in range(1, 4 * COMPARED):
            made.train_step(step)
    return everywhere(printed.getvalue())


def late(rank: Rank, out: Path) -> Any:
    """What ends a step with a parameter in a cut region whose gradient is zero in the first steps."""
    JOBS["late"] = {**JOBS["gpt"], "task": "tensors:Late", "steps": 4 * COMPARED}
    made = trainer(rank, "late", sharding="none", tensor=2)
    for step in range(1, 4 * COMPARED):
        try:
            made.train_step(step)
        except TaskError as error:
            return {"step": step, "told": str(error)}
    return {"told": "not refused"}


MODES = {
    one.__name__: one
    for one in (
        trained,
        saved,
        restored,
        handed,
        drifting,
        dropped,
        masked,
        partly,
        overflowing,
        faint,
        late,
        refused,
        told,
    )
}


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    results = MODES[os.environ["MODE"]](rank, out)
    if rank.first:
        out.write_text(json.dumps(results))
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))
