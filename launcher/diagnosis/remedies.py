"""What to do about failures whose message says too little to a user."""

from __future__ import annotations

import re
from collections.abc import Iterable

REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"Expected more than 1 value per channel when training",
        "BatchNorm needs at least two samples in a micro-batch: set model.batch_norm: true, so that launcher "
        "never lowers it to one, and give each rank at least two samples of batch.global; or use GroupNorm",
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "use CUDA only in the main process, also for questions such as torch.cuda.is_bf16_supported(): ask "
        "them before the DataLoader starts its workers, or start these with multiprocessing_context='spawn'",
    ),
    (
        r"_amp_foreach_non_finite_check_and_unscale_cuda\S* not implemented for 'BFloat16'",
        "leave the GradScaler out: it is for fp16, and bf16 needs none",
    ),
    (
        r"CUDA error: no kernel image is available|is not compatible with the current PyTorch installation",
        "install a PyTorch that is built for the compute capability of this GPU",
    ),
    (
        r"unhandled system error|ncclSystemError|NCCL WARN[^\n]*(?:shared memory|/dev/shm)",
        "NCCL could not use a socket, shared memory or a network adapter: NCCL_DEBUG=INFO prints which. If "
        "it is /dev/shm, NCCL_SHM_DISABLE=1 avoids it",
    ),
)
"Regular expressions of messages, each with what to do."


def remedy_of(texts: Iterable[str]) -> str:
    """Return what to do about the first text that is known; "" if none is."""
    found = (remedy for text in texts for pattern, remedy in REMEDIES if re.search(pattern, text))
    return next(found, "")
