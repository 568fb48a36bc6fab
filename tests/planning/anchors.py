"""Published training throughputs, and what `step_time` says of them: the table of speed-published.md, which
`python -m tests.planning.anchors` prints.

The work of a decoder in closed form: products as in launcher.train.metrics.flops (attention in full), memory
traffic kernel by kernel, as eager PyTorch runs them.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks
from launcher.memory.trace import Affine, Work
from launcher.planning.hardware import GpuType, Hardware, gpu_type_of
from launcher.planning.speed import step_time
from launcher.spec.recipe import Recipe

FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking"
TITAN_H100 = "pytorch/torchtitan, benchmarks/llama3_h100_202412"
TITAN_A100 = "pytorch/torchtitan, docs/performance.md of 2024"
GB = 1e9


class Decoder(NamedTuple):
    layers: int
    dim: int
    vocabulary: int
    products: int
    "Weights of a layer's matrix products."
    traffic: int
    "Bytes that a layer's forward pass reads and writes per token, 16-bit."
    tied: bool = False

    @property
    def parameters(self) -> int:
        return self.layers * self.products + (1 if self.tied else 2) * self.vocabulary * self.dim


def mpt(layers: int, dim: int) -> Decoder:
    """LayerNorm, one product for q, k and v, GELU of width 4 dim. Per token, in units of dim: norms 4 + 4,
    products 8 + 4 + 10 + 10, attention 8, GELU 16, residuals 6 + 6."""
    return Decoder(layers, dim, 50_368, 12 * dim**2, 76 * dim, tied=True)


def llama(layers: int, dim: int, kv: int, hidden: int, vocabulary: int) -> Decoder:
    """RMSNorm of nine fp32 kernels (36 dim each), q, k, v (8 dim + 4 kv), rotation in fp32 (20 of dim and
    kv), attention (4 dim + 4 kv), output (4 dim), residuals (12 dim), gate and up (4 dim + 4 hidden), SiLU
    and product (10 hidden), down (2 hidden + 2 dim)."""
    products = 2 * dim * (dim + kv) + 3 * dim * hidden
    return Decoder(layers, dim, vocabulary, products, 126 * dim + 28 * kv + 16 * hidden)


MPT = {
    "125M": mpt(12, 768),
    "350M": mpt(24, 1024),
    "760M": mpt(24, 1536),
    "1B": mpt(24, 2048),
    "3B": mpt(32, 2560),
    "7B": mpt(32, 4096),
    "13B": mpt(40, 5120),
    "30B": mpt(48, 7168),
    "70B": mpt(80, 8192),
}
LLAMA = {
    "7B": llama(32, 4096, 4096, 11008, 32_000),
    "8B": llama(32, 4096, 1024, 14336, 128_256),
    "13B": llama(40, 5120, 5120, 13824, 32_000),
    "70B": llama(80, 8192, 1024, 28672, 128_256),
}
RECOMPUTED = {
    "keep": (0.0, 0.0),
    "selective": (0.0, 1.0),
    "every-second": (0.5, 1.0),
    "checkpoint": (1.0, 1.0),
}
"Shares of a layer's forward products and of its traffic that are computed again."


def work(model: Decoder, length: int, activations: str) -> Work:
    """Per sample of `length` tokens."""
    layer = length * (2 * model.products + 4 * model.dim * length) * model.layers
    head = length * 2 * model.vocabulary * model.dim
    weights = 2.0 * model.layers * model.products
    traffic = length * model.traffic * model.layers
    loss = length * model.vocabulary
    products, kernels = RECOMPUTED[activations]
    return Work(
        forward_flops=Affine(0, layer + head),
        backward_flops=Affine(0, (2 + products) * layer + 2 * head),
        forward_bytes=Affine(weights, traffic + 16 * loss),
        backward_bytes=Affine((2 + kernels) * weights, (2 + kernels) * traffic + 18 * loss),
    )


class Anchor(NamedTuple):
    model: str
    decoder: Decoder
    gpus: int
    gpu: GpuType
    inter_node: float
    length: int
    micro_batch: int
    accum: int
    recipe: dict[str, object]
    published: int
    "Tokens per second and GPU."
    source: str
    fitted: bool = False

    @property
    def predicted(self) -> float:
        fields = {"precision": "bf16-mixed", "sharding": "fsdp" if self.gpus > 1 else "none", **self.recipe}
        recipe = Recipe.model_validate(
            {"optimizer": "adamw", "micro_batch_size": self.micro_batch, "grad_accum": self.accum, **fields}
        )
        size = 2 if recipe.precision == "bf16" else 4
        rows = self.decoder.parameters // self.decoder.dim
        shapes = ModelShapes((Parameter("all", (rows, self.decoder.dim), size),), 0)
        ranks = Ranks(self.gpus, min(8, self.gpus), on_gpu=True)
        hardware = Hardware(gpu=self.gpu, inter_node=self.inter_node, threads=1)
        time = step_time(recipe, work(self.decoder, self.length, recipe.activations), shapes, ranks, hardware)
        return time.samples_per_second * self.length / self.gpus

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def _gpu(label: str) -> GpuType:
    gpu = gpu_type_of(label)
    assert gpu is not None
    return gpu


A100, A100_40, H100, H200 = (_gpu(label) for label in ("A100 80GB", "A100 40GB", "H100", "H200"))
H100_96 = H100._replace(bandwidth=2400)  # HBM2e, 500 W
KEEP: dict[str, object] = {}
FULL: dict[str, object] = {"activations": "checkpoint"}
OPS: dict[str, object] = {"activations": "every-second"}
COMPILED: dict[str, object] = {**OPS, "compile": True}
FLOAT8: dict[str, object] = {**COMPILED, "precision": "float8"}


def _mpt(
    name: str,
    gpus: int,
    gpu: GpuType,
    shape: tuple[int, int, int],
    recipe: dict[str, object],
    published: int,
    fitted: bool = False,
) -> Anchor:
    inter_node = 200 * GB if gpu is not H100 else 400 * GB
    return Anchor(f"MPT {name}", MPT[name], gpus, gpu, inter_node, *shape, recipe, published, FOUNDRY, fitted)


def _llama(
    name: str,
    gpus: int,
    gpu: GpuType,
    shape: tuple[int, int, int],
    recipe: dict[str, object],
    published: int,
    source: str,
    fitted: bool = False,
) -> Anchor:
    inter_node = 400 * GB if gpu is not A100 else 200 * GB  # A100: not published, taken as MosaicML's
    return Anchor(
        f"Llama {name}", LLAMA[name], gpus, gpu, inter_node, *shape, recipe, published, source, fitted
    )


PURE: dict[str, object] = {**FULL, "precision": "bf16"}
ANCHORS = (
    _mpt("125M", 8, A100, (2048, 32, 2), KEEP, 141737),
    _mpt("350M", 8, A100, (2048, 32, 2), KEEP, 58782),
    _mpt("1B", 8, A100, (2048, 14, 4), KEEP, 20513, True),
    _mpt("3B", 8, A100, (2048, 10, 2), KEEP, 10811),
    _mpt("7B", 8, A100, (2048, 6, 2), KEEP, 4641),
    _mpt("7B", 8, A100, (16384, 4, 2), FULL, 2453),
    _mpt("13B", 8, A100, (2048, 2, 3), KEEP, 2262, True),
    _mpt("13B", 8, A100, (8192, 5, 3), FULL, 1795, True),
    _mpt("13B", 8, A100_40, (2048, 4, 16), PURE, 1668),
    _mpt("30B", 8, A100, (2048, 3, 21), FULL, 916),
    _mpt("70B", 64, A100, (2048, 8, 4), PURE, 410),
    _llama("8B", 64, A100, (8192, 1, 1), OPS, 2973, TITAN_A100),
    _llama("13B", 64, A100, (4096, 2, 1), KEEP, 2162, TITAN_A100),
    _llama("70B", 64, A100, (8192, 1, 1), FULL, 331, TITAN_A100),
    _mpt("760M", 8, H100, (2048, 24, 2), KEEP, 63147),
    _mpt("1B", 8, H100, (2048, 14, 1), KEEP, 45455, True),
    _mpt("1B", 64, H100, (2048, 20, 1), KEEP, 44402),
    _mpt("3B", 8, H100, (8192, 3, 6), KEEP, 16578),
    _mpt("7B", 8, H100, (2048, 6, 1), KEEP, 10643),
    _mpt("7B", 8, H100, (8192, 8, 2), FULL, 6935, True),
    _mpt("13B", 8, H100, (2048, 2, 1), KEEP, 4792, True),
    _mpt("13B", 64, H100, (2048, 2, 1), KEEP, 4800),
    _mpt("30B", 8, H100, (2048, 3, 21), FULL, 2002),
    _mpt("70B", 64, H100, (2048, 8, 4), FULL, 1039),
    _llama("8B", 8, H100_96, (8192, 2, 1), OPS, 5762, TITAN_H100, True),
    _llama("8B", 8, H100_96, (8192, 2, 1), COMPILED, 6667, TITAN_H100, True),
    _llama("8B", 8, H100_96, (8192, 2, 1), FLOAT8, 8532, TITAN_H100, True),
    _llama("8B", 128, H100_96, (8192, 2, 1), OPS, 5605, TITAN_H100),
    _llama("8B", 128, H100_96, (8192, 2, 1), COMPILED, 6514, TITAN_H100),
    _llama("8B", 128, H100_96, (8192, 2, 1), FLOAT8, 8380, TITAN_H100),
    _llama("8B", 8, H100, (8192, 1, 1), COMPILED, 6150, "pytorch/ao, docs/source/workflows/training.md"),
    _llama("8B", 8, H100, (8192, 1, 1), FLOAT8, 7690, "pytorch/ao, docs/source/workflows/training.md"),
    _llama(
        "8B", 32, H200, (8192, 2, 1), FLOAT8, 10938, "pytorch/torchtitan, benchmarks/llama3-8b_h200_202506"
    ),
    _llama("7B", 1, H200, (4096, 4, 1), FULL, 10471, "KempnerForge benchmarks"),
    _llama("7B", 4, H200, (4096, 4, 1), FULL, 9746, "KempnerForge benchmarks"),
)


def table() -> str:
    lines = [
        "| model | GPUs | length x micro-batch x accumulation | recipe | published | predicted | error | |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for one in ANCHORS:
        gpu = "H100 HBM2e" if one.gpu is H100_96 else one.gpu.label
        recipe = (
            ", ".join("compile" if value is True else str(value) for value in one.recipe.values()) or "keep"
        )
        shape = f"{one.length} x {one.micro_batch} x {one.accum}"
        lines.append(
            f"| {one.model} | {one.gpus} {gpu} | {shape} | {recipe} | {one.published:,} | "
            f"{one.predicted:,.0f} | {one.error:+.0%} | {'fitted' if one.fitted else ''} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
