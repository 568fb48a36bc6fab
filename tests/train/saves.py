"""Run on every rank by test_checkpoints.py: saves, resumes, and saves that fail."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.train.checkpoints import checkpoints, writer
from launcher.train.checkpoints.folder import NotSavedError, complete_checkpoints
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import HERE, job, recipe

Bits = dict[str, torch.Tensor]
FILES = 7
"Inodes of a checkpoint of two ranks: its folder, the marker, the metadata and two files of each rank."


def trainer(rank: Rank, folder: Path, sharding: str, dim: int = 16, **train: Any) -> Trainer:
    asked = job(task="normed:Normed", args={"dim": dim}, train={"keep_checkpoints": 2, **train})
    changes = {"run": RunDir(folder), "recipe": recipe(sharding, 2, 2), "job": asked, "workdir": str(HERE)}
    return Trainer(Rank(**{**vars(rank), **changes}), Where(), Unlimited())


def steps(made: Trainer, first: int, last: int) -> list[float]:
    return [made.train_step(step).loss for step in range(first, last + 1)]


def bits(made: Trainer) -> Bits:
    """This rank's parameters, optimizer states and buffers."""
    found = {f"buffer {name}": buffer for name, buffer in made.model.named_buffers()}
    for name, p in made.model.named_parameters():
        found[name] = local(p.detach())
        found |= {f"{name} {key}": local(value) for key, value in made.optimizer.state.get(p, {}).items()}
    return {name: value.clone() for name, value in found.items()}


def different(ours: Bits, theirs: Bits) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(*(_octets(one[name]) for one in (ours, theirs)))]


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: those of packed weights may be no numbers, which equal nothing."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def resumes(rank: Rank, folder: Path, sharding: str) -> dict[str, Any]:
    """Three steps, a checkpoint, three steps; and the last three again from the checkpoint."""
    straight = trainer(rank, folder, sharding)
    steps(straight, 1, 3)
    straight.checkpoints.save(3)
    _write_whole(straight, folder)
    buffers = everywhere({name: value for name, value in bits(straight).items() if "buffer" in name})
    undisturbed = steps(straight, 4, 6)
    again = trainer(rank, folder, sharding)
    restored = again.checkpoints.restore()
    return {
        "restored": restored,
        "ranks differ in": different(*buffers),
        "losses": [undisturbed, steps(again, 4, 6)],
        "different": everywhere(different(bits(straight), bits(again))),
    }


def _write_whole(made: Trainer, folder: Path) -> None:
    """What a single process would have: for the test of the export."""
    whole = {
        name.removeprefix("module."): value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in made.model.state_dict().items()
    }
    if made.rank.first:
        torch.save(whole, folder / "whole.pt")


def in_background(rank: Rank, folder: Path) -> dict[str, Any]:
    """Everything is overwritten at once when the call has returned; twice, as the host memory is kept."""
    made = trainer(rank, folder, "fsdp", dim=768, async_checkpoints=True)
    found: dict[str, Any] = {"different": []}
    for step in (1, 2):
        steps(made, step, step)
        before = bits(made)
        assert made.checkpoints.save(step) is None
        found["complete at once"] = sorted(complete_checkpoints(made.checkpoints.folder)) == [1, 2][:step]
        with torch.no_grad():
            for p in made.model.parameters():
                for value in (p, *made.optimizer.state[p].values()):
                    local(value.data).fill_(7.0)
            for name, buffer in made.model.named_buffers():
                if name != "scale":  # a constant: not in the checkpoint
                    buffer.fill_(7)
        saved = made.checkpoints.finished(wait=True)
        assert saved is not None and saved.problem is None and made.checkpoints.finished() is None
        assert made.checkpoints.restore() == step
        found["different"] += everywhere(different(before, bits(made)))
    return found


def fails(rank: Rank, folder: Path, background: bool) -> dict[str, Any]:
    """Rank 1 cannot write its own file, or its part of the tensors: the save fails on both ranks, and works
    when the limit is lifted."""
    made = trainer(rank, folder, "ddp", dim=64, async_checkpoints=background)
    outcomes = []
    for step, limit in ((1, None), (2, 4096), (3, None), (4, 24000)):
        steps(made, step, step)
        _limit_files(limit if rank.number == 1 else None)
        saved = made.checkpoints.save(step) or made.checkpoints.finished(wait=True)
        _limit_files(None)
        assert saved is not None
        dist.barrier()
        left = sorted(path.name for path in made.checkpoints.folder.iterdir())
        outcomes.append([everywhere(saved.problem), left])
        dist.barrier()
    return {"outcomes": outcomes, "saved": made.checkpoints.saved}


def without_inodes(rank: Rank, folder: Path) -> dict[str, Any] | None:
    """Five saves on a file system that has bytes free, and inodes for two checkpoints: as with a quota, only
    a save that fails shows that there is no space. None if such a file system cannot be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"nr_inodes={2 + 2 * FILES + 3}", "tmpfs", str(folder)]
    if rank.first:
        folder.mkdir()
        subprocess.run(mount, capture_output=True)
    dist.barrier()
    if not folder.is_mount():
        return None
    made, outcomes = trainer(rank, folder, "ddp"), []
    for step in range(1, 6):
        saved = made.checkpoints.save(step)
        assert saved is not None
        outcomes.append([saved.problem, sorted(complete_checkpoints(made.checkpoints.folder))])
        dist.barrier()
    if rank.first:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    return {"outcomes": outcomes}


def _limit_files(size: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size or resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def asks_for(rank: Rank, folder: Path) -> list[int]:
    """Bytes that a save of shards asks for, and that it then takes."""
    made = trainer(rank, folder, "fsdp", dim=256)
    steps(made, 1, 1)
    asked = []
    make_room = writer.make_room

    def listening(folder: Path, needed: int, keep: int, *, scarce: bool) -> None:
        asked.append(needed)
        make_room(folder, needed, keep, scarce=scarce)

    writer.make_room = listening
    made.checkpoints.save(1)
    [path] = complete_checkpoints(made.checkpoints.folder).values()
    return [*asked, sum(file.stat().st_size for file in path.iterdir())]


def in_the_way(rank: Rank, folder: Path) -> list[str]:
    """A file where the folder should be, to the end."""
    made = trainer(rank, folder, "ddp")
    steps(made, 1, 1)
    if rank.first:
        folder.mkdir()
        made.checkpoints.folder.write_text("not a folder")
    dist.barrier()
    checkpoints.PAUSE_SECONDS = 0.0
    try:
        made.checkpoints.save_last(1)
    except NotSavedError as error:
        return everywhere(str(error))
    return []


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    folder = out.parent
    result: dict[str, Any] = {
        "resumes": {
            sharding: resumes(rank, folder / sharding, sharding) for sharding in ("ddp", "zero1", "fsdp")
        },
        "in background": in_background(rank, folder / "background"),
        "fails": {
            name: fails(rank, folder / f"fails {name}", name == "background")
            for name in ("foreground", "background")
        },
        "without inodes": without_inodes(rank, folder / "without inodes"),
        "asks for": asks_for(rank, folder / "asks for"),
        "in the way": in_the_way(rank, folder / "in the way"),
    }
    if rank.first:
        replace_json(out, result)
    dist.barrier()
    leave(0)  # as the entrypoint does: threads of torch's that still hold Python objects abort a normal exit


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))
