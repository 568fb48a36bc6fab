"""A decoder whose memory and time are closed forms: states to the byte, activations by Korthikanti et al.
(arXiv 2205.05198), the work of tests.planning.anchors. So a choice can be checked by trying everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.memory.estimate import Estimate
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, ranks_on_node, states_of
from launcher.planning.fastest_recipe import Bounds, Candidate, Capacity, Choice, choose
from launcher.planning.hardware import Hardware, gpu_type_of, memory_of
from launcher.planning.space import Space
from launcher.planning.speed import StepTime, step_time
from launcher.spec.quantities import GIB
from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.recipe_rules import Setting
from tests.planning.anchors import LLAMA, Decoder, work

PER_TOKEN = {"keep": 34, "selective": 18, "every-second": 12, "checkpoint": 2, "offload": 2, "compress": 16}
"Bytes per token, layer and width that a block keeps on the GPU."
OVERHEAD = {"CUDA context": GIB // 2}


@dataclass
class Toy:
    gpus: int = 8
    gpu: str = "RTX A6000"
    decoder: Decoder = LLAMA["7B"]
    length: int = 2048
    per_rank: int = 16
    per_node: int = 8
    host: int | None = 512 * GIB
    "Host memory of a node; None if unknown."
    known: bool = True
    "Whether anything is known of the GPU's speed."
    asked: list[Recipe] = field(default_factory=list)

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.gpus, min(self.per_node, self.gpus), on_gpu=True)

    @property
    def hardware(self) -> Hardware:
        gpu = gpu_type_of(self.gpu)
        assert gpu is not None
        return Hardware(gpu=gpu, inter_node=12.5e9, threads=1)

    @property
    def capacity(self) -> Capacity:
        return Capacity(card=memory_of(self.hardware.gpu), host=self.host)

    def space(
        self, chunks: bool = False, batch_norm: bool = False, clips: bool = True, **fixed: Any
    ) -> Space:
        fields = {
            "precision": "bf16-mixed",
            "optimizer": "adamw",
            "sharding": "fsdp" if self.gpus > 1 else "none",
            "micro_batch_size": self.per_rank,
            "grad_accum": 1,
            **fixed,
        }
        nodes = self.gpus // self.ranks.per_node
        setting = Setting(self.gpus, nodes, self.ranks.per_node, batch_norm, entrypoint=True, clips=clips)
        return Space(Recipe.model_validate(fields), frozenset(fixed), setting, chunks)

    @property
    def shapes(self) -> ModelShapes:
        dim = self.decoder.dim
        rows = self.decoder.parameters // dim
        return ModelShapes((Parameter("all", (rows, dim), 4),), 0)

    def on_host(self, recipe: Recipe) -> int:
        """Return the bytes of states on the host of a node."""
        return sum(
            number * states_of(self.shapes, recipe, self.ranks, rank).host.total
            for rank, number in ranks_on_node(self.shapes, recipe, self.ranks)
        )

    def least(self, recipe: Recipe) -> tuple[int, int]:
        each = recipe.model_copy(update={"grad_sync": "each"})
        states = states_of(self.shapes, each, self.ranks)
        return states.gpu.total, self.on_host(each)

    @property
    def choice(self) -> Choice:
        return self.choose(self.space())

    def choose(self, space: Space, than: Candidate | None = None) -> Choice:
        bounds = Bounds(self.least, self.speed, self.at_least, self.traces_for, self.roughly)
        return choose(space, self, self.capacity, bounds, than=than)

    def speed(self, recipe: Recipe) -> float:
        time = self.time(recipe, self.length)
        return time.samples_per_second if time is not None else 0.0

    def at_least(self, recipe: Recipe) -> Estimate:
        return self._bound(recipe, 0)

    def traces_for(self, recipe: Recipe) -> bool:
        return recipe.activations != "offload"

    def roughly(self, recipe: Recipe) -> Candidate:
        tokens = self.length * recipe.micro_batch_size
        activations = self.decoder.layers * PER_TOKEN[recipe.activations] * tokens * self.decoder.dim
        estimate = self._bound(recipe, activations)
        return Candidate(recipe=recipe, estimate=estimate, time=self.time(recipe, self.length))

    def _bound(self, recipe: Recipe, activations: int) -> Estimate:
        """Of the states and activations alone."""
        states = states_of(self.shapes, recipe, self.ranks)
        return Estimate(
            peaks=(),
            reserved=states.gpu.total + activations,
            overhead=OVERHEAD,
            host={},
            band=0.05,
            basis="formulas",
        )

    def time(self, recipe: Recipe, length: int) -> StepTime | None:
        policy = "keep" if recipe.activations in ("offload", "compress") else recipe.activations
        kept = self.decoder.layers * 32 * self.decoder.dim * length * recipe.micro_batch_size
        offloaded = kept if recipe.activations == "offload" else 0
        todo = work(self.decoder, length, policy)
        return (
            step_time(recipe, todo, self.shapes, self.ranks, self.hardware, offloaded) if self.known else None
        )

    def __call__(self, recipe: Recipe, args: Mapping[str, Any] | None = None) -> Candidate:
        self.asked.append(recipe)
        length = (args or {}).get("length", self.length)
        states = states_of(self.shapes, recipe, self.ranks)
        tokens = length * recipe.micro_batch_size
        block = PER_TOKEN["keep"] * tokens * self.decoder.dim
        activations = self.decoder.layers * PER_TOKEN[recipe.activations] * tokens * self.decoder.dim
        logits = 14 * tokens * self.decoder.vocabulary // recipe.loss_chunks
        gathered = 0
        if recipe.sharding in SHARDED:
            gathered = (
                2 * self.decoder.parameters if recipe.sharding == "fsdp-keep" else 10 * self.decoder.products
            )
        kept = self.decoder.layers * 32 * tokens * self.decoder.dim if recipe.activations == "offload" else 0
        estimate = Estimate(
            peaks=(),
            reserved=states.gpu.total + activations + max(block, logits) + gathered,
            overhead=OVERHEAD,
            host={
                "states": self.on_host(recipe),
                "activations": kept * self.ranks.per_node,
            },
            managed=states.managed,
            nvme=states.nvme,
            band=0.05,
            basis="formulas",
        )
        return Candidate(recipe=recipe, estimate=estimate, time=self.time(recipe, length))
