"""Run on every rank by test_optimizers.py: it trains, saves, resumes, and reads what others saved."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from launcher.rundir.layout import RunDir
from launcher.tasks import gpt
from launcher.train.checkpoints.checkpoints import Checkpoints
from launcher.train.checkpoints.folder import CheckpointError
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.optimizers.eight_bit import EightBit
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.scaler import LossScaler
from runs import HERE, job, recipe

STEPS = 20
BATCH = 8
# Rows of 256 and 1024 elements; rows of 72 and 288, and 72 x 72 is below 4096 elements on each of two ranks.
MODELS = {"aligned": 256, "crossing": 72}
LEARNING_RATES = {"lion": 3e-4, "lion-8bit": 3e-4}
OPTIMIZERS = ("adamw", "adamw-bf16", "adamw-8bit", "lion", "lion-8bit", "adam-mini")

# Each check once where it is hardest: fsdp on one rank trains as on two.
TRAINED = {1: ["none"], 2: ["ddp", "fsdp"]}
IN_BF16 = {(2, "fsdp"): OPTIMIZERS, (2, "ddp"): ("adamw-bf16",)}


class PlainLion(torch.optim.Optimizer):
    """The paper's algorithm 2, line by line, on whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = 0.9 * m + (1 - 0.9) * p.grad
                self.state[p]["m"] = 0.99 * m + (1 - 0.99) * p.grad
                p -= group["lr"] * (torch.sign(c) + group["weight_decay"] * p)


def shardings(world: int) -> list[str]:
    return ["none", "fsdp"] if world == 1 else ["ddp", "fsdp"]


def trainer(rank: Rank, optimizer: str, sharding: str, model: str, **changes: Any) -> Trainer:
    fields = {name: changes.pop(name) for name in ("precision", "offload") if name in changes}
    chosen = recipe(sharding, BATCH // rank.world, optimizer=optimizer, **fields)
    asked = job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 1, "dim": MODELS[model], "context": 16},
        batch={"global": BATCH},
        steps=STEPS,
        train={"lr": LEARNING_RATES.get(optimizer, 1e-3), "nvme_dir": changes.pop("nvme_dir", None)},
    )
    return Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked, **changes}), Where(), Unlimited())


def steps(made: Trainer, first: int, last: int) -> list[float]:
    return [made.train_step(step).loss for step in range(first, last + 1)]


def plain_lion(rank: Rank) -> list[float]:
    made = trainer(rank, "lion", shardings(rank.world)[0], "aligned")
    made.optimizer = PlainLion(made.optimizer.param_groups, {})
    return steps(made, 1, STEPS)


def digest(made: Trainer) -> str:
    """Of this rank's parameters and states, to the bit."""
    names = {p: name for name, p in made.model.named_parameters()}
    seen = hashlib.sha256()
    for p, name in names.items():
        for key, value in (("", p), *sorted(made.optimizer.state[p].items())):
            seen.update(f"{name} {key} {value.dtype}".encode())
            seen.update(local(value.detach()).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def bytes_per_parameter(made: Trainer) -> dict[str, float]:
    """Of the whole model, and of its 8-bit parameters alone."""
    sums = {"all": [0, 0], "8-bit": [0, 0]}
    for p, state in made.optimizer.state.items():
        held = sum(local(value).nbytes for key, value in state.items() if key != "step")
        for kind in ("all", "8-bit") if "absmax1" in state else ("all",):
            sums[kind][0] += held
            sums[kind][1] += local(p).numel()
    return {kind: held / elements for kind, (held, elements) in sums.items() if elements}


def dequantised(made: Trainer) -> dict[str, torch.Tensor]:
    """Every state of the whole model as numbers; scales of aligned models only."""
    full = {}
    for name, p in made.model.named_parameters():
        state = {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in made.optimizer.state[p].items()
        }
        for number in (1, 2):
            codes, scales = state.get(f"state{number}"), state.get(f"absmax{number}")
            if codes is not None and scales is not None:
                values = made.optimizer._map(codes.device, signed=number == 1)[codes.int()]
                codes = (values.view(*scales.shape, 256) * scales[..., None]).view(codes.shape)
            if codes is not None:
                full[f"{name.removeprefix('module.')} {number}"] = codes.clone()
    return full


def resumes(rank: Rank, folder: Path, optimizer: str, sharding: str, model: str, precision: str) -> Any:
    """Three steps, a checkpoint, three steps; and the last three again from the checkpoint."""
    run = RunDir(folder / f"{rank.world} {optimizer} {sharding} {model} {precision}")
    straight = trainer(rank, optimizer, sharding, model, run=run, precision=precision)
    steps(straight, 1, 3)
    straight.checkpoints.save(3)
    if optimizer.endswith("8bit") and model == "aligned":
        state = dequantised(straight)
        if rank.first:
            torch.save(state, run.path / "states.pt")
    undisturbed = steps(straight, 4, 6)

    again = trainer(rank, optimizer, sharding, model, run=run, precision=precision)
    assert again.checkpoints.restore() == 3
    resumed = steps(again, 4, 6)
    types = {
        name.removeprefix("module."): {
            key: str(value.dtype).removeprefix("torch.") for key, value in again.optimizer.state[p].items()
        }
        for name, p in again.model.named_parameters()
    }
    return {
        "losses": [undisturbed, resumed],
        "digests": [digest(straight), digest(again)],
        "types": types,
    }


def reads(rank: Rank, path: Path) -> Any:
    """A checkpoint that another number of ranks wrote, in each sharding of this one."""
    _, optimizer, _, model, _ = path.name.split()
    found: dict[str, Any] = {}
    for sharding in shardings(rank.world):
        made = trainer(rank, optimizer, sharding, model, run=RunDir(path))
        try:
            made.checkpoints.restore()
        except CheckpointError as error:
            found[sharding] = str(error)
            continue
        if model != "aligned":
            found[sharding] = "read"
            continue
        ours, theirs = dequantised(made), torch.load(path / "states.pt")
        found[sharding] = {
            "different": [name for name in theirs if not torch.equal(ours[name], theirs[name])],
            "names": sorted(theirs) == sorted(ours),
            "states": len(theirs),
            "loss": steps(made, 4, 4),
        }
    return found


def fewer_rows_than_ranks(rank: Rank, folder: Path) -> Any:
    """One row of whole blocks and one that is not: the second rank holds nothing of either."""

    def make() -> tuple[nn.Module, EightBit]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, 1, bias=False), nn.Linear(5000, 1, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (rank.world,)))
        return model, EightBit([{"params": list(model.parameters())}], "adam", lr=0.1, betas=(0.9, 0.999))

    def step(model: nn.Module, optimizer: EightBit) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    saved, run = make(), RunDir(folder / f"{rank.world} thin")
    before = [p.detach().full_tensor().clone() for p in saved[0].parameters()]
    step(*saved)
    Checkpoints(*saved, LossScaler(False), Rank(**{**vars(rank), "run": run})).save(1)
    loaded = make()
    Checkpoints(*loaded, LossScaler(False), Rank(**{**vars(rank), "run": run})).restore()
    for pair in (saved, loaded):
        step(*pair)
    after, again = ([p.detach().full_tensor() for p in model.parameters()] for model, _ in (saved, loaded))
    return {
        "moved": [float((b - a).mean()) for a, b in zip(after, before, strict=True)],
        "equal": all(torch.equal(a, b) for a, b in zip(after, again, strict=True)),
    }


def main(folder: Path, others: list[Path]) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    text = gpt.documentation()[:40_000]  # dozens of trainers cut it into samples
    gpt.documentation = lambda: text
    result: dict[str, Any] = {"reads": {path.name: reads(rank, path) for path in others}}
    if not others or rank.world == 1:
        result |= {"losses": {}, "bytes": {}, "resumes": {}}
        for sharding in shardings(rank.world):
            for optimizer in OPTIMIZERS if sharding in TRAINED[rank.world] else ():
                made = trainer(rank, optimizer, sharding, "aligned")
                result["losses"][f"{optimizer} {sharding}"] = steps(made, 1, STEPS)
                result["bytes"][f"{optimizer} {sharding}"] = bytes_per_parameter(made)
            for optimizer in ("adamw-8bit", "lion-8bit"):
                for model in MODELS:
                    case = (optimizer, sharding, model, "fp32")
                    result["resumes"][" ".join(case)] = resumes(rank, folder, *case)
            for optimizer in IN_BF16.get((rank.world, sharding), ()):
                case = (optimizer, sharding, "crossing", "bf16")
                result["resumes"][" ".join(case)] = resumes(rank, folder, *case)
        result["plain lion"] = plain_lion(rank)
        result["thin"] = fewer_rows_than_ranks(rank, folder)
    (folder / f"{rank.world} {len(others)} {rank.number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
