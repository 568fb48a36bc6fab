"""The environment of a job's only rank, which is started without torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.rundir.layout import RunDir
from launcher.spec import variables
from launcher.supervise.attempt import free_port


def single_rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun sets for a rank (documentation of torch 2.13, "torchrun", Environment Variables).

    `environ` has LAUNCHER_RUN_DIR, LAUNCHER_RUN_ID and LAUNCHER_ATTEMPT. If the rank makes a process group,
    it serves the store itself. If another process takes the port first, the rank fails at once instead of
    joining that process's store.
    """
    attempt = RunDir(Path(environ[variables.RUN_DIR])).started(environ)
    zeros = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT")
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(zeros, "0"),
        **dict.fromkeys(ones, "1"),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": environ.get(variables.RENDEZVOUS_PORT) or str(free_port()),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"{environ[variables.RUN_ID]}-{attempt.number}",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
