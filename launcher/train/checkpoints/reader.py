"""Reading an untrusted checkpoint without running code from it.

DCP's reader unpickles `.metadata` without restrictions, and its planner does so for every non-tensor value.
"""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from launcher.train.checkpoints.folder import (
    CHECKSUMS,
    METADATA,
    CheckpointError,
    RefusedError,
    check_label,
    check_metadata,
    damaged,
    read_marker,
    unreadable,
)

T = TypeVar("T")

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"Names that `.metadata` of torch 2.6 to 2.13 refers to."


_TUPLE_OPCODES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
_STACK_PER_TUPLE = 512
"Stack bytes per nested tuple; Python 3.11 takes less than 105 to hash one."
_USUAL_STACK = 2**21


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"the file refers to {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the metadata that DCP wrote. Raises CheckpointError, and RefusedError for any other content or
    if the content has changed."""
    file = checkpoint / METADATA
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(unreadable(checkpoint, error)) from None
    check_metadata(checkpoint, content)
    try:
        return _with_stack_for(content, lambda: _checked(_Unpickler(io.BytesIO(content)).load()))
    except Exception as error:  # a damaged pickle may raise any type
        raise RefusedError(f"{file} is not what torch.distributed.checkpoint writes: {error}") from None


def _with_stack_for(content: bytes, call: Callable[[], T]) -> T:
    """Return `call()`, run on a stack large enough to hash every tuple in this pickle.

    Python hashes a tuple by recursion in C without a limit: 3 million nested tuples as a dictionary key end
    the process with a segmentation fault.

    Raises: MemoryError, and the exceptions of `call`.
    """
    wanted = _STACK_PER_TUPLE * sum(map(content.count, _TUPLE_OPCODES))
    if wanted < _USUAL_STACK:
        return call()
    result: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    before = threading.stack_size(-(-wanted // 2**20) * 2**20 + _USUAL_STACK)
    try:
        thread.start()
    except RuntimeError as error:
        raise MemoryError(f"reading it may need a stack of {wanted} bytes: {error}") from None
    finally:
        threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return result[0]


def _checked(metadata: object) -> Metadata:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"it holds no Metadata but {type(metadata).__name__}")
    entries = metadata.state_dict_metadata
    if not isinstance(entries, dict) or not all(
        isinstance(name, str) and isinstance(entry, TensorStorageMetadata | BytesStorageMetadata)
        for name, entry in entries.items()
    ):
        raise ValueError("its list of tensors and values is damaged")
    for index, piece in metadata.storage_data.items():
        if not (
            isinstance(index, MetadataIndex)
            and isinstance(index.fqn, str)
            and isinstance(index.offset, torch.Size | None)
        ):
            raise ValueError("its list of pieces is damaged")
        name = piece.relative_path if isinstance(piece, _StorageInfo) else None
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise ValueError(f"a piece is in {name!r}, which is not a file of the checkpoint")
    return metadata


def check_sums(file: Path, what: str, start: int = 0, length: int = -1) -> None:
    """Raise RefusedError if the content differs from a checksum that torch.save wrote; torch.load does not
    check them. Needs as much memory as torch.load while it runs. Raises OSError."""
    with open(file, "rb") as stream:
        stream.seek(start)
        content = io.BytesIO(stream.read(length))
    try:
        sound = zipfile.ZipFile(content).testzip() is None
    except Exception:  # a damaged archive may raise any type
        sound = False
    if not sound:
        raise RefusedError(damaged(file, what))


class CheckpointReader(FileSystemReader):
    """DCP's reader, with `.metadata` read by `read_metadata`, and checksums compared."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises RefusedError for a damaged piece, and for a file that is not of this checkpoint."""
        folder = Path(self.path)
        if read_marker(folder).get(CHECKSUMS):
            for index in dict.fromkeys(item.storage_index for item in plan.items):
                piece = self.storage_data[index]
                check_sums(folder / piece.relative_path, index.fqn, piece.offset, piece.length)
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            check_label(folder / name)
        return super().read_data(plan, planner)


class CheckpointPlanner(DefaultLoadPlanner):
    """DCP's planner, with non-tensor values restricted to numbers, strings and collections of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        try:
            content = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise RefusedError(f"{read_item.storage_index.fqn}: {error}") from None
        torch.save(content, plain)  # the base class reads it again, without restrictions
        plain.seek(0)
        super().load_bytes(read_item, plain)
