"""What `activations: compress` costs and gains, on the shipped models in their smallest shapes, on this CPU.

Four trainings of each model begin with the same weights and see the same samples: in fp32 and in bf16-mixed,
with all activations exact (`keep`) and compressed. They take turns, step by step. Then all get the weights of
the first one, and one more step gives the gradients that are compared: the rounding of bf16-mixed is the
yardstick for the rounding of the activations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memory_tables import markdown  # noqa: E402

from launcher.rundir.layout import RunDir  # noqa: E402
from launcher.train.cpu_memory_budget import MemoryBudget, Unlimited  # noqa: E402
from launcher.train.data.data import to_device  # noqa: E402
from launcher.train.forward import loss_of  # noqa: E402
from launcher.train.loop import Trainer  # noqa: E402
from launcher.train.phase import Where  # noqa: E402
from launcher.train.rank import join_ranks  # noqa: E402
from launcher.train.task import outermost  # noqa: E402
from tests.train.runs import job, one_rank, recipe  # noqa: E402

BATCH = 16
BATCH_NORM = {"model": {"batch_norm": True}}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"task": "launcher.tasks.gpt:PydocGPT", "args": {}},
    "llama": {"task": "launcher.tasks.llama:LanguageModel", "args": {"shape": "tiny", "context": 256}},
    "video": {"task": "launcher.tasks.video:VideoLanguageModel", "args": {"shape": "tiny"}},
    "brain": {"task": "launcher.tasks.brain:BrainAutoencoder", "args": {"shape": "tiny"}, **BATCH_NORM},
}
EXACT = ("fp32", "keep")
KINDS = tuple(itertools.product(("fp32", "bf16-mixed"), ("keep", "compress")))
LEGEND = """# Activations in 8 bits

The relative error of the gradient against fp32, by kind of layer: median and largest of the parameters.
Then, with `keep` and with `compress`: the bytes that a forward pass keeps, the mean loss of the last ten
steps, and the time of a step on the CPU."""
LAST = 10
"Steps over whose losses the mean is taken."
Gradients = dict[str, torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", choices=MODELS, help="one model")
    parser.add_argument("--save", action="store_true", help="write results/compress.json and .md")
    options = parser.parse_args()
    join_ranks(one_rank(RunDir(Path("/nowhere"))))
    results = {}
    for name in [options.only] if options.only else MODELS:
        results[name] = measured(MODELS[name], options.steps)
        print(json.dumps({name: results[name]}), flush=True)
    text = "\n\n".join(markdown(rows) for rows in (gradient_rows(results), training_rows(results)))
    print(text)
    if options.save:
        report = {
            "command": "python benchmarks/compress.py --save",
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "steps": options.steps,
            "batch": BATCH,
            "results": results,
        }
        results_folder = ROOT / "benchmarks" / "results"
        (results_folder / "compress.json").write_text(json.dumps(report, indent=1) + "\n")
        (results_folder / "compress.md").write_text(f"{LEGEND}\n\n{text}\n")
    return 0


def measured(model: Mapping[str, Any], steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(None):
        made = {kind: trainer(model, kind, Path(folder), steps) for kind in KINDS}
        losses: dict[Any, list[float]] = {kind: [] for kind in KINDS}
        seconds: dict[Any, list[float]] = {kind: [] for kind in KINDS}
        for step in range(1, steps + 1):
            for kind in KINDS if step % 2 else reversed(KINDS):
                begun = time.perf_counter()
                losses[kind].append(made[kind].train_step(step).loss)
                seconds[kind].append(time.perf_counter() - begun)
        weights = made[EXACT].model.state_dict()
        for one in made.values():
            one.model.load_state_dict(weights)
        passes = {kind: one_pass(one, steps + 1) for kind, one in made.items()}
    exact, _ = passes[EXACT]
    return {
        "errors": {
            " ".join(kind): errors(gradients, exact, made[EXACT])
            for kind, (gradients, _) in passes.items()
            if kind != EXACT
        },
        "kept": {" ".join(kind): kept for kind, (_, kept) in passes.items()},
        "loss": {" ".join(kind): statistics.fmean(found[-LAST:]) for kind, found in losses.items()},
        "milliseconds": {
            " ".join(kind): round(1000 * statistics.median(found[2:]), 2) for kind, found in seconds.items()
        },
    }


def trainer(model: Mapping[str, Any], kind: tuple[str, str], folder: Path, steps: int) -> Trainer:
    precision, activations = kind
    asked = job(**model, batch={"global": BATCH}, steps=steps + 1, train={"checkpoint_every": None})
    chosen = recipe("none", micro=BATCH, precision=precision, activations=activations)
    rank = one_rank(RunDir(folder / "-".join(kind)), job=asked, recipe=chosen, workdir=str(ROOT))
    return Trainer(rank, Where(), Unlimited())


def one_pass(one: Trainer, step: int) -> tuple[Gradients, int]:
    """Return the gradient of each parameter, and the bytes that the forward pass keeps for the backward."""
    samples = one.data.samples(step, 1)
    batch = to_device(one.task.collate(samples), one.rank.device)
    one.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with MemoryBudget(None) as budget:
        before = budget.live
        loss, weight = loss_of(one.task, one.model, batch, one.rank)
        kept = budget.live - before
        (loss / weight).backward()
    return {n: p.grad for n, p in one.model.named_parameters() if p.grad is not None}, kept


def errors(found: Gradients, exact: Gradients, of: Trainer) -> dict[str, dict[str, float]]:
    """Return kind of layer -> relative error of a parameter's gradient, in the median and at most.

    Parameters whose exact gradient is rounding noise are left out: biases before BatchNorm, of keys.
    """
    inside = {p for block in outermost(of.task.blocks(of.model)) for p in block.parameters()}
    least = 1e-6 * max(float(g.norm()) for g in exact.values())
    kinds: dict[str, list[float]] = {}
    for name, p in of.model.named_parameters():
        if name in exact and float(exact[name].norm()) > least:
            owner = of.model.get_submodule(name.rpartition(".")[0])
            kind = layer_kind(owner) + ("" if p in inside else ", outside of blocks")
            kinds.setdefault(kind, []).append(float((found[name] - exact[name]).norm() / exact[name].norm()))
    return {
        kind: {"parameters": len(all_), "median": statistics.median(all_), "largest": max(all_)}
        for kind, all_ in sorted(kinds.items())
    }


def layer_kind(module: nn.Module) -> str:
    name = type(module).__name__
    for kind in ("Norm", "Linear", "Embedding", "Conv"):
        if kind in name:
            return {"Norm": "norms", "Linear": "linear", "Embedding": "embeddings", "Conv": "convolutions"}[
                kind
            ]
    return "others"


def gradient_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "layers": kind,
            **{
                title: "{median:.2%}, {largest:.2%}".format(**result["errors"][other][kind])
                for title, other in (
                    ("`fp32` with `compress`", "fp32 compress"),
                    ("`bf16-mixed`", "bf16-mixed keep"),
                    ("`bf16-mixed` with `compress`", "bf16-mixed compress"),
                )
            },
        }
        for model, result in results.items()
        for kind in result["errors"]["fp32 compress"]
    ]


def training_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for model, result in results.items():
        for precision in ("fp32", "bf16-mixed"):
            keep, compress = (f"{precision} {policy}" for policy in ("keep", "compress"))
            kept, loss, time_of = result["kept"], result["loss"], result["milliseconds"]
            rows.append(
                {
                    "model": model,
                    "precision": precision,
                    "MiB kept": f"{kept[keep] / 2**20:.2f} -> {kept[compress] / 2**20:.2f} "
                    f"({kept[compress] / kept[keep]:.0%})",
                    "loss": f"{loss[keep]:.4f} -> {loss[compress]:.4f}",
                    "step, ms": f"{time_of[keep]:.0f} -> {time_of[compress]:.0f} "
                    f"({time_of[compress] / time_of[keep]:.2f} x)",
                }
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
