"""torch.distributed.checkpoint's writer of files, with what makes a directory of files a checkpoint."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from launcher.train.checkpoints.folder import partial_path, publish, remove_all_but
from launcher.train.checkpoints.space import bytes_of, make_room


class Writer(FileSystemWriter):
    """Writes the file that each rank has for itself, asks for space first, and publishes at the end.

    All of it happens inside DCP's own steps: what fails here on one rank, DCP raises on every rank as a
    CheckpointException, so no rank waits for one that has given up, and all agree on the outcome. In the
    background it is the same.
    """

    def __init__(
        self, final: Path, rank_file_name: str, own: bytes, marker: dict[str, Any], *, keep: int, first: bool
    ) -> None:
        """`own`: the content of this rank's file `rank_file_name`. `keep` checkpoints stay in the folder."""
        super().__init__(partial_path(final))
        self.final, self.rank_file_name, self.own, self.marker = final, rank_file_name, own, marker
        self.keep, self.first = keep, first

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On every rank: make the directory, and tell rank 0 the size of the rank's file."""
        if self.first:
            shutil.rmtree(self.path, ignore_errors=True)
        # `storage_data` is the writer's to use; the global plan below puts DCP's own in its place.
        return replace(super().prepare_local_plan(plan), storage_data=len(self.own))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, which sees what all ranks will write, replicas already left out."""
        needed = bytes_of(plans) + sum(plan.storage_data for plan in plans)
        make_room(self.final.parent, needed, self.keep)
        return super().prepare_global_plan([replace(plan, storage_data=None) for plan in plans])

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with open(Path(self.path) / self.rank_file_name, "wb") as file:
            file.write(self.own)
            file.flush()
            os.fsync(file.fileno())
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when every rank has written everything."""
        super().finish(metadata, results)
        publish(self.final, self.marker)
        remove_all_but(self.final.parent, self.keep)
