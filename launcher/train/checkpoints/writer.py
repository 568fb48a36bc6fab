"""The file writer of torch.distributed.checkpoint, extended to publish a complete checkpoint."""

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

from launcher.train.checkpoints.disk_space import bytes_of, make_room
from launcher.train.checkpoints.folder import LABEL, end_of_file, partial_path, publish
from launcher.train.checkpoints.retention import remove_all_but


class Writer(FileSystemWriter):
    """Checks the free space, writes each rank's own file, and publishes the checkpoint at the end.

    All of this runs inside DCP's steps, in the foreground and in the background. DCP raises an error of one
    rank on every rank as a CheckpointException, so no rank waits for a failed one, and all agree on the
    outcome.
    """

    def __init__(
        self,
        final: Path,
        rank_file_name: str,
        own: bytes,
        marker: dict[str, Any],
        *,
        keep: int,
        scarce: bool,
        first: bool,
    ) -> None:
        """`own` is the content of this rank's file `rank_file_name`. `marker` has a LABEL. `keep` checkpoints
        are kept. `scarce` is that of `make_room`."""
        super().__init__(partial_path(final))
        self.final, self.rank_file_name, self.own, self.marker = final, rank_file_name, own, marker
        self.keep, self.scarce, self.first = keep, scarce, first

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory and send the size of the rank's own file to rank 0. Runs on every rank."""
        if self.first:
            shutil.rmtree(self.path, ignore_errors=True)
        # A writer may use `storage_data` freely; the global plan below replaces it with DCP's.
        return replace(super().prepare_local_plan(plan), storage_data=len(self.own))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the space for all ranks on rank 0. The plans no longer contain duplicate replicas."""
        needed = bytes_of(plans) + sum(plan.storage_data for plan in plans)
        make_room(self.final.parent, needed, self.keep, scarce=self.scarce)
        return super().prepare_global_plan([replace(plan, storage_data=None) for plan in plans])

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._finish_file(self.rank_file_name, self.own)
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save hides why a write failed behind an assertion about the position in its file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        for name in dict.fromkeys(result.storage_data.relative_path for result in written.value()):
            self._finish_file(name)
        return written

    def _finish_file(self, name: str, content: bytes = b"") -> None:
        """Write the content, if any, and append the label. Wait until the file is on the disk."""
        with open(Path(self.path) / name, "wb" if content else "ab") as file:
            file.write(content + end_of_file(self.marker[LABEL], name))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint on rank 0, after every rank has written its files."""
        super().finish(metadata, results)
        publish(self.final, self.marker)
        remove_all_but(self.final.parent, self.keep)
