"""Data sheets: the peak rates of GPUs and their links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from launcher.memory.states import Ranks
from launcher.spec.cluster import Cluster
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Precision
from launcher.spec.value import Value

TERA, GIGA = 1e12, 1e9

# Bytes per second in one direction, 16 lanes: PCI-SIG's rates after encoding, rounded.
PCIE_3, PCIE_4, PCIE_5 = 16.0, 32.0, 64.0
NO_NVLINK = 0.0
"Also for GPUs that a bridge joins in pairs: a ring over more than two of them goes over PCIe."

DEFAULT_INTER_NODE = 100e9 / 8
"Bytes/s between nodes if the profile does not set `network.inter_node`: 100 Gb/s, an assumption."

Architecture = Literal["Volta", "Ampere", "Ada", "Hopper", "Blackwell"]


class GpuType(NamedTuple):
    """One type of GPU.

    FLOP/s are dense and accumulate in fp32, as in PyTorch. Data sheets often give twice this figure, for 2:4
    sparsity.
    """

    names: str
    "Regular expression that matches torch.cuda.get_device_name()."
    label: str
    "Its common name."
    architecture: Architecture
    half: float
    "TFLOP/s of 16-bit matrix products."
    fp32: float
    "TFLOP/s of fp32 without tensor cores: torch's default for fp32 matrix products."
    float8: float | None
    bandwidth: float
    "GB/s of the GPU's memory."
    memory: float
    'GiB that a process sees: "total capacity" in PyTorch\'s out-of-memory messages.'
    nvlink: float
    "GB/s of one GPU to all others of its node, in one direction."
    pcie: float
    "GB/s to the host in one direction."

    def flops(self, precision: Precision) -> float | None:
        """Return the FLOP/s of matrix products; None if the GPU does not support the precision."""
        if precision == "float8":
            return None if self.float8 is None else self.float8 * TERA
        if precision == "fp32" or (self.architecture == "Volta" and precision != "fp16-mixed"):
            return self.fp32 * TERA  # Volta's tensor cores have no bf16
        return self.half * TERA


# The first match counts. Source of a row: NVIDIA's data sheet of the GPU, or the named white paper. GPUs that
# are not listed (MIG slices, laptops, AMD) have no known peak.
# fmt: off
GPU_TYPES: tuple[GpuType, ...] = (
    # DGX B200 data sheet, of 8: 72 PFLOPS float8 with sparsity, 64 TB/s, NVLink 14.4 TB/s in both directions
    GpuType(r"NVIDIA B200", "B200", "Blackwell", 2250, 75, 4500, 8000, 178.3, 900, PCIE_5),
    # H200 data sheet: 1,671 and 1,979 with sparsity; NVLink 900 GB/s in both directions
    GpuType(r"NVIDIA H200 NVL", "H200 NVL", "Hopper", 835.5, 60, 1671, 4800, 139.8, 450, PCIE_5),
    GpuType(r"NVIDIA H200", "H200", "Hopper", 989.5, 67, 1979, 4800, 139.8, 450, PCIE_5),
    # GH200 data sheet, 96 GB HBM3; its link to the host is NVLink-C2C, 450 GB/s in each direction.
    # The size in the device's name is the host's.
    GpuType(r"NVIDIA GH200 (120|480)GB", "GH200", "Hopper", 989.5, 67, 1979, 4000, 94.5, NO_NVLINK, 450),
    # H100 data sheet: SXM 1,979, PCIe 1,513 with sparsity; H100 NVL data sheet: 1,671, bridges in pairs
    GpuType(r"NVIDIA H100 80GB HBM3", "H100", "Hopper", 989.5, 67, 1979, 3350, 79.1, 450, PCIE_5),
    GpuType(r"NVIDIA H100 NVL", "H100 NVL", "Hopper", 835.5, 60, 1671, 3900, 93.1, NO_NVLINK, PCIE_5),
    GpuType(r"NVIDIA H100 PCIe", "H100 PCIe", "Hopper", 756.5, 51, 1513, 2000, 79.1, NO_NVLINK, PCIE_5),
    # A100 data sheet: SXM has NVLink of 600 GB/s in both directions, PCIe a bridge in pairs
    GpuType(r"(NVIDIA )?A100-SXM.*80GB", "A100 80GB", "Ampere", 312, 19.5, None, 2039, 79.1, 300, PCIE_4),
    GpuType(r"(NVIDIA )?A100-SXM.*40GB", "A100 40GB", "Ampere", 312, 19.5, None, 1555, 39.4, 300, PCIE_4),
    GpuType(r"(NVIDIA )?A100 80GB PCIe", "A100 80GB PCIe", "Ampere", 312, 19.5, None, 1935, 79.1,
         NO_NVLINK, PCIE_4),
    GpuType(r"(NVIDIA )?A100-PCIE-40GB", "A100 40GB PCIe", "Ampere", 312, 19.5, None, 1555, 39.4,
         NO_NVLINK, PCIE_4),
    # L40S data sheet: 362.05, 91.6, 733
    GpuType(r"NVIDIA L40S", "L40S", "Ada", 362, 91.6, 733, 864, 44.4, NO_NVLINK, PCIE_4),
    # L40 data sheet: 181.05, 90.5, 362
    GpuType(r"NVIDIA L40", "L40", "Ada", 181, 90.5, 362, 864, 44.4, NO_NVLINK, PCIE_4),
    # L4 data sheet: 242, 485 with sparsity
    GpuType(r"NVIDIA L4", "L4", "Ada", 121, 30.3, 242.5, 300, 22.0, NO_NVLINK, PCIE_4),
    # A40 data sheet; bridge in pairs
    GpuType(r"NVIDIA A40", "A40", "Ampere", 149.7, 37.4, None, 696, 44.4, NO_NVLINK, PCIE_4),
    # A10 data sheet
    GpuType(r"NVIDIA A10", "A10", "Ampere", 125, 31.2, None, 600, 22.0, NO_NVLINK, PCIE_4),
    # Ada white paper, appendix
    GpuType(r"NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "Ada", 364.2, 91.1, 728.5, 960, 47.4,
         NO_NVLINK, PCIE_4),
    # GA102 white paper: 309.7 with sparsity; bridge in pairs
    GpuType(r"(NVIDIA )?RTX A6000", "RTX A6000", "Ampere", 154.8, 38.7, None, 768, 47.4, NO_NVLINK, PCIE_4),
    # RTX A5000 data sheet: 222.2 with sparsity; bridge in pairs
    GpuType(r"(NVIDIA )?RTX A5000", "RTX A5000", "Ampere", 111.1, 27.8, None, 768, 23.6, NO_NVLINK, PCIE_4),
    # RTX Blackwell white paper, fp32 accumulation (half of fp16's)
    GpuType(r"NVIDIA GeForce RTX 5090", "RTX 5090", "Blackwell", 209.5, 104.8, 419, 1792, 31.3,
         NO_NVLINK, PCIE_5),
    # Ada white paper, fp32 accumulation (half of fp16's)
    GpuType(r"NVIDIA GeForce RTX 4090", "RTX 4090", "Ada", 165.2, 82.6, 330.3, 1008, 23.6, NO_NVLINK, PCIE_4),
    GpuType(r"NVIDIA GeForce RTX 4080", "RTX 4080", "Ada", 97.5, 48.7, 194.9, 716.8, 15.7, NO_NVLINK, PCIE_4),
    # GA102 white paper, fp32 accumulation (half of fp16's); the 3090 has a bridge in pairs
    GpuType(r"NVIDIA GeForce RTX 3090", "RTX 3090", "Ampere", 71, 35.6, None, 936, 23.6, NO_NVLINK, PCIE_4),
    GpuType(r"NVIDIA GeForce RTX 3080", "RTX 3080", "Ampere", 59.5, 29.8, None, 760, 9.7, NO_NVLINK, PCIE_4),
    # GA102 white paper, appendix
    GpuType(r"NVIDIA GeForce RTX 3070", "RTX 3070", "Ampere", 40.6, 20.3, None, 448, 7.7, NO_NVLINK, PCIE_4),
    # NVIDIA's specifications: 3584 cores x 2 x 1.78 GHz, 192 bit x 15 Gb/s; products as GA102's: 2 x fp32
    GpuType(r"NVIDIA GeForce RTX 3060", "RTX 3060", "Ampere", 25.5, 12.7, None, 360, 11.7, NO_NVLINK, PCIE_4),
    # V100 data sheet; fp16 only, bf16 is emulated; NVLink 300 GB/s in both directions
    GpuType(r"Tesla V100-SXM[23]-32GB.*", "V100 32GB", "Volta", 125, 15.7, None, 900, 31.7, 150, PCIE_3),
    GpuType(r"Tesla V100-SXM[23]-16GB.*", "V100 16GB", "Volta", 125, 15.7, None, 900, 15.7, 150, PCIE_3),
    GpuType(r"Tesla V100-PCIE-32GB.*", "V100 32GB PCIe", "Volta", 112, 14, None, 900, 31.7,
         NO_NVLINK, PCIE_3),
    GpuType(r"Tesla V100-PCIE-16GB.*", "V100 16GB PCIe", "Volta", 112, 14, None, 900, 15.7,
         NO_NVLINK, PCIE_3),
)
# fmt: on


class Hardware(Value):
    """The hardware properties that determine a job's speed."""

    gpu: GpuType
    inter_node: float
    "Bytes/s of one node's network, in one direction."
    threads: int
    "CPU threads of each rank."
    assumed: tuple[str, ...] = ()
    "Assumptions for figures that neither the job nor the profile gives."

    @property
    def intra_node(self) -> float:
        """Bytes/s from one GPU to another GPU of its node."""
        return (self.gpu.nvlink or self.gpu.pcie) * GIGA


_NOT_THE_MODEL = re.compile(r"nvidia|geforce|tesla|rtx|pcie|nvl|sxm\d?|hbm\d?e?|\b\d+ ?gi?b\b")
"Words of a name other than the model: maker, family, form and memory."


def gpu_type_of(name: str, memory: int | None = None) -> GpuType | None:
    """Find the GPU that a name means; None if it is unknown or may be several.

    `memory`: bytes of one GPU, which distinguish an A100 of 40 GB from one of 80 GB.
    """
    types = gpu_types_of(name)
    if len(types) > 1 and memory is not None:
        types = [gpu for gpu in types if _has(gpu, memory)]
    return types[0] if len(types) == 1 else None


def gpu_types_of(name: str) -> list[GpuType]:
    """Return the GPUs that a label, the name of a device or another spelling (`rtx4090`, `A6000`) may mean.

    If several have the label or device name, return only the first. Any other word of a spelling must be the
    model's, so a MIG slice or a laptop GPU is not mistaken for the full GPU.
    """
    normalized = plain(name).removeprefix("nvidia")
    devices = () if "MIG" in name else (name, f"NVIDIA {name}")
    for gpu in GPU_TYPES:
        if plain(gpu.label) == normalized or any(
            re.fullmatch(gpu.names, device, re.IGNORECASE) for device in devices
        ):
            return [gpu]
    types = [gpu for gpu in GPU_TYPES if model_of(gpu.label) == model_of(name)]
    if size := re.search(r"\b(\d+) ?gi?b\b", _spaced(name)):
        types = [gpu for gpu in types if _has(gpu, int(size[1]) * GIB)]
    of_form = [gpu for gpu in types if _form(gpu.label) == _form(name)]
    return of_form if of_form and (_form(name) or "sxm" in normalized) else types


def _form(name: str) -> str:
    """Return the form that a name states; empty for SXM, which labels leave out."""
    return next((form for form in ("pcie", "nvl") if form in plain(name)), "")


def _has(gpu: GpuType, memory: int) -> bool:
    """Return whether the GPU has about this much memory. Of 48 GB, a process sees 44.4 to 47.4 GiB."""
    return abs(memory - memory_of(gpu)) < memory_of(gpu) / 10


def _spaced(name: str) -> str:
    return re.sub(r"[-_]", " ", name.lower())


def model_of(name: str) -> str:
    """`A100 80GB PCIe` -> `a100`, `RTX A6000` -> `a6000`, `RTX 6000 Ada` -> `6000ada`."""
    return plain(_NOT_THE_MODEL.sub(" ", _spaced(name)))


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def peak_flops(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of one GPU, the denominator of MFU; None if unknown."""
    gpu = gpu_type_of(device_name)
    return None if gpu is None else gpu.half * TERA


def hardware_of(cluster: Cluster, ranks: Ranks, env: Mapping[str, str] | None = None) -> Hardware | None:
    """Return the hardware of a job; None without GPUs, or if the speed of the profile's GPU is unknown.

    `env`: the job's environment variables.
    """
    gpu = cluster.node.gpu
    gpu_type = gpu_type_of(gpu.type, gpu.memory) if gpu is not None and ranks.on_gpu else None
    if gpu_type is None:
        return None
    assumed = []
    inter_node = cluster.network.inter_node
    if inter_node is None and ranks.world > ranks.per_node:
        assumed.append("100 Gb/s between nodes, since the profile has no network.inter_node")
    # A rank has OMP_NUM_THREADS=1 if a node has several and the variable is not set, as under torchrun.
    omp_threads = {**cluster.env, **(env or {})}.get("OMP_NUM_THREADS", "")
    alone = (cluster.node.cpus or 1) if ranks.per_node == 1 else 1
    return Hardware(
        gpu=gpu_type,
        inter_node=DEFAULT_INTER_NODE if inter_node is None else inter_node,
        threads=int(omp_threads) if omp_threads.isdigit() and int(omp_threads) else alone,
        assumed=tuple(assumed),
    )


def memory_of(gpu: GpuType) -> int:
    """Return the bytes of GPU memory that a process sees."""
    return int(gpu.memory * GIB)
