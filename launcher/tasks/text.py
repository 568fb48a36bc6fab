"""Convert text to token ids: find the files, load the tokenizer, and keep an encoded copy on disk."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import numpy as np

from launcher.tasks.gpt import documentation
from launcher.tasks.windows import TokenFile, Tokens, Windows, open_tokens
from launcher.train.task import Split, TaskError

PART = 2**20
"Characters of a plain text file that are encoded at a time; a part continues to the end of its line."
NEVER_IN_UTF8 = 0xFF
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
"Ends of the names of files that may be in the directory of a tokenizer, and say nothing about it."


class Tokenizer(Protocol):
    vocabulary: int
    separator: int
    "Token after every document."
    identity: str
    "Identifies the encoding in the cache."

    def encode(self, text: str) -> Sequence[int] | Tokens: ...


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8. 255, which UTF-8 never uses, ends a document."""

    vocabulary = 256
    separator = NEVER_IN_UTF8
    identity = "bytes"

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer from a local directory that `save_pretrained` has written. Nothing is downloaded."""

    def __init__(self, path: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise TaskError(
                "tokenizer: needs transformers, which is not installed (`pip install transformers`); "
                "without `tokenizer` every byte is a token"
            ) from None
        if not Path(path).is_dir():
            raise TaskError(f"tokenizer: {path} is not a directory; use one that save_pretrained wrote")
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.vocabulary = len(self._tokenizer)
        if self._tokenizer.eos_token_id is None:
            raise TaskError(f"tokenizer: {path} has no eos_token to put between documents")
        self.separator = int(self._tokenizer.eos_token_id)
        files = (file for file in sorted(Path(path).glob("*")) if file.suffix not in WEIGHTS)
        self.identity = _digest(*(file.read_bytes() for file in files if file.is_file()))

    def encode(self, text: str) -> list[int]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoded)


def tokenizer_at(path: str | None) -> Tokenizer:
    """Return the tokenizer in directory `path`, or Bytes for None. Raises TaskError."""
    return Bytes() if path is None else HuggingFaceTokenizer(path)


@dataclass(frozen=True)
class Text:
    """The source of the token ids.

    `data` is a file or a glob; None is the documentation in Python's `pydoc_data`. `.npy` files, and `.bin`
    files of `dtype`, contain token ids. In `.jsonl` files each line is a document with its text in `field`.
    Any other file is one document. Documents are concatenated, with a separator after each.
    """

    data: str | None = None
    field: str = "text"
    tokenizer_path: str | None = None
    dtype: Literal["uint16", "uint32"] = "uint16"
    held_out: float = 0.1

    def __post_init__(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise TaskError(f"dtype: {self.dtype!r} is not known; use uint16 or uint32")
        if not 0 <= self.held_out < 1:
            raise TaskError(f"held_out: {self.held_out} must be at least 0 and below 1; 0.1 is a tenth")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_at(self.tokenizer_path)

    def windows(self, split: Split, context: int, vocabulary: int) -> Windows:
        """Return the windows of `split`. Raises TaskError."""
        return Windows(self._files, context, vocabulary, self.held_out, split)

    @property
    def data_are_tokens(self) -> bool:
        """True if the data are token files, which need no tokenizer."""
        return self.data is not None and all(_is_tokens(path) for path in _matching(self.data))

    @cached_property
    def _files(self) -> list[TokenFile]:
        if self.data is None:
            text = documentation().decode()
            return [TokenFile("pydoc_data.topics", np.asarray(self.tokenizer.encode(text)))]
        paths = _matching(self.data)
        encoded = [_is_tokens(path) for path in paths]
        if all(encoded):
            return [open_tokens(path, self.dtype) for path in paths]
        if any(encoded):
            raise TaskError(f"data: {self.data} matches files of token ids and of text; use one kind only")
        return [encoded_copy(paths, self.field, self.tokenizer)]


def _is_tokens(path: Path) -> bool:
    return path.suffix in (".npy", ".bin")


def _matching(pattern: str) -> list[Path]:
    """Return the file `pattern`, or else the files that match it as a glob. Raises TaskError."""
    if Path(pattern).is_file():
        return [Path(pattern)]
    names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
    paths = [Path(name) for name in names if Path(name).is_file()]
    if not paths:
        raise TaskError(f"data: no file matches {pattern} (looked from {Path.cwd()})")
    return paths


def encoded_copy(paths: Sequence[Path], field: str, tokenizer: Tokenizer) -> TokenFile:
    """Return the token ids of all documents, in one memory-mapped file in the cache.

    The first process writes it, in constant memory; other processes on the machine wait. Changed files get
    a new copy. If nodes share a home directory, each may write: the last rename wins, with equal content.
    Raises TaskError.
    """
    dtype = np.min_scalar_type(max(tokenizer.vocabulary - 1, tokenizer.separator))
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = _digest(repr((states, field, tokenizer.identity)).encode())
    folder = cache_folder()
    final = folder / f"{name}.{dtype}"
    with _lock(folder / f"{name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            _write(final, paths, field, tokenizer, dtype)
    if final.stat().st_size == 0:
        raise TaskError(f"data: no document in {', '.join(map(str, paths))}")
    shown = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return TokenFile(shown, np.memmap(final, dtype=dtype, mode="r"))


def _lock(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w")
    except OSError as error:
        raise TaskError(
            f"encoded text cannot be written to {path.parent}: {error}; set XDG_CACHE_HOME to a directory "
            "that this user can write to"
        ) from None


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/launcher/tokens`; XDG_CACHE_HOME defaults to `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launcher" / "tokens"


def _write(
    final: Path, paths: Sequence[Path], field: str, tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> None:
    """Write to a temporary file and rename it, so that a killed process leaves no incomplete file."""
    temporary = final.with_name(f".{final.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        with open(temporary, "wb") as out:
            for path in paths:
                for document in _jsonl(path, field) if path.suffix == ".jsonl" else [_parts(path)]:
                    for text in document:
                        out.write(np.asarray(tokenizer.encode(text), dtype=dtype).tobytes())
                    out.write(np.asarray([tokenizer.separator], dtype=dtype).tobytes())
        temporary.rename(final)
    finally:
        temporary.unlink(missing_ok=True)


def _jsonl(path: Path, field: str) -> Iterator[list[str]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise TaskError(f"{path}:{number}: not UTF-8 text: {error}") from None
            except json.JSONDecodeError as error:
                raise TaskError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(document, dict) or field not in document:
                has = f"it has {', '.join(document)}" if isinstance(document, dict) else "it is not an object"
                raise TaskError(f"{path}:{number}: no field {field!r}; {has}")
            if not isinstance(document[field], str):
                raise TaskError(f"{path}:{number}: field {field!r} is not a string")
            try:
                document[field].encode()
            except UnicodeEncodeError as error:  # JSON can encode a lone surrogate, UTF-8 cannot
                raise TaskError(f"{path}:{number}: field {field!r} has a lone surrogate: {error}") from None
            yield [document[field]]


def _parts(path: Path) -> Iterator[str]:
    """Yield the file in parts that end at the end of a line, so that no word is divided."""
    with open(path, encoding="utf-8", newline="") as file:
        try:
            while part := file.read(PART):
                yield part + file.readline(PART)
        except UnicodeDecodeError as error:
            raise TaskError(f"{path} is not UTF-8 text: {error}") from None


def _digest(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]
