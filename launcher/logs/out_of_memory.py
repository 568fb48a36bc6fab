"""The words of every library for "no memory left", and the sizes in them.

The one list, for ranks and judge. Its sources, recorded messages, are in tests/logs/out_of_memory.yaml.
"""

from __future__ import annotations

import math
import re

from launcher.spec.verdict import FailureClass, MemoryKind, OutOfMemory

# A size that overflowed, not a memory that is full: no recipe helps (NVIDIA/nccl#1284).
_IMPOSSIBLE = re.compile(r"[Tt]ried to allocate more than 1EB")

# Not in it: cuDNN's "unable to find an engine" and CUBLAS_STATUS_NOT_INITIALIZED. They come of a full memory
# and of much else (a wrong index, a wrong build), so that other words beside them must tell.
# In this order: a full /dev/shm speaks of a full device, pinned host memory speaks CUDA's language.
_WORDS: tuple[tuple[MemoryKind, tuple[str, ...]], ...] = (
    (
        "shared",
        (
            r"DataLoader worker .* is killed by signal: Bus error",
            r"Unexpected bus error encountered in worker",
            r"unable to write to file </torch_",
            r"unable to (?:open|resize|allocate) [^\n]*</?torch_[^\n]*No space left on device",
            r"posix_fallocate failed",  # NCCL's, of a segment in /dev/shm
            r"failed to extend /dev/shm/nccl-",
            r"creating shared memory segment [^\n]*No space left on device",
        ),
    ),
    ("host", (r"pinned host memory", r"failed to alloc \d+ bytes on host", r"HOST_ALLOCATION_FAILED")),
    ("host", (r"OOM when allocating tensor[^\n]*(?:device:CPU|by allocator cpu)",)),
    (
        "gpu",
        (
            # PyTorch; a sentence that only mentions it goes on with a comma or a space.
            r"\b(?:CUDA|HIP|XPU) out of memory(?=\.|:|$)",
            r"(?<![\w.])(?:torch\.(?:cuda\.)?|cupy\.cuda\.memory\.)?OutOfMemoryError(?=:|$)",
            r"(?i:\b(?:cuda|hip)(?: runtime| driver)? error\b[^\n]{0,20}out of memory)",
            r"cudaErrorMemoryAllocation: out of memory",
            r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
            r"[A-Z]{5,9}_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|rocblas_status_memory_error",
            r"CUDNN_STATUS_\w*DEVICE_ALLOCATION_FAILED",
            r"(?:Cuda|HIP) failure (?:\d+ )?'out of memory'|Failed to CUDA [cm]alloc",  # NCCL, RCCL
            r"\bNCCL[^\n]*[Oo]ut of memory",
            r"Triton Error \[\w+\]: out of memory",
            r"Error out of memory at line \d+ in file",  # bitsandbytes, which then exits
            # JAX and XLA. `vmem` is a scratchpad inside the chip: a kernel's own affair.
            r"(?:RESOURCE_EXHAUSTED|[Rr]esource exhausted): (?:Out of memory|Failed to allocate request)",
            r"Ran out of memory in memory space hbm",
            r"Attempting to (?:allocate|reserve) [^\n]{,40}\. That was not possible",
            r"\bINTERNAL: Failed to allocate \d+ bytes",
            # TensorFlow. Its allocator also tells of what it asked for in vain and can do without.
            r"OOM when allocating tensor",
            r"Dst tensor is not initialized",
            r"Allocator \(GPU_\d+_bfc\) ran out of memory(?![^\n]*not a failure)",
            r"ResourceExhaustedError[^\n]*failed to allocate memory",
        ),
    ),
    (
        "host",
        (
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"(?:^|[\s.])(?:_Array)?MemoryError(?=:|$)",
            r"Unable to allocate [\d.]+ [KMGT]iB for an array",  # numpy
            r"std::bad_alloc",
            r"Cannot allocate memory(?! in static TLS)",
            r"DataLoader worker .* is killed by signal: Killed",
            r"(?:java\.lang|ray\.exceptions)\.OutOfMemoryError",
            r"Detected \d+ oom[-_]kill event",  # Slurm
        ),
    ),
)
_COMPILED = tuple((kind, re.compile("|".join(words), re.MULTILINE)) for kind, words in _WORDS)

CLASS_OF: dict[MemoryKind, FailureClass] = {"gpu": "gpu-oom", "host": "host-oom", "shared": "host-oom"}

_SIZE = r"\s*([\d,]*\.?\d+)\s*([KMGT]?)(?:i?B|bytes)?\b"
_REQUESTED = re.compile(
    r"(?:[Tt]ried to allocate|trying to allocate|[Mm]emory allocating|Failed to allocate request for|"
    r"Failed to CUDA [cm]alloc(?: async| host)?|Unable to allocate|[Ff]ailed to alloc(?:ate)?|"
    r"memory of size:|in memory space hbm\. Used|Attempting to (?:allocate|reserve))" + _SIZE
)
# Before torch 2.0: `(GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; 3.03 GiB free; ...)`.
# Until 2.2 it was a "capacty".
_TOTAL = re.compile(
    r"total\s+capaci?ty\s+of" + _SIZE + r"|;" + _SIZE + r" total capacity|hbm\. Used \S+ of" + _SIZE
)
_FREE = re.compile(
    r"of\s+which" + _SIZE + r"\s+is\s+free|;" + _SIZE + r" free;|not possible\. There are" + _SIZE + " free"
)
_SHAPED = re.compile(r"OOM when allocating tensor with shape\[([\d,]+)\] and type (\w+)")
_WIDTHS = {"float": 4, "half": 2, "bfloat16": 2, "double": 8, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def out_of_memory(text: str) -> OutOfMemory | None:
    """Which memory ran out by this exception or line, and the sizes it tells; None for any other failure."""
    if _IMPOSSIBLE.search(text):
        return None
    kind = next((kind for kind, words in _COMPILED if words.search(text)), None)
    if kind is None:
        return None
    requested = _size(_REQUESTED, text)
    if requested is None and (shaped := _SHAPED.search(text)) and shaped[2] in _WIDTHS:
        requested = math.prod(map(int, shaped[1].split(","))) * _WIDTHS[shaped[2]]
    return OutOfMemory(kind=kind, requested=requested, total=_size(_TOTAL, text), free=_size(_FREE, text))


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    """Bytes. Every one of these libraries counts in powers of 1024, whatever it calls them."""
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None]
    return int(float(number.replace(",", "")) * 1024 ** _POWERS[unit])
