"""What to do about failures with a message that says too little to a user."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.spec.verdict import FailureClass

REMEDIES: tuple[tuple[FailureClass, str, str], ...] = (
    (
        "user-error",
        r"Expected more than 1 value per channel when training",
        "BatchNorm needs at least two samples in a micro-batch: set model.batch_norm: true, so that launcher "
        "never lowers it to one, and give each rank at least two samples of batch.global; or use GroupNorm",
    ),
    (
        "user-error",
        r"Cannot re-initialize CUDA in forked subprocess",
        "use CUDA only in the main process, also for questions such as torch.cuda.is_bf16_supported(): ask "
        "them before the DataLoader starts its workers, or start these with multiprocessing_context='spawn'",
    ),
    (
        "user-error",
        r"partially initialized module '",
        "a file imports a module that imports this file. If the module is not yours, a file in the job's "
        "folder has the name of a module of Python or of a library: rename it (the traceback shows it)",
    ),
    (
        "user-error",
        r"_amp_foreach_non_finite_check_and_unscale_cuda\S* not implemented for 'BFloat16'",
        "leave the GradScaler out: it is for fp16, and bf16 needs none",
    ),
    (
        "user-error",
        r"CUDA error: no kernel image is available|is not compatible with the current PyTorch installation",
        "install a PyTorch that is built for the compute capability of this GPU",
    ),
    (
        "nccl-timeout",
        r"unhandled system error|ncclSystemError|NCCL WARN[^\n]*(?:shared memory|/dev/shm)",
        "NCCL could not use a socket, shared memory or a network adapter: NCCL_DEBUG=INFO prints which. If "
        "it is /dev/shm, NCCL_SHM_DISABLE=1 avoids it",
    ),
)
"Failure classes and regular expressions of messages, each with what to do."


def remedy_of(failure: FailureClass, texts: Iterable[str]) -> str:
    """Return the remedy for the first text with a known message of this failure; "" if there is none.

    Such messages also follow from other failures: NCCL fails on the other ranks when one is killed.
    """
    remedies = (
        remedy
        for text in texts
        for cls, pattern, remedy in REMEDIES
        if cls == failure and re.search(pattern, text)
    )
    return next(remedies, "")
