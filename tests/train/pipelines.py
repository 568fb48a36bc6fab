"""Run on every rank by test_pipeline.py: a few steps of each built-in model, in stages and in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.train.budget import Unlimited
from launcher.train.failure import leave
from launcher.train.loop import Trainer
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.where import Where
from runs import HERE, job, recipe

STEPS, GLOBAL_BATCH = 5, 8
HELD_OUT = 5
"Samples that are evaluated: the last micro-batch is not full."
TASKS: dict[str, dict[str, Any]] = {
    "gpt": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 4, "dim": 32, "heads": 2, "context": 16},
    },
    "llama": {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 16, "model": {"layers": 5}},
    },
    "video": {"task": "launcher.tasks.video:VideoLanguageModel", "args": {"max_frames": 2, "context": 16}},
    **{
        name: {"task": "launcher.tasks.huggingface:CausalLM"}
        for name in ("hf llama", "hf qwen3", "hf gpt2", "hf gemma2", "hf mistral", "hf tied")
    },
    "brain": {"task": "launcher.tasks.brain:BrainAutoencoder", "model": {"batch_norm": True}},
}
RECIPES: dict[str, dict[str, Any]] = {
    "": {},
    "fsdp": {"sharding": "fsdp"},
    "bf16": {"precision": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-mixed, fsdp": {"precision": "bf16-mixed", "sharding": "fsdp"},
    "fp16-mixed, fsdp": {"precision": "fp16-mixed", "sharding": "fsdp", "grad_scaler": True},
    "checkpoint, fsdp": {"activations": "checkpoint", "sharding": "fsdp"},
    "selective": {"activations": "selective"},
    "offload": {"activations": "offload"},
    "loss in parts, fsdp": {"loss_chunks": 3, "sharding": "fsdp"},
    "8-bit, fsdp": {"optimizer": "adamw-8bit", "sharding": "fsdp"},
    "on the host, fsdp": {"offload": "cpu", "sharding": "fsdp"},
    "optimizer on the host": {"offload": "cpu-optimizer"},
    "compiled, fsdp": {"compile": True, "sharding": "fsdp"},
}
"Of a run in one process, and of one in stages that is compared with it."
STAGED: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "1f1b": {"pipeline": 2},
        "gpipe": {"pipeline": 2, "schedule": "gpipe"},
        "by hand": {"pipeline": 2, "stages": (1, 3)},
        "last": {"pipeline": 2, "grad_sync": "last"},
    },
    4: {
        "2 x 2": {"pipeline": 2},
        "2 x 2, last": {"pipeline": 2, "grad_sync": "last"},
        "2 x 2, gpipe": {"pipeline": 2, "schedule": "gpipe"},
        "4": {"pipeline": 4},
    },
}


def config_of(kind: str, folder: Path) -> str:
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 256,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": kind == "tied",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 2,
    }
    if kind == "gpt2":
        sizes = {
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "vocab_size": 256,
            "n_positions": 64,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    config = AutoConfig.for_model({"tied": "llama"}.get(kind, kind), **sizes)
    config.save_pretrained(folder / kind)
    return str(folder / kind)


def trainer(rank: Rank, folder: Path, task: str, **fields: Any) -> Trainer:
    accumulation = 4 * fields.get("pipeline", 1) // rank.world
    train = {"lr": 1e-3, "clip_norm": fields.pop("clip_norm", None), "eval_every": STEPS}
    about = dict(TASKS[task])
    if task.startswith("hf "):
        about["args"] = {
            "path": config_of(task.removeprefix("hf "), folder / f"{rank.number}"),
            "context": 16,
        }
    asked = job(**about, batch={"global": GLOBAL_BATCH}, steps=STEPS, train=train)
    run = RunDir(folder / task)
    run.path.mkdir(exist_ok=True)
    made = recipe(**{"sharding": "none", "micro": 2, "accumulation": accumulation, **fields})
    return Trainer(
        Rank(**{**vars(rank), "recipe": made, "job": asked, "run": run, "workdir": str(HERE)}),
        Where(),
        Unlimited(),
    )


def steps_of(made: Trainer) -> dict[str, Any]:
    """Losses, norms, the evaluation, and the whole model's parameters after the last step."""
    results = [made.train_step(step) for step in range(1, STEPS + 1)]
    assert made.held_out is not None
    made.held_out.samples = HELD_OUT
    evaluated = made.evaluate()
    own = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in made.model.named_parameters()
    }
    everyones: list[Any] = [own] * made.rank.world
    if made.rank.world > 1:
        dist.all_gather_object(everyones, own)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": [result.weight for result in results],
        "evaluated": evaluated["eval_loss"],
        "parameters": {name: value for one in everyones for name, value in one.items()},
        "of each rank": [sorted(one) for one in everyones],
    }


def main(out: Path) -> None:
    """The variable CASES has lines of `task / recipe / stages / clip_norm`."""
    rank = this_rank(this_place())
    join_ranks(rank)
    found: dict[str, Any] = {}
    for case in os.environ["CASES"].splitlines():
        task, name, stages, clip = case.split(" / ")
        fields = {**RECIPES[name], **(STAGED[rank.world][stages] if rank.world > 1 else {})}
        found[case] = steps_of(trainer(rank, out.parent, task, **fields, clip_norm=float(clip) or None))
    if rank.first:
        torch.save(found, out.with_suffix(".pt"))
        replace_json(out, {"cases": list(found)})
    if rank.world > 1:
        dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))
