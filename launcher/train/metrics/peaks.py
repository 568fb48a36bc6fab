"""What a GPU can do at most: the denominator of MFU."""

from __future__ import annotations

import re

TFLOPS = 1e12

# Name as torch.cuda.get_device_name() gives it -> dense FLOP/s of 16-bit matrix products with fp32
# accumulation, which is what PyTorch does. The first match counts. Data sheets often give the figure with
# 2:4 sparsity, twice this one. A name that is not here (MIG slices, laptops, AMD) has no MFU.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"NVIDIA B200", 2250),  # DGX B200 data sheet: 4.5 PFLOPS with sparsity
    (r"NVIDIA H200 NVL", 835.5),  # H200 data sheet: 1,671 with sparsity
    (r"NVIDIA H200|NVIDIA GH200.*", 989.5),  # H200, GH200 data sheets: 1,979 with sparsity
    (r"NVIDIA H100 80GB HBM3", 989.5),  # SXM; H100 data sheet: 1,979 with sparsity
    (r"NVIDIA H100 NVL", 835.5),  # H100 NVL data sheet: 1,671 with sparsity
    (r"NVIDIA H100 PCIe", 756.5),  # H100 data sheet: 1,513 with sparsity
    (r"(NVIDIA )?A100[- ].*", 312),  # A100 data sheet, SXM and PCIe alike
    (r"NVIDIA L40S", 362),  # L40S data sheet: 362.05
    (r"NVIDIA L40", 181),  # L40 data sheet: 181.05
    (r"NVIDIA L4", 121),  # L4 data sheet: 242 with sparsity
    (r"NVIDIA A40", 149.7),  # A40 data sheet
    (r"NVIDIA A10", 125),  # A10 data sheet
    (r"NVIDIA RTX 6000 Ada Generation", 364.2),  # Ada white paper, appendix
    (r"(NVIDIA )?RTX A6000", 154.8),  # GA102 white paper: 309.7 with sparsity
    (r"(NVIDIA )?RTX A5000", 111.1),  # RTX A5000 data sheet: 222.2 with sparsity
    (r"NVIDIA GeForce RTX 4090", 165.2),  # Ada white paper, fp32 accumulation (half of fp16's)
    (r"NVIDIA GeForce RTX 3090", 71),  # GA102 white paper, fp32 accumulation (half of fp16's)
    (r"Tesla V100-SXM[23]-.*", 125),  # V100 data sheet; fp16 only, bf16 is emulated
    (r"Tesla V100-PCIE-.*", 112),  # V100 data sheet; fp16 only, bf16 is emulated
)


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of one GPU, None when it is not known."""
    if "MIG" in device_name:  # a part of the GPU
        return None
    tera = next((peak for name, peak in _PEAKS if re.fullmatch(name, device_name)), None)
    return None if tera is None else tera * TFLOPS
