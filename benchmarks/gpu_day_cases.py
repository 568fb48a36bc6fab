"""What a day on a GPU measures: stages in the order of their value, and the cases of each.

`DAY` is for one GPU, `rehearsal()` takes the same path on the CPU, in tiny. Predictions need no GPU:
`python benchmarks/gpu_day_cases.py` writes the cases of the day with what is predicted for each to
gpu_day.jsonl, on any machine and beforehand.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from frontier import CASES as FRONTIER
from frontier import Case as Frontier
from frontier import comparer_of
from gpu_day_case import FILE, Case, Fields, read, write

from launcher.memory.estimate import Estimate
from launcher.planning import speed as planned
from launcher.planning.hardware import GIGA, gpu_type_of, memory_of
from launcher.planning.plan import Layout
from launcher.planning.recipe_costs import Evaluator
from launcher.planning.speed import StepTime
from launcher.spec.cluster import Cluster, Gpu
from launcher.spec.job import Job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe
from launcher.train.tracing.task_source import TaskSource
from tests.gpu.test_matrix import ANOTHER_ORDER
from tests.gpu.test_prediction import CASES, FITTING, SIZES, borders
from tests.memory.predicted import peaks, predicted
from tests.train.recipes import PLAIN, REFERENCE, recipe, tolerance

GPUS = ("H100", "H200")
"Labels of the GPUs whose step times are predicted beforehand."
THREADS = 16
"CPU cores of the machine."
HOST = 112 * GIB
"Bytes of host memory that one rank may need there."
LLAMA = "launcher.tasks.llama:LanguageModel"


# Stages 1 and 5.


def memory() -> Iterator[Case]:
    for one in CASES:
        limit = 150.0 if one.recipe.compile else 90.0
        yield _step(1, str(one), one.job, one.recipe, one.ranks, seconds=limit)
    for size, cap in SIZES.items():
        for one in FITTING:
            for sized, fits in borders(one, cap):
                case = _step(1, f"{size}: {sized}", sized.job, sized.recipe, sized.ranks, cap=cap)
                yield case.model_copy(update={"predicted": {**case.predicted, "fits": fits}})
    yield from _planned(1, [one for one in FRONTIER if _is_for_many(one)], steps=2)


def large_models() -> Iterator[Case]:
    seven = Frontier("7B, all parameters, 1x RTX 4090 24 GB", "llama-7b.yaml", "runpod-a6000",
                     ("recipe=auto", "recipe.precision=bf16", "train.clip_norm=null",
                      "resources.gpus_per_node=1", "batch.global=4"), "RTX 4090")  # fmt: skip
    yield from _planned(5, [seven, *(one for one in FRONTIER if not _is_for_many(one))], steps=20)


def _is_for_many(one: Frontier) -> bool:
    return one.title.startswith(("70B", "405B"))


def _planned(stage: int, wanted: Sequence[Frontier], steps: int) -> Iterator[Case]:
    """The recipe that the planner chooses, as one rank runs it under the memory of the plan's GPU.

    Cases that need more host memory than the machine has are left out.
    """
    for one in wanted:
        comparer = comparer_of(one)
        decider = comparer.decider()
        chosen, gpu = decider.decide().chosen, comparer.cluster.node.gpu
        assert gpu is not None
        layout = decider.plan.layout
        needs = chosen.estimate.host_per_node / layout.ranks_per_node
        if needs > HOST:
            print(f"left out: {one.title} needs {needs / GIB:.0f} GiB of host memory", file=sys.stderr)
            continue
        cap = gpu.memory / GIB
        yield _step(
            stage, one.title, comparer.job, chosen.recipe, layout.ranks, cap=cap, steps=steps, seconds=280
        )


def _step(
    stage: int,
    name: str,
    job: Job,
    recipe: Recipe,
    ranks: int = 1,
    *,
    cap: float | None = None,
    steps: int = 2,
    seconds: float = 90.0,
    on_gpu: bool = True,
) -> Case:
    """Return training steps of one of `ranks` ranks, whose peers are pretended, under a cap in GiB."""
    shown = {
        "name": "case",
        **job.model_dump(mode="json", by_alias=True, include={"task", "args", "model", "adapter", "batch"}),
        "steps": steps,
        "train": {"checkpoint_every": None, "eval_every": steps, "clip_norm": job.train.clip_norm},
    }
    asked = {"job": shown, "recipe": recipe.model_dump(mode="json"), "ranks": ranks, "steps": steps}
    if cap is not None:
        asked["cap"] = int(cap * GIB)
    said = _predicted(Job.model_validate(shown), recipe, ranks, on_gpu=on_gpu)
    times = step_times(Job.model_validate(shown), recipe) if on_gpu and ranks == 1 else {}
    told = {**_memory(said, on_gpu), **({"fits": True} if cap is not None else {}), **_times(times)}
    return Case(stage=stage, name=name, work="step", asked=asked, seconds=seconds, predicted=told)


def _predicted(job: Job, recipe: Recipe, ranks: int = 1, *, on_gpu: bool) -> Estimate:
    """Return the memory on an H200. Of other GPUs, only those of another architecture differ: by the size of
    cuBLAS's workspaces."""
    return predicted(job, recipe, ranks, "cuda" if on_gpu else "cpu", one_gpu("H200").node.gpu)


def _memory(said: Estimate, on_gpu: bool) -> Fields:
    """The allocator's share is predicted for a GPU only."""
    phases = {moment: sizes for moment, sizes in peaks(said).items() if moment != "resume"}
    allocated = max(size for sizes in phases.values() for size in sizes.values())
    reserved = {"reserved": said.reserved} if on_gpu else {}
    return {"allocated": allocated, **reserved, "phases": phases, "band": round(said.band, 4)}


def step_times(job: Job, recipe: Recipe) -> dict[str, StepTime]:
    """Return the predicted step on one GPU of each type, by its label."""
    wanted = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    alone = Job.model_validate({**wanted, "resources": {"gpus_per_node": 1}})
    source = TaskSource(alone, Path(alone.workdir), "cuda")
    found = {}
    for label in GPUS:
        evaluator = Evaluator(
            source, alone, one_gpu(label), Layout(nodes=1, ranks_per_node=1, gpus_per_node=1)
        )
        time = evaluator.time(recipe)
        if time is not None:
            found[label] = time
    return found


def one_gpu(label: str) -> Cluster:
    model = gpu_type_of(label)
    assert model is not None
    gpu = Gpu(type=model.label, count=1, memory=memory_of(model))
    shown = {"name": "one-gpu", "scheduler": "local", "node": {"gpu": gpu.model_dump(), "cpus": THREADS}}
    return Cluster.model_validate(shown)


def _times(times: dict[str, StepTime]) -> Fields:
    told = {label: {"step_seconds": time.total, "parts": time.model_dump()} for label, time in times.items()}
    return {"on": told} if told else {}


# Stage 2.

GPU_OOM: Fields = {
    "task": "tests.gpu.deterministic:PydocGPT",
    "args": {"layers": 8, "dim": 512, "heads": 8, "context": 512},
    "batch": 128,
    "fits": 32,
    "steps": 20,
    "gpus": 1,
    "precision": "bf16-mixed",
}
OOM_WAYS = (
    "probe, as planned",
    "probe, two rungs lower",
    "in process",
    "in process, fsdp",
    "restart, ddp",
)


def out_of_memory(setting: Fields, ways: tuple[str, ...] = OOM_WAYS) -> Iterator[Case]:
    """Each way beside the run that knew, under a cap between the predictions for `fits` and twice as many."""
    sizes = [_oom_memory(setting, micro) for micro in (setting["fits"], 2 * setting["fits"])]
    band = 0.0 if setting["gpus"] else ANOTHER_ORDER  # the task's kernels are deterministic on a GPU only
    for way in ways:
        yield Case(
            stage=2,
            name=way,
            work="oom",
            seconds=180,
            asked={"setting": setting, "way": way, "cap": sum(sizes) // 2},
            predicted={"steps_missing": 0, "loss_difference": 0.0, "weights": 0.0, "band": band},
        )
    if setting["gpus"]:
        for expandable in (True, False):
            yield Case(stage=2, name=f"fragmentation, expandable_segments: {str(expandable).lower()}",
                       work="fragments", seconds=120, asked={"expandable": expandable})  # fmt: skip
        for file in ("memory", "checkpoints"):
            yield _tests(2, f"tests/gpu/test_{file}.py", seconds=240)


def _oom_memory(setting: Fields, micro: int) -> int:
    fields = {name: setting[name] for name in ("task", "args", "steps")}
    job = Job.model_validate({"name": "oom", **fields, "batch": {"global": setting["batch"]}})
    chosen = {"optimizer": "adamw", "sharding": "none", "precision": setting["precision"]}
    sizes = {"micro_batch_size": micro, "grad_accum": setting["batch"] // micro}
    on_gpu = setting["gpus"] > 0
    said = _predicted(job, Recipe.model_validate(chosen | sizes), on_gpu=on_gpu)
    return said.reserved if on_gpu else said.allocated


def _tests(stage: int, path: str, seconds: float = 300.0) -> Case:
    return Case(stage=stage, name=path, work="tests", seconds=seconds, asked={"paths": [path]},
                predicted={"failed": 0})  # fmt: skip


# Stage 3.


def recipes() -> Iterator[Case]:
    for fields in (
        *({"optimizer": name} for name in ("adamw-8bit", "paged-adamw-8bit", "lion-8bit", "adamw-bf16")),
        *({"sharding": "fsdp", "offload": where} for where in ("cpu", "cpu-optimizer", "nvme-optimizer")),
        {"sharding": "fsdp", "offload": "cpu-optimizer", "optimizer": "adamw-8bit", "precision": "bf16"},
        *({"precision": name} for name in ("bf16-mixed", "bf16", "float8")),
        {"precision": "bf16-mixed", "compile": True},
        {"precision": "float8", "compile": True},
        *({"activations": name} for name in ("selective", "every-second", "offload", "compress")),
        *({"sharding": name} for name in ("fsdp", "ddp", "zero1")),
        {"sharding": "fsdp", "optimizer_step": "backward"},
    ):
        yield _curve(fields, another_order=ANOTHER_ORDER)
    yield QLORA
    for file in ("training", "tasks", "optimizers", "recipes", "matrix"):
        yield _tests(3, f"tests/gpu/test_{file}.py", seconds=540)


def _curve(fields: Fields, another_order: float) -> Case:
    """Return 20 steps of a small model on real text with a recipe, and with fp32 and nothing else."""
    complete = {**PLAIN, "optimizer": "adamw", **fields}
    name = ", ".join(f"{field} {value}" for field, value in fields.items())
    one = recipe(1, **complete)
    if complete.get("optimizer_step") == "backward":
        one |= {"micro_batch_size": 8, "grad_accum": 1}
    against = recipe(1, **PLAIN, optimizer=REFERENCE[complete["optimizer"]])
    return Case(stage=3, name=name, work="curve", seconds=120, asked={"recipe": one, "against": against},
                predicted={"distance": 0.0, "band": tolerance(complete) + another_order})  # fmt: skip


TINY_LLAMA: Fields = {
    "name": "tiny-llama",
    "task": LLAMA,
    "args": {"shape": "tiny", "context": 64},
    "batch": {"global": 8},
    "steps": 20,
    "train": {"lr": 1e-3, "checkpoint_every": None, "clip_norm": None},
}
QLORA = Case(
    stage=3,
    name="QLoRA beside LoRA",
    work="curve",
    seconds=120,
    asked={
        "job": {**TINY_LLAMA, "adapter": {"kind": "qlora", "rank": 4}},
        "job against": {**TINY_LLAMA, "adapter": {"kind": "lora", "rank": 4}},
        "recipe": recipe(1, **{**PLAIN, "precision": "bf16-mixed"}, optimizer="adamw"),
        "against": recipe(1, **{**PLAIN, "precision": "bf16-mixed"}, optimizer="adamw"),
    },
    predicted={"distance": 0.0, "band": 5e-3},
)
"NF4 rounds the frozen weights. The band is four times what was measured on the CPU."


# Stage 4.

LOOPS = ("fsdp2", "trainer", "torchtitan")


def speed() -> Iterator[Case]:
    yield Case(stage=4, name="rates of the hardware", work="rates", asked={"scale": 1}, seconds=120,
               predicted={"on": {label: _rates(label) for label in GPUS}})  # fmt: skip
    compiled, mixed = {"compile": True}, {"precision": "bf16-mixed"}
    small = {"precision": "bf16", "activations": "checkpoint", **compiled}
    one, seven = _model("1b", 4096, 4), _model("7b", 4096, 2)
    yield from _loops(one, {**mixed, **compiled}, LOOPS)
    yield from _loops(seven, small, LOOPS[:1])
    for fields in (
        mixed,
        {"activations": "checkpoint", **mixed},
        {"activations": "selective", **mixed, **compiled},
        {"activations": "every-second", **mixed},
        {"precision": "float8", **compiled},
        {"precision": "bf16", "optimizer": "adamw-8bit"},
        {"precision": "bf16", "optimizer": "paged-adamw-8bit"},
        {"offload": "cpu-optimizer", **mixed},
        {"offload": "cpu", **mixed},
        {"activations": "offload", **mixed},
        {"activations": "compress", **mixed},
    ):
        yield _speed(one, fields)
    yield from _loops(_model("1b", 8192, 2), {**mixed, **compiled}, LOOPS[:1])
    yield from _loops(_model("7b", 8192, 1), small, LOOPS[:1])
    yield _speed(seven, {"activations": "checkpoint", "precision": "bf16", "optimizer": "adamw-8bit"})


def _rates(label: str) -> Fields:
    """Return what the planner assumes, in the units of gpu_day_work.rates."""
    model = gpu_type_of(label)
    assert model is not None
    return {
        "matmul": model.half * planned.reached(model),
        "device_copy": model.bandwidth * planned.MEMORY_REACHED,
        "to_device": model.pcie * planned.PCIE_REACHED,
        "to_host": model.pcie * planned.PCIE_REACHED,
        "host_copy": planned.HOST_BANDWIDTH / GIGA,
        "disk_write": planned.NVME / GIGA,
        "disk_read": planned.NVME / GIGA,
    }


def _model(shape: str, context: int, batch: int) -> Fields:
    return {
        "name": f"{shape} {context}",
        "task": LLAMA,
        "args": {"shape": shape, "context": context},
        "tokens": context,
        "batch": batch,
        "steps": 25,
        "skip": 5,
    }


def _loops(model: Fields, fields: Fields, peers: tuple[str, ...]) -> Iterator[Case]:
    """The loop of launcher, and those of others with the same recipe; the Trainer's is not compiled."""
    yield _speed(model, fields)
    for peer in peers:
        recipe = {"activations": "keep", **fields, **({"compile": False} if peer == "trainer" else {})}
        asked = {"loop": peer, "model": {**model, "recipe": recipe}}
        yield Case(stage=4, name=f"{model['name']}, {peer}", work="speed", asked=asked, seconds=180)


def _speed(model: Fields, fields: Fields, on_gpu: bool = True) -> Case:
    chosen = {"optimizer": "adamw", "sharding": "fsdp", **fields}
    sizes = {"micro_batch_size": model["batch"], "grad_accum": 1}
    validated = Recipe.model_validate(chosen | sizes)
    job = Job.model_validate(
        {"name": "bench", "task": model["task"], "args": model["args"], "steps": model["steps"],
         "batch": {"global": model["batch"]}}
    )  # fmt: skip
    words = [f"{value if value is not True else name}" for name, value in fields.items()]
    return Case(
        stage=4,
        name=f"{model['name']}, launcher: {', '.join(words)}",
        work="speed",
        asked={"loop": "launcher", "model": {**model, "recipe": validated.model_dump(mode="json")}},
        seconds=200,
        predicted=_times(step_times(job, validated)) if on_gpu else {},
    )


# Stage 6.


def doctor(gpus: int) -> Iterator[Case]:
    yield Case(stage=6, name="two processes on one device", work="nccl", asked={"gpus": gpus})
    yield Case(stage=6, name="launcher doctor", work="doctor", seconds=240)


# The rehearsal.


def rehearsal() -> Iterator[Case]:
    """Every kind of work on the CPU, in tiny. The machine may be busy: no case is short of time."""
    return (case.model_copy(update={"seconds": 300.0}) for case in _tiny())


def _tiny() -> Iterator[Case]:
    # Under the cap, half the micro-batch fits: a run that lowers it does not count as one that fits.
    for ranks, cap, precision in ((1, None, "fp32"), (8, None, "bf16-mixed"), (1, 0.0055, "fp32")):
        job = Job.model_validate({**TINY_LLAMA, "steps": 2, "batch": {"global": 8 * ranks}})
        plain = {"precision": precision, "optimizer": "adamw", "micro_batch_size": 8, "grad_accum": 1}
        sharded = Recipe.model_validate(plain | {"sharding": "none" if ranks == 1 else "fsdp"})
        name = f"tiny, {ranks} ranks" + (", under a cap" if cap else "")
        case = _step(1, name, job, sharded, ranks, cap=cap, on_gpu=False)
        yield case.model_copy(update={"predicted": {**case.predicted, "fits": cap is None}})
    tiny: Fields = {"layers": 1, "dim": 32, "heads": 2, "context": 32}
    yield from out_of_memory(
        {**GPU_OOM, "args": tiny, "batch": 8, "fits": 2, "steps": 4, "gpus": 0, "precision": "fp32"},
        ("in process",),
    )
    yield _curve({"precision": "bf16-mixed"}, another_order=0.0)
    yield QLORA
    yield _tests(3, "tests/gpu/test_training.py")
    yield Case(stage=4, name="rates of the hardware", work="rates", asked={"scale": 1 / 256})
    model: Fields = {**_model("tiny", 64, 2), "task": GPU_OOM["task"], "args": tiny, "tokens": 32, "steps": 6}
    plain = {"sharding": "none", "precision": "fp32"}
    yield _speed({**model, "skip": 2}, plain, on_gpu=False)
    for loop in ("plain", "torchtitan"):
        asked = {"loop": loop, "model": {**model, "skip": 2, "recipe": plain}}
        yield Case(stage=4, name=f"tiny, {loop}", work="speed", asked=asked)
    steps = Recipe.model_validate({**plain, "optimizer": "lion", "micro_batch_size": 2, "grad_accum": 1})
    job = Job.model_validate({**TINY_LLAMA, "batch": {"global": 2}})
    yield _step(5, "tiny, 20 steps under a cap", job, steps, cap=1.0, steps=20, on_gpu=False)
    yield from doctor(gpus=0)


DAY: dict[int, Callable[[], Iterator[Case]]] = {
    1: memory,
    2: lambda: out_of_memory(GPU_OOM),
    3: recipes,
    4: speed,
    5: large_models,
    6: lambda: doctor(gpus=1),
}


def day(asked: Sequence[int]) -> Iterator[Case]:
    """The cases of all stages: made anew for those that are asked for, of the others as they were."""
    before = () if set(asked) == set(DAY) else tuple(read(FILE))
    for stage, cases in DAY.items():
        yield from cases() if stage in asked else (one for one in before if one.stage == stage)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stage", type=int, nargs="+", choices=DAY, default=list(DAY), help="only these")
    parser.add_argument("--rehearsal", type=Path, metavar="FILE", help="write the rehearsal's cases there")
    options = parser.parse_args()
    write(rehearsal() if options.rehearsal else day(options.stage), options.rehearsal or FILE)
