"""Text and token files become windows, or a message that says what is wrong with them and where."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.tasks.llama import LanguageModel
from launcher.tasks.text import PART, Text, cache_folder
from launcher.tasks.video import VideoLanguageModel
from launcher.tasks.windows import Windows
from launcher.train.task import TaskError
from tests import warm
from tests.lab import PATIENCE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def seen(windows: Windows) -> list[int]:
    """All tokens, the one that two neighbours share once."""
    return [int(token) for index in range(len(windows)) for token in windows[index][:-1]]


def test_documents_are_packed_with_a_separator_behind_each(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two é")
    (tmp_path / "a.txt").write_text("one")
    windows = Text(str(tmp_path / "*.txt"), held_out=0).windows("train", 5, 256)
    assert bytes(seen(windows)) == b"one\xfftwo \xc3\xa9\xff"[: len(windows) * 5]
    assert [len(windows[index]) for index in range(len(windows))] == [6, 6]

    lines = [{"body": "first"}, {"body": "second", "other": 1}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    windows = Text(str(tmp_path / "c.jsonl"), field="body", held_out=0).windows("train", 4, 256)
    assert bytes(seen(windows)) == b"first\xffsecond\xff"[:12]


def test_a_large_file_is_encoded_in_parts_and_mapped(tmp_path: Path) -> None:
    text = "".join(f"line {number} of many, ünd more\r\n" for number in range(PART // 20))
    (tmp_path / "large.txt").write_text(text, newline="")
    windows = Text(str(tmp_path / "large.txt"), held_out=0).windows("train", 1000, 256)
    assert isinstance(windows.files[0].tokens, np.memmap)
    assert windows.files[0].tokens.tobytes() == text.encode() + b"\xff"


def test_the_encoded_copy_is_made_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 50)
    code = f"from launcher.tasks.text import Text; print(len(Text({str(path)!r}).windows('train', 4, 256)))"
    (tmp_path / "count.py").write_text(code)
    program = warm.Program(False, ["count.py"], dict(os.environ), tmp_path)
    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(lambda _: warm.run(program, PATIENCE), range(2)))
    assert [(one.returncode, one.stdout) for one in ended] == [(0, "11\n")] * 2, ended
    assert len(list(cache_folder().glob("*.uint8"))) == 1
    path.write_text("b" * 60)
    assert seen(Text(str(path)).windows("train", 4, 256))[0] == ord("b")
    assert not list(cache_folder().glob(".*"))


def test_token_files_are_mapped_and_windows_stay_within_a_file(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "0.bin")
    np.save(tmp_path / "1.npy", np.arange(100, 113, dtype=np.uint32))
    windows = Text(str(tmp_path / "*.*"), held_out=0).windows("train", 4, 113)
    assert [windows[index].tolist() for index in range(len(windows))] == [
        [0, 1, 2, 3, 4], [4, 5, 6, 7, 8],
        [100, 101, 102, 103, 104], [104, 105, 106, 107, 108], [108, 109, 110, 111, 112],
    ]  # fmt: skip
    assert all(isinstance(file.tokens, np.memmap) for file in windows.files)


def test_the_last_windows_are_held_out() -> None:
    whole, train, held_out = (
        seen(Text(held_out=part).windows(split, 64, 256))
        for part, split in ((0, "train"), (0.1, "train"), (0.1, "eval"))
    )
    assert train + held_out == whole
    assert len(held_out) == pytest.approx(len(whole) / 10, rel=0.01)


def word_tokenizer(folder: Path) -> None:
    """A directory as save_pretrained writes it, of four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "[END]": 1, "red": 2, "green": 3}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)


def test_a_tokenizer_directory_encodes_and_its_end_of_text_separates(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "words")
    (tmp_path / "t.txt").write_text("red green red blue red")
    text = Text(str(tmp_path / "t.txt"), tokenizer_path=str(tmp_path / "words"), held_out=0)
    assert text.windows("train", 5, 4)[0].tolist() == [2, 3, 2, 0, 2, 1]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("none.txt", None, {}, r"no file matches .*none\.txt \(looked from"),
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}\n', {}, r"x\.jsonl:2: no field 'text'; it has body"),
        ("x.jsonl", b'{"text": "a"}\n{oops\n', {}, r"x\.jsonl:2: not JSON"),
        ("x.jsonl", b'{"text": 3}\n', {}, r"x\.jsonl:1: field 'text' is not a string"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', {}, r"x\.jsonl:2: not UTF-8 text: .*0xe9"),
        ("x.jsonl", b'\n{"text": "x\\ud800"}\n', {}, r"x\.jsonl:2: field 'text' has a lone surrogate.*ud800"),
        ("x.jsonl", b"\n", {}, r"no document in .*x\.jsonl"),
        ("x.txt", b"ab", {}, r"context \+ 1 = 5 tokens, but the longest file has 3"),
        ("x.txt", b"\xff\xfe", {}, r"x\.txt is not UTF-8"),
        ("x.bin", b"123", {}, r"has 3 bytes, which is not a multiple of 2 \(uint16\)"),
        ("x.bin", b"", {}, r"x\.bin is empty"),
        ("x.npy", b"what", {}, r"x\.npy is not a readable"),
        ("x.npy", b"\x93NUM", {}, r"x\.npy is not a readable"),
        ("x.bin", bytes(range(20)), {}, r"x\.bin: token 0 is 256, but the model's vocabulary has 256"),
        ("x.bin", b"", {"dtype": "int8"}, "dtype: 'int8' is not known"),
        ("x.txt", b"", {"tokenizer_path": "nowhere"}, "tokenizer: nowhere is not a directory"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_data_is_named(
    tmp_path: Path, name: str, content: bytes | None, options: dict[str, Any], message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message):
        Text(str(tmp_path / name), **options).windows("train", 4, 256)[0]


def test_an_archive_of_arrays_is_no_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(9))
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    with pytest.raises(TaskError, match=r"x\.npy is not a readable \.npy file: it is an \.npz archive"):
        Text(str(tmp_path / "x.npy")).windows("train", 4, 256)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text("red green")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(TaskError, match=r"be written to /proc/nowhere/launcher/tokens: .*XDG_CACHE_HOME"):
        Text(str(tmp_path / "t.txt")).windows("train", 4, 256)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"context": 0}, "context: 0 is not a whole number of at least 1"),
        ({"context": -1}, "context: -1 is not"),
        ({"context": "16"}, "context: '16' is not"),
        ({"model": {"heads": 0}}, r"model\.heads: 0 is not"),
        ({"model": {"kv_heads": 0}}, r"model\.kv_heads: 0 is not"),
        ({"model": {"layers": "x"}}, r"model\.layers: 'x' is not"),
    ],
)
def test_what_counts_something_is_at_least_one(args: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        LanguageModel(**args)
    if "context" in args:
        with pytest.raises(TaskError, match=message):
            VideoLanguageModel(**args)
