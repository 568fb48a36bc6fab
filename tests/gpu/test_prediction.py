"""The estimate against what CUDA's caching allocator counts: 0.1 to 8 billion parameters on one GPU.

Where a recipe shards over several ranks, the others are pretended: collectives do nothing, and what this rank
allocates is what it would allocate among them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.spec.cluster import Gpu
from launcher.spec.job import Job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe
from tests.memory.cases import peak
from tests.memory.predicted import peaks, predicted
from tests.train.runs import measure

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]
TRUTH = Path(__file__).parents[1] / "memory" / "measured_steps.py"
ALLOCATOR = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}

LLAMA, BRAIN = "launcher.tasks.llama:LanguageModel", "launcher.tasks.brain:BrainAutoencoder"
SHAPES: dict[str, dict[str, Any]] = {
    "0.1b": {"layers": 12, "dim": 768, "heads": 12, "kv_heads": 12, "hidden": 2048, "vocabulary": 32_000},
    "0.4b": {"layers": 24, "dim": 1024, "heads": 16, "kv_heads": 8, "hidden": 2816, "vocabulary": 32_000},
    "3b": {
        "layers": 28,
        "dim": 3072,
        "heads": 24,
        "kv_heads": 8,
        "hidden": 8192,
        "vocabulary": 128_256,
        "tied": True,
    },
    "8b": {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14_336, "vocabulary": 128_256},
}
SIZES = {"24 GB": 23.6, "47.4 GiB": 47.4, "80 GB": 79.1}
"GiB that a process can use, as in the profiles of clusters/."


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    context: int
    recipe: Recipe

    def __str__(self) -> str:
        r = self.recipe
        words = [self.model, f"{self.ranks}x", r.sharding, r.precision, r.optimizer, r.activations]
        words += ["compiled"] * r.compile + ["in-backward"] * (r.optimizer_step == "backward")
        words += ["8-bit-embeddings"] * (r.embedding_states == "8-bit")
        return "-".join(
            (*words, f"{r.grad_accum}x{r.micro_batch_size}x{self.context}", f"chunks{r.loss_chunks}")
        )

    @property
    def job(self) -> Job:
        language = (
            {"shape": self.model} if self.model in ("1b", "7b") else {"model": SHAPES.get(self.model, {})}
        )
        brain = self.model == "brain 8b"
        batch = self.recipe.micro_batch_size * self.recipe.grad_accum * self.ranks
        return Job.model_validate(
            {
                "name": "case",
                "task": BRAIN if brain else LLAMA,
                "args": {"shape": "8b", "parts": 16} if brain else {**language, "context": self.context},
                "batch": {"global": batch},
                "steps": 2,
                "model": {"batch_norm": brain},
                "train": {
                    "checkpoint_every": None,
                    "eval_every": 2,
                    "clip_norm": None if self.recipe.optimizer_step == "backward" else 1.0,
                },
            }
        )


def case(model: str, ranks: int = 1, micro: int = 1, context: int = 2048, **fields: Any) -> Case:
    plain = {"precision": "bf16-mixed", "optimizer": "adamw", "sharding": "none" if ranks == 1 else "fsdp"}
    sizes = {"micro_batch_size": micro, "grad_accum": 1}
    return Case(model, ranks, context, Recipe.model_validate({**plain, **sizes, **fields}))


FULL, SELECTIVE, PURE = {"activations": "checkpoint"}, {"activations": "selective"}, {"precision": "bf16"}
COMPILED = {"compile": True}
CASES: tuple[Case, ...] = (
    case("0.1b", micro=8),
    case("0.1b", micro=32),
    case("0.1b", micro=8, precision="fp32"),
    case("0.1b", micro=16, **PURE),
    case("0.1b", micro=16, **FULL),
    case("0.1b", micro=16, **SELECTIVE),
    case("0.1b", micro=16, activations="compress"),
    case("0.1b", micro=16, **COMPILED),
    case("0.1b", micro=16, **COMPILED, **SELECTIVE),
    case("0.1b", micro=16, **COMPILED, activations="budget", activation_budget=0.5),
    case("0.1b", micro=16, activations="every-second"),
    case("0.1b", micro=8, optimizer_step="backward", **PURE),
    case("0.1b", micro=8, optimizer="adamw-8bit", embedding_states="8-bit"),
    case("0.1b", micro=8, grad_accum=3),
    case("0.1b", micro=16, optimizer="adamw-8bit"),
    case("0.1b", micro=16, optimizer="lion", loss_chunks=8),
    case("0.1b", micro=16, sharding="ddp"),
    case("0.1b", micro=16, ranks=8, sharding="zero1"),
    case("0.1b", micro=16, ranks=8),
    case("0.4b", micro=4),
    case("0.4b", micro=8, **SELECTIVE),
    case("0.4b", micro=8, optimizer="adam-mini", **FULL),
    case("0.4b", micro=4, sharding="fsdp"),
    case("0.4b", micro=4, ranks=4, sharding="fsdp-keep"),
    case("0.4b", micro=4, ranks=4, grad_accum=2, grad_sync="last"),
    case("1b", micro=2),
    case("1b", micro=4, loss_chunks=8, **SELECTIVE),
    case("1b", micro=4, optimizer="adamw-8bit", **FULL),
    case("1b", micro=4, optimizer="adamw-bf16", **FULL, **PURE),
    case("1b", micro=2, ranks=8, context=4096),
    case("3b", loss_chunks=8, **FULL, **PURE),
    case("3b", optimizer="adamw-8bit", loss_chunks=4, **SELECTIVE, **PURE),
    case("3b", micro=2, ranks=8, **SELECTIVE),
    case("7b", optimizer="adamw-8bit", **FULL, **PURE),
    case("7b", micro=2, ranks=8, context=4096, **FULL),
    case("7b", ranks=8, context=4096, **SELECTIVE),
    case("7b", ranks=8, context=4096, **COMPILED, **SELECTIVE),
    case("7b", optimizer="adamw-8bit", optimizer_step="backward", loss_chunks=8, **FULL, **PURE),
    case("7b", ranks=8, context=2048, activations="compress", **PURE),
    case("3b", ranks=8, sharding="zero1", optimizer="lion", **FULL, **PURE),
    case("7b", ranks=8, context=2048, sharding="fsdp-keep", **FULL),
    case("7b", ranks=8, context=4096, sharding="fsdp-layers", loss_chunks=8, **FULL, **PURE),
    case("8b", ranks=8, context=8192, loss_chunks=8, **SELECTIVE),
    case("8b", ranks=32, context=8192, loss_chunks=8, **FULL),
    case("brain 8b", ranks=8, micro=2, context=0),
)
FITTING = (
    case("0.4b"),
    case("1b", loss_chunks=8, **SELECTIVE),
    case("7b", ranks=8, loss_chunks=8, **FULL),
)
"For each GPU, with the largest micro-batch said to fit, and the smallest said not to."


@cache
def estimate(one: Case) -> Any:
    return predicted(one.job, one.recipe, one.ranks, "cuda", _gpu())


def measured(cases: Sequence[tuple[Case, float | None]], folder: Path) -> list[dict[str, Any]]:
    """`{"peaks", "reserved", "failed"}` of each case, under a cap in GiB where one is given."""
    asked = [
        {
            "job": one.job.model_dump(mode="json", by_alias=True),
            "recipe": one.recipe.model_dump(),
            "ranks": one.ranks,
            **({"cap": int(cap * GIB)} if cap else {}),
        }
        for one, cap in cases
    ]
    (folder / "cases.json").write_text(json.dumps(asked))
    measure(str(TRUTH), folder, ranks=1, env=ALLOCATOR, timeout=3000, fresh=True, gpus_per_node=1)
    answers: list[dict[str, Any]] = json.loads((folder / "rank-0.json").read_text())
    return answers


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """All in one process: a start costs more than most cases."""
    _skip_without_a_gpu()
    answers = measured([(one, None) for one in CASES], tmp_path_factory.mktemp("truths"))
    return dict(zip(CASES, answers, strict=True))


def errors(truths: dict[Case, dict[str, Any]]) -> Iterator[tuple[Case, float]]:
    for one, truth in truths.items():
        if truth["failed"] is None:
            yield one, said(one, truth) / peak(truth["peaks"]) - 1


def said(one: Case, truth: dict[str, Any]) -> int:
    """Of the moments that were measured: nothing is resumed here."""
    ours = peaks(estimate(one))
    return peak({moment: ours[moment] for moment in truth["peaks"]})


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_allocated_peak_is_as_predicted(one: Case, truths: dict[Case, dict[str, Any]]) -> None:
    truth = truths[one]
    if truth["failed"] is not None:
        assert _total() < estimate(one).needed * (1 + estimate(one).band), f"ran out in {truth['failed']}"
        pytest.skip("too large for this GPU, and predicted to be")
    assert said(one, truth) == pytest.approx(peak(truth["peaks"]), rel=0.08)


def test_half_of_the_allocated_peaks_are_within_three_percent(truths: dict[Case, dict[str, Any]]) -> None:
    found = dict(errors(truths))
    assert len(found) >= 30, "cases that fit on this GPU"
    assert statistics.median(map(abs, found.values())) <= 0.03, found


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_reserved_peak_is_within_the_stated_band(one: Case, truths: dict[Case, dict[str, Any]]) -> None:
    if truths[one]["failed"] is not None:
        pytest.skip("did not fit on this GPU")
    assert estimate(one).reserved == pytest.approx(truths[one]["reserved"], rel=estimate(one).band)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_said_to_fit_trains_and_what_is_said_not_to_runs_out(size: str, tmp_path: Path) -> None:
    """The cap is the allocator's: what lies outside of it, such as the CUDA context, has no part in it."""
    _skip_without_a_gpu()
    cap = min(SIZES[size], _total() / GIB)
    asked = [found for one in FITTING for found in borders(one, cap)]
    assert asked
    answers = measured([(one, cap) for one, _ in asked], tmp_path)
    wrong = [
        f"{one}: said {'to fit' if fits else 'not to fit'}, {answer['failed'] or 'trained'}"
        for (one, fits), answer in zip(asked, answers, strict=True)
        if (answer["failed"] is None) != fits
    ]
    assert not wrong, wrong


def borders(one: Case, cap: float) -> Iterator[tuple[Case, bool]]:
    """The last of micro-batch 1, 2, 4 ... that fits with the band to spare, and the first that lacks it."""
    fitting: Case | None = None
    for micro in (2**power for power in range(11)):
        larger = Case(
            one.model, one.ranks, one.context, one.recipe.model_copy(update={"micro_batch_size": micro})
        )
        said = estimate(larger)
        if said.reserved * (1 + said.band) <= cap * GIB:
            fitting = larger
        elif said.reserved * (1 - said.band) > cap * GIB:
            if fitting is not None:
                yield fitting, True
            yield larger, False
            return


def _skip_without_a_gpu() -> None:
    """The fixture of conftest.py comes after those of a module."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def _gpu() -> Gpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return Gpu(type=torch.cuda.get_device_name(0), count=1, memory=_total())


def _total() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
