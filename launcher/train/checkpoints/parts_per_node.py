"""Checkpoints of nodes that share no folder: each node has its ranks' part and its own `.metadata`.

Each node writes a copy of replicas and non-tensor values, so that the same ranks find everything they read on
their own host. File names differ between nodes: the parts copied into one folder are a complete checkpoint.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from launcher.spec.listed_names import listed
from launcher.train.checkpoints.disk_space import NoSpaceError, bytes_of, make_room
from launcher.train.checkpoints.folder import (
    PartsError,
    complete_checkpoints,
    partial_path,
    publish,
    read_marker,
)
from launcher.train.checkpoints.reader import CheckpointReader
from launcher.train.checkpoints.retention import remove_all_but
from launcher.train.checkpoints.writer import Writer

SHOWN = 3
"Number of files that a message names."


class NodePlanner(DefaultSavePlanner):
    """Each node writes each piece of its ranks once. The metadata lists each piece once for all nodes."""

    def __init__(self, per_node: int) -> None:
        super().__init__()
        self.per_node = per_node

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Remove duplicates within each node. Runs on rank 0."""
        _, metadata = super().create_global_plan(all_plans)
        plans = []
        for first in range(0, len(all_plans), self.per_node):
            plans += dedup_save_plans(all_plans[first : first + self.per_node])
        self.global_plan = plans
        return plans, metadata


class NodeWriter(Writer):
    """A Writer for nodes that share no folder. The first rank of each node calls `publish` for its node, and
    `clean` once all have published."""

    def __init__(self, *args: Any, node: int, per_node: int, host: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.node, self.per_node, self.host = node, per_node, host

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Send each rank the bytes that its node writes. Rank 0 cannot check the disks of other hosts."""
        bare = [replace(plan, storage_data=None) for plan in plans]
        named = FileSystemWriter.prepare_global_plan(self, bare)
        extended = []
        for number, plan in enumerate(named):
            first = number - number % self.per_node
            of_node = plans[first : first + self.per_node]
            needed = bytes_of(of_node) + sum(each.storage_data for each in of_node)
            extended.append(replace(plan, storage_data=(plan.storage_data, needed)))
        return extended

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, needed = plan.storage_data
        if self.first:
            # Other ranks of the node may already be writing.
            written = sum(file.stat().st_size for file in Path(self.path).iterdir())
            try:
                make_room(self.final.parent, max(0, needed - written), self.keep, scarce=self.scarce)
            except NoSpaceError as error:
                raise NoSpaceError(f"{self.host}: {error}") from None
        return super().write_data(replace(plan, storage_data=name), planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Store the results on rank 0. DCP's save returns this metadata on all ranks."""
        metadata.storage_data, metadata.storage_meta = results, self.storage_meta()

    def publish(self, metadata: Metadata) -> None:
        """Publish the node's part. Call this on the first rank of each node. If several nodes have a piece,
        the metadata refers to this node's file."""
        results: list[list[WriteResult]] = metadata.storage_data
        own = range(self.node * self.per_node, (self.node + 1) * self.per_node)
        ours = [result for number, result in enumerate(results) if number in own]
        others = [result for number, result in enumerate(results) if number not in own]
        save = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
        FileSystemWriter.finish(self, metadata, [*others, *ours])
        publish(self.final, {**self.marker, "save": save, "per_node": self.per_node})

    def clean(self) -> None:
        """Remove the node's older checkpoints."""
        remove_all_but(self.final.parent, self.keep)


class PartsReader(CheckpointReader):
    """Reports files that are missing on this host before any rank begins to read."""

    def __init__(
        self, path: Path, host: str = "this host", own: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> None:
        """`own` lists additional files that are needed. `hosts` has the known names of the nodes."""
        super().__init__(path)
        self.host, self.own, self.hosts = host, own, hosts

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check that all files exist. Raises PartsError."""
        folder = Path(self.path)
        needed = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        missing = sorted(name for name in {*needed, *self.own} if not (folder / name).exists())
        if missing:
            owners = _owners(missing, read_marker(folder), self.hosts)
            raise PartsError(
                f"{self.host} lacks {listed(missing, SHOWN)} of {folder}: the hosts of the run share no "
                f"folder, and each has the files of its own ranks ({owners}); resume with the same hosts and "
                "ranks, or copy these files into the same folder here"
            )
        return super().prepare_local_plan(plan)


def _owners(names: Sequence[str], marker: Mapping[str, Any], hosts: Sequence[str]) -> str:
    ranks = {int(match[1]) for name in names if (match := re.match(r"(?:__|rank-)(\d+)", name))}
    nodes = sorted({rank // int(marker.get("per_node", 1)) for rank in ranks})
    named = [hosts[node] if node < len(hosts) else f"node {node}" for node in nodes]
    return f"these are of {', '.join(named)}"


def newest_on_all_nodes(saves: Sequence[Mapping[int, str]]) -> int:
    """Return the newest step for which every node has its part of the same save, or 0. `saves` has a dict
    `{step: id of the save}` for each node."""
    common = {step for step, save in saves[0].items() if all(node.get(step) == save for node in saves)}
    return max(common, default=0)


def set_aside(folder: Path, newest: int) -> None:
    """Rename parts after `newest`. Call this on the first rank of a node.

    If a host publishes its part while another one dies, the part is incomplete, but would count as the newest
    and displace complete checkpoints. It is not deleted: the other parts may come back.
    """
    for step, path in complete_checkpoints(folder).items():
        if step > newest:
            aside = path.with_name(f"set-aside-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def discard(final: Path) -> None:
    """Remove the node's part after another node failed to publish. Call this on the first rank of a node."""
    shutil.rmtree(final, ignore_errors=True)
    shutil.rmtree(partial_path(final), ignore_errors=True)
