"""The program of each rank of a doctor's run: connect as a job's ranks do, and record how long it took."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.spec import variables

SECONDS = 60.0
"Time limit for connecting all ranks and for one all-reduce."


def main() -> None:
    """Run an all-reduce with the backend of training. Raises torch's exception if that fails."""
    began = time.monotonic()
    import torch
    import torch.distributed as dist

    imported = time.monotonic()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=SECONDS))
    total = torch.tensor(float(rank), device=device)
    dist.all_reduce(total)
    if int(total) != world * (world - 1) // 2:
        raise RuntimeError(f"the sum of {world} ranks is {int(total)}, not {world * (world - 1) // 2}")
    connected = time.monotonic()
    dist.destroy_process_group()
    attempt = RunDir(Path(os.environ[variables.RUN_DIR])).started(os.environ)
    times = {"ranks": world, "import_seconds": imported - began, "connect_seconds": connected - imported}
    replace_json(attempt.path / "doctor" / f"rank-{rank:03d}.json", times)
    print(f"connected to {world - 1} other ranks in {connected - imported:.2f} s", flush=True)


if __name__ == "__main__":
    main()
