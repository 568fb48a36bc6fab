"""(model, recipe, micro-batch) cases in which the prediction is held against the truth."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.spec.job import Job
from launcher.spec.mesh import data_ranks
from launcher.spec.recipe import Recipe
from tests.train.runs import measure

HERE = Path(__file__).parent
GPT = {"layers": 6, "dim": 192, "heads": 6, "context": 128}
LLAMA = {"layers": 6, "dim": 192, "heads": 6, "kv_heads": 2, "hidden": 512, "vocabulary": 2048}
HUGGING_FACE = {
    "gpt2": {"model_type": "gpt2", "n_embd": 192, "n_layer": 6, "n_head": 6, "vocab_size": 2048},
    "llama": {
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 512,
        "vocab_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 192,
        "intermediate_size": 512,
        "vocab_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 192,
        "intermediate_size": 256,
        "vocab_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"Configs of `transformers`; a number is the name of the file that configs() writes."
BATCH_NORM = {"model": {"batch_norm": True}}
TASKS: dict[str, dict[str, Any]] = {
    "conv": {
        "task": "launcher.tasks.images:DigitClassifier",
        "args": {"channels": [64, 128, 512]},
        **BATCH_NORM,
    },
    "brain tiny": {
        "task": "launcher.tasks.brain:BrainAutoencoder",
        "args": {"shape": "tiny"},
        **BATCH_NORM,
    },
    "brain tiny, 4 parts": {
        "task": "launcher.tasks.brain:BrainAutoencoder",
        "args": {"shape": "tiny", "parts": 4},
        **BATCH_NORM,
    },
    "video tiny": {
        "task": "launcher.tasks.video:VideoLanguageModel",
        "args": {"shape": "tiny", "max_frames": 24},
    },
    "llama tiny": {"task": "launcher.tasks.llama:LanguageModel", "args": {"shape": "tiny", "context": 256}},
    "llama": {"task": "launcher.tasks.llama:LanguageModel", "args": {"model": LLAMA, "context": 128}},
    **{
        f"llama {kind}": {
            "task": "launcher.tasks.llama:LanguageModel",
            "args": {"model": LLAMA, "context": 128},
            "adapter": {"kind": kind, "rank": 8},
        }
        for kind in ("lora", "qlora")
    },
    "hf qwen3 qlora": {
        "task": "launcher.tasks.huggingface:CausalLM",
        "args": {"path": "qwen3.json", "context": 128},
        "adapter": {"kind": "qlora", "rank": 8},
    },
    "llama wide": {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"model": {**LLAMA, "layers": 4, "vocabulary": 256}, "context": 512},
    },
    "llama wide qlora": {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"model": {**LLAMA, "dim": 384}, "context": 128},
        "adapter": {"kind": "qlora", "rank": 8},
    },
    "llama tied": {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"model": {**LLAMA, "tied": True}, "context": 128},
    },
    "gpt": {"task": "launcher.tasks.gpt:PydocGPT", "args": GPT},
    "gpt dropout": {"task": "launcher.tasks.gpt:PydocGPT", "args": {**GPT, "dropout": 0.1}},
    "odd tied": {"task": "models:Odd", "args": {"dim": 768, "tied": True}, **BATCH_NORM},
    "padded": {"task": "models:Padded", "args": {}, **BATCH_NORM},
    "experts": {"task": "models:Experts", "args": {}},
    "watched": {"task": "models:Watched", "args": {}, **BATCH_NORM},
    "odd frozen": {"task": "models:Odd", "args": {"dim": 768, "frozen": True}, **BATCH_NORM},
    "view": {"task": "models:LaidOut", "args": {}, **BATCH_NORM},
    "transposed": {"task": "models:LaidOut", "args": {"transposed": True}, **BATCH_NORM},
    **{
        name: {
            "task": "models:Unused",
            "args": {"unit": unit},
            "train": {"find_unused_parameters": True},
            **BATCH_NORM,
        }
        for name, unit in (("unused", False), ("unused unit", True))
    },
    **{
        f"hf {name}": {
            "task": "launcher.tasks.huggingface:CausalLM",
            "args": {"path": f"{name}.json", "context": 128},
        }
        for name in HUGGING_FACE
    },
}


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    recipe: Recipe

    @property
    def per_node(self) -> int:
        """Ranks of a node: `hybrid` replicates over two of them."""
        return self.ranks // 2 if self.recipe.sharding == "hybrid" else self.ranks

    @property
    def processes(self) -> tuple[int, int]:
        """How many ranks are real, and how many of them on a node. Of compiled blocks that ranks share, one
        is: the profiler would also see what gloo holds, which no mode can leave out there."""
        alone = self.recipe.compile and self.recipe.tensor > 1
        return (1, 1) if alone else (self.ranks, self.per_node)

    @property
    def name(self) -> str:
        """What makes it another case than the model's plain one."""
        r = self.recipe
        words = [
            self.model,
            f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'}",
            r.sharding,
            f"tensor {r.tensor}" if r.tensor > 1 else "",
            f"pipeline {r.pipeline} {r.schedule}" if r.pipeline > 1 else "",
            f"{r.virtual_stages} virtual stages" if r.virtual_stages > 1 else "",
            r.precision,
            r.optimizer,
            "half checkpointed"
            if r.checkpoint_ratio < 1
            else ""
            if r.activations == "keep"
            else r.activations,
            f"{r.grad_accum} x {r.micro_batch_size}" if r.grad_accum > 1 else f"{r.micro_batch_size}",
            f"sync {r.grad_sync}" if r.grad_accum > 1 else "",
            f"{r.loss_chunks} loss chunks" if r.loss_chunks > 1 else "",
            f"offload {r.offload}" if r.offload != "none" else "",
            "compiled" if r.compile else "",
            "step in backward" if r.optimizer_step == "backward" else "",
        ]
        return ", ".join(filter(None, words))

    def job(self, configs: Path) -> Job:
        """`configs`: where write_configs() wrote."""
        task = TASKS[self.model]
        args = dict(task["args"])
        if "path" in args:
            args["path"] = str(configs / args["path"])
        ranks = data_ranks(self.recipe, self.ranks)
        batch = self.recipe.micro_batch_size * self.recipe.grad_accum * ranks
        return Job.model_validate(
            {
                **task,
                "args": args,
                "name": "case",
                "workdir": str(HERE),
                "batch": {"global": batch},
                "steps": 2,
                "resources": {"gpus_per_node": 0, "ranks_per_node": self.ranks},
                "train": {
                    **task.get("train", {}),
                    "checkpoint_every": None,
                    "eval_every": 2,
                    **({"clip_norm": None} if self.recipe.optimizer_step == "backward" else {}),
                },
            }
        )


def case(model: str, ranks: int = 1, micro: int = 16, accumulation: int = 1, **fields: Any) -> Case:
    plain = {"precision": "fp32", "optimizer": "adamw", "sharding": "none" if ranks == 1 else "fsdp"}
    sizes = {"micro_batch_size": micro, "grad_accum": accumulation}
    return Case(model, ranks, Recipe.model_validate({**plain, **sizes, **fields}))


MIXED, PURE = {"precision": "bf16-mixed"}, {"precision": "bf16"}
HALF = {"activations": "checkpoint", "checkpoint_ratio": 0.5}
LATE: dict[str, Any] = {"activations": "checkpoint", "loss_chunks": 8, "micro": 1}
"The peak is at the end of the backward pass, and mostly gradients: else it precedes all of them."
CASES: tuple[Case, ...] = (
    # Convolutions and BatchNorm
    case("conv", micro=64),
    case("conv", micro=256),
    case("conv", micro=128, optimizer="adamw-8bit"),
    case("conv", micro=128, accumulation=2, **MIXED),
    case("conv", micro=128, activations="checkpoint"),
    case("conv", ranks=2, micro=64, sharding="ddp"),
    case("conv", ranks=2, micro=64),
    case("conv", ranks=4, micro=32, **MIXED),
    # The field reports' shapes, small
    case("brain tiny", micro=64),
    case("brain tiny", micro=64, activations="compress"),
    case("brain tiny", micro=64, optimizer="adamw-8bit", **MIXED),
    case("brain tiny", ranks=2, micro=32, sharding="ddp", optimizer="adamw-8bit", **MIXED),
    case("brain tiny, 4 parts", ranks=4, micro=32, **MIXED),
    case("video tiny", micro=8),
    case("video tiny", ranks=2, micro=8, activations="checkpoint", **MIXED),
    case("video tiny", ranks=4, micro=4, optimizer="adam-mini"),
    case("llama tiny", micro=16),
    case("llama tiny", ranks=2, micro=16, activations="selective", **MIXED),
    case("llama tiny", ranks=2, micro=16, activations="every-second", **MIXED),
    # Transformers of launcher.tasks
    case("gpt"),
    case("gpt", micro=4),
    case("gpt", activations="checkpoint"),
    case("gpt", activations="selective", **MIXED),
    case("gpt", activations="every-second", **MIXED),
    case("gpt", activations="compress"),
    case("gpt", loss_chunks=4, **PURE),
    case("gpt", optimizer="lion", accumulation=3, micro=4),
    case("gpt", offload="cpu-optimizer"),
    case("gpt dropout", **HALF),
    case("gpt dropout", ranks=2, micro=8, **MIXED),
    case("llama"),
    case("llama", optimizer="adamw-bf16", **MIXED),
    case("llama", optimizer="adam-mini", **PURE),
    case("llama", sharding="fsdp", **MIXED),
    case("llama", ranks=2, micro=8),
    case("llama", ranks=2, micro=8, sharding="ddp", **MIXED),
    case("llama", ranks=2, micro=8, sharding="fsdp-keep", **MIXED),
    case("llama", ranks=2, micro=8, optimizer="adamw-8bit", **MIXED),
    case("llama", ranks=2, micro=8, optimizer="adamw-8bit", embedding_states="8-bit", **MIXED),
    case("hf qwen3", micro=8, optimizer="adamw-8bit", embedding_states="8-bit"),
    case("llama", ranks=2, micro=4, accumulation=2, grad_sync="each", **MIXED),
    case("llama", ranks=2, micro=4, accumulation=2, grad_sync="last", **MIXED),
    case("llama", ranks=2, micro=8, activations="selective", **PURE),
    case("llama", ranks=2, micro=8, activations="compress", **MIXED),
    case("llama", ranks=4, micro=8, activations="checkpoint", **MIXED),
    case("llama", ranks=4, micro=8, activations="checkpoint", loss_chunks=4, **MIXED),
    case("llama", ranks=4, micro=4, sharding="ddp", accumulation=2, grad_sync="last"),
    case("llama", ranks=4, micro=4, optimizer="lion", **HALF, **MIXED),
    case("llama", ranks=4, micro=8, sharding="fsdp-keep"),
    case("llama", ranks=2, micro=8, sharding="zero1", **MIXED),
    case("llama", ranks=4, micro=4, sharding="zero1", accumulation=2, grad_sync="last", optimizer="lion"),
    case("conv", ranks=2, micro=64, sharding="zero1"),
    case("odd tied", ranks=2, micro=32, sharding="zero1", optimizer="adamw-8bit"),
    case("hf qwen3", ranks=4, micro=8, sharding="zero1", optimizer="adam-mini", **MIXED),
    # Tied, frozen, and uneven
    case("llama tied"),
    case("llama tied", ranks=2, micro=8, **MIXED),
    case("llama tied", ranks=4, micro=4, activations="checkpoint"),
    case("odd tied", micro=64),
    case("odd tied", ranks=2, micro=32, optimizer="adamw-bf16"),
    case("odd frozen", micro=64),
    case("odd frozen", ranks=2, micro=32),
    # Models of transformers
    case("hf gpt2", micro=8),
    case("hf gpt2", micro=8, activations="checkpoint", **MIXED),
    case("hf gpt2", ranks=2, micro=8, optimizer="adamw-8bit"),
    case("hf llama", micro=8),
    case("hf llama", micro=8, accumulation=2, optimizer="adam-mini", **PURE),
    case("hf llama", ranks=2, micro=8, activations="selective", **MIXED),
    case("hf llama", ranks=4, micro=4, sharding="fsdp-keep", **MIXED),
    case("hf qwen3", micro=8),
    case("hf qwen3", micro=8, activations="checkpoint", **MIXED),
    case("hf qwen3", micro=8, loss_chunks=4, **PURE),
    case("hf llama", ranks=2, micro=8, loss_chunks=4, activations="checkpoint", **MIXED),
    case("hf qwen3", ranks=2, micro=8, sharding="ddp", accumulation=2, grad_sync="each"),
    case("hf qwen3", ranks=4, micro=4, accumulation=2, grad_sync="last", **MIXED),
)


def write_configs(folder: Path) -> Path:
    for name, config in HUGGING_FACE.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


def truths(cases: Sequence[Case], profile: Iterable[Case] = ()) -> list[dict[str, Any]]:
    """For each case `{"peaks": {moment: {phase: bytes}}}`, the most of any rank; all of one number of ranks
    and of one size of nodes run in one set of processes. `profile`: those that PyTorch's profiler looks at,
    too."""
    found: dict[Case, dict[str, Any]] = {}
    for ranks, per_node in sorted({one.processes for one in cases}):
        those = [one for one in cases if one.processes == (ranks, per_node)]
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            write_configs(folder)
            asked = [
                {
                    "job": one.job(folder).model_dump(mode="json", by_alias=True),
                    "recipe": one.recipe.model_dump(),
                    "profile": one in profile,
                    "number": number,
                    "ranks": one.ranks,
                }
                for number, one in enumerate(those)
            ]
            (folder / "cases.json").write_text(json.dumps(asked))
            measure(str(HERE / "measured_steps.py"), folder, ranks, per_node, timeout=1800)
            each = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        found.update(zip(those, map(_most, zip(*each, strict=True)), strict=True))
    return [found[one] for one in cases]


def _most(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = ranks[0]["peaks"]
    peaks = {
        moment: {phase: max(answer["peaks"][moment][phase] for answer in ranks) for phase in phases}
        for moment, phases in first.items()
    }
    return {**ranks[0], "peaks": peaks}


def peak(moments: dict[str, dict[str, int]]) -> int:
    """Bytes: of all moments and phases."""
    return max(size for phases in moments.values() for size in phases.values())
