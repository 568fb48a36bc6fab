"""Hashes of tensors, to detect changes without a copy."""

from __future__ import annotations

import ctypes
import hashlib
from functools import lru_cache

import torch

from launcher.memory.optimizer_temporaries import HASHED_BYTES

ROW = 1024
"Number of 32-bit words per 64-bit sum."
CHUNK = HASHED_BYTES // 4
"Number of words converted to 64 bits at a time."


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor: NaN equals NaN, and 0 differs from -0. The result of `conj()` is
    computed first, because it is a view of memory that holds other values."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a small tensor, on the same device, that differs if the content of this plain tensor differs.

    It is SHA-256 on the CPU and `row_sums` on a GPU, which needs neither a copy nor the CPU. torch's version
    counter is not enough: it does not change if a model writes through `tensor.data`.
    """
    data = bits(tensor)
    if data.device.type != "cpu":
        return row_sums(data)
    octets = (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
    return torch.frombuffer(bytearray(hashlib.sha256(octets).digest()), dtype=torch.uint8)


def row_sums(data: torch.Tensor) -> torch.Tensor:
    """Return one 64-bit sum for every ROW words of a contiguous tensor of one dimension.

    Each sum is a multilinear hash: the words times random odd 64-bit factors, modulo 2^64. A change within a
    row keeps its sum with a probability of about 2^-32: if word i differs by d_i, |d_i| < 2^32, then the sum
    of all d_i times the factors is 0 modulo 2^64 for at most one in 2^32 choices of any one factor (Carter
    and Wegman 1979).
    """
    if data.storage_offset() * data.element_size() % 4:
        data = data.clone()
    octets = data.view(torch.uint8)
    whole = octets.numel() // 4 * 4
    words = octets[:whole].view(torch.int32)
    factors = _factors(data.device)
    parts = [octets[whole:].to(torch.int64)]
    for chunk in torch.split(words, CHUNK):
        in_rows = chunk.numel() // ROW * ROW
        wide = chunk.to(torch.int64)
        parts.append(wide[:in_rows].view(-1, ROW).mul_(factors).sum(1))
        parts.append((wide[in_rows:] * factors[: chunk.numel() - in_rows]).sum(0, keepdim=True))
        del wide  # before the next chunk is converted
    return torch.cat(parts)


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """Return ROW odd 64-bit numbers, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(0, 2**32, (2, ROW), generator=generator)
    return ((halves[0] << 32) | halves[1] | 1).to(device)
