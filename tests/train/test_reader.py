"""A checkpoint from somebody else runs no code when it is read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from launcher.train.checkpoints.export import ExportError, export
from launcher.train.checkpoints.folder import BESIDE_WEIGHTS, MARKER, CheckpointError, RefusedError
from launcher.train.checkpoints.reader import CheckpointPlanner, CheckpointReader, read_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def state() -> dict[str, Any]:
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None, "params": ["w"]}]
    return {"model": {"w": torch.ones(3), "n": torch.tensor(2)}, "optimizer": {"param_groups": groups}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(state(), checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    return tmp_path / "step-00000001"


def rewritten(checkpoint: Path, change: Callable[[Metadata], Any]) -> None:
    metadata = read_metadata(checkpoint)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(change(metadata)))


def evil_value(checkpoint: Path, name: str, value: object) -> None:
    """The piece `name` becomes a value that is no tensor: `value`, pickled by torch.save."""
    torch.save(value, checkpoint / "evil.distcp")
    size = (checkpoint / "evil.distcp").stat().st_size

    def change(metadata: Metadata) -> Metadata:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        for index, piece in list(metadata.storage_data.items()):
            if index.fqn == name:
                del metadata.storage_data[index]
                index = replace(index, offset=None) if index.offset is not None else index
                metadata.storage_data[type(index)(name)] = replace(
                    piece, relative_path="evil.distcp", offset=0, length=size
                )
        return metadata

    rewritten(checkpoint, change)


def read(checkpoint: Path) -> dict[str, Any]:
    into = state()
    into["model"]["w"].zero_()
    into["optimizer"]["param_groups"][0]["lr"] = 0.0
    load(into, storage_reader=CheckpointReader(checkpoint), planner=CheckpointPlanner(), no_dist=True)
    return into


def test_what_was_saved_is_read(checkpoint: Path, tmp_path: Path) -> None:
    into = read(checkpoint)
    assert torch.equal(into["model"]["w"], torch.ones(3))
    assert into["optimizer"] == state()["optimizer"]
    assert export(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("hidden", ["whole", "inside"])
def test_metadata_that_would_run_code_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, hidden: str
) -> None:
    evil = Evil(tmp_path / "PWNED")
    rewritten(checkpoint, lambda m: evil if hidden == "whole" else replace(m, planner_data={"w": evil}))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        read_metadata(checkpoint)
    with pytest.raises(ExportError, match=r"posix\.mkdir"):
        export(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointException, match=r"posix\.mkdir"):
        read(checkpoint)
    assert not (tmp_path / "PWNED").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.w", "optimizer.param_groups.0.lr"])
def test_a_value_that_would_run_code_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    evil_value(checkpoint, name, Evil(tmp_path / "PWNED"))
    with pytest.raises(CheckpointException, match=r"posix\.mkdir") as raised:
        read(checkpoint)
    assert {type(cause) for cause, _ in raised.value.failures.values()} == {RefusedError}
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "", "..", "a/b", 5])
def test_a_piece_in_another_folder_is_refused(checkpoint: Path, path: object) -> None:
    def change(metadata: Metadata) -> Metadata:
        for index, piece in metadata.storage_data.items():
            metadata.storage_data[index] = replace(piece, relative_path=path)
        return metadata

    rewritten(checkpoint, change)
    with pytest.raises(CheckpointError, match="not a file of the checkpoint"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle", pickle.dumps(5), pickle.dumps({})])
def test_damaged_metadata_are_one_error(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not what torch"):
        read_metadata(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["whole", "key", "index"])
def test_metadata_nested_millions_deep_are_one_error(checkpoint: Path, where: str) -> None:
    deep = b")" + b"\x85" * 3_000_000
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    content = {"whole": deep, "key": b"}" + deep + b"Ns", "index": b"}" + index + deep + b"\x85RNs"}
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + content[where] + b".")
    code = (
        "from launcher.train.checkpoints.reader import read_metadata; from pathlib import Path; import sys\n"
        "try: read_metadata(Path(sys.argv[1]))\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, checkpoint], capture_output=True, text=True)
    assert done.returncode == 0, "a fault in C would end the tests as well"
    assert "is not what torch.distributed.checkpoint writes: it holds no Metadata" in done.stdout, done.stderr


@pytest.mark.parametrize("entries", [None, {5: BytesStorageMetadata()}, {"model.w": 5}])
def test_a_damaged_list_of_tensors_is_one_error(checkpoint: Path, tmp_path: Path, entries: Any) -> None:
    rewritten(checkpoint, lambda metadata: replace(metadata, state_dict_metadata=entries))
    with pytest.raises(ExportError, match="is damaged"):
        export(checkpoint, tmp_path / "out")


def test_a_folder_that_is_a_link_is_not_copied_beside_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "id_rsa").write_text("secret")
    (checkpoint.parent / BESIDE_WEIGHTS).symlink_to(tmp_path / "home")
    (checkpoint / MARKER).write_text("[1]")
    export(checkpoint, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
