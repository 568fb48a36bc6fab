"""Files that are too much: one clear line each, with little work, and no other file suffers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.spec.errors import SpecError
from launcher.spec.load import load_job, read_plain
from launcher.spec.yaml import MAX_BYTES, MAX_DEPTH, parse
from tests.bounded_work import in_bounded_work

N = MAX_BYTES - 20
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
REFUSED = {
    "laughs": (LAUGHS, "f.yaml:1: aliases make more than 5000 values of this"),
    "merged laughs": (MERGES, "merges make more than 5000 values of this"),
    "recursive merge": ("x: &a {<<: *a}\n", "f.yaml:1: an alias puts this into itself"),
    "two that merge each other": ("x: &a {b: &b {<<: *a}}\n", "an alias puts this into itself"),
    "recursive list": ("x: &a [*a]\n", "f.yaml:1: an alias puts this into itself"),
    "merge of text": ("a: &a 1\nx: {<<: *a}\n", "`<<` merges mappings only"),
    "deep list": ("x: " + "[" * 300 + "]" * 300, f"f.yaml:1: is nested more than {MAX_DEPTH} deep"),
    "deep block": ("".join(" " * n + "a:\n" for n in range(300)), "is nested more than"),
    "deep aliases": (
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 99)),
        "aliases nest this more than",
    ),
    "never closed": ("[" * N, "is nested more than"),
    "questions": ("? " * (N // 2), "is nested more than"),
    "many values": ("a: [" + "1," * (N // 2 - 5) + "1]", "has more than 5000 values"),
    "many anchors": ("a:\n" + "".join(f" - &a{n} x\n" for n in range(N // 14)), "has more than 5000 values"),
    "too long": ("a: " + "x" * MAX_BYTES * 3, "is longer than 200 kB"),
    "python object": (
        "x: !!python/object/apply:os.system [touch PWNED]\n",
        "the tag !!python/object/apply:os.system",
    ),
    "python name": (
        "x: !!python/name:os.system\n",
        "f.yaml:1: the tag !!python/name:os.system is not supported",
    ),
    "own tag": ("a: 1\nx: !secret {a: 1}\n", "f.yaml:2: the tag !secret is not supported"),
    "binary": ("x: !!binary aGk=\n", "the tag !!binary is not supported"),
    "set": ("x: !!set {a}\n", "the tag !!set is not supported"),
    "key": ("? [a]\n: 1\n", "f.yaml:1: a key must be text"),
    "twice": ("a: 1\na: 2\n", 'f.yaml:2: found duplicate key "a"'),
    "undefined": ("a: *" + "x" * 9000, "found undefined alias"),
    "nul": ("a: \0", "not readable as YAML"),
    "escape": ('a: "\\UFFFFFFFF"', "not readable as YAML"),
    "other version": ("%YAML 9.9\n---\na: 1\n", "incompatible YAML document"),
    "documents": ("a: 1\n---\nb: 2\n", "f.yaml:2: expected a single document in the stream, but"),
}
TAKEN = {
    "one long text": "a: '" + "x" * N + "'",
    "many escapes": 'a: "' + "\\n" * (N // 2) + '"',
    "words": "a: " + "x " * (N // 2),
    "literal": "a: |\n" + "  y\n" * (N // 4),
    "comments": "# x\n" * (N // 4) + "a: 1",
    "empty lines": "\n" * N + "a: 1",
    "alias that is used twice": "a: &a [1, 2]\nb: *a\nc: {<<: &d {x: 1}, y: 2}\n",
    "anchor again": "a: &a 1\nb: &a 2\n",
}
MOST_EVENTS = 12_000_000


@pytest.mark.parametrize("case", REFUSED)
def test_each_is_refused_with_one_line_and_in_bounded_work(tmp_path: Path, monkeypatch, case: str) -> None:
    text, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(text)
    with in_bounded_work(MOST_EVENTS), pytest.raises(SpecError) as error:
        load_job(Path("f.yaml"))
    said = str(error.value)
    assert message in said and said.startswith("f.yaml") and len(said.splitlines()) == 1 and len(said) < 400
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("case", TAKEN)
def test_a_long_file_is_read_in_bounded_work(case: str) -> None:
    with in_bounded_work(MOST_EVENTS):
        assert parse(TAKEN[case], "f.yaml").data


def test_merged_keys_give_way_to_own_and_earlier_ones() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {<<: [*a, *b], y: 3}\nd: {'<<': 4}\n"
    data = parse(text, "f").data
    assert data["c"] == {"x": "1", "z": "2", "y": "3"} and data["d"] == {"<<": "4"}


def test_a_plain_file_has_numbers_and_the_same_limits(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text("no-capacity: 0.3\nlost: {p: 1, times: 2, on: x}\n")
    assert read_plain(file) == {"no-capacity": 0.3, "lost": {"p": 1, "times": 2, "on": "x"}}
    for text in (LAUGHS, "a: 1e999\n", "a: !!python/name:os.system\n"):
        file.write_text(text)
        with pytest.raises(SpecError):
            read_plain(file)


def test_one_bad_profile_stops_no_list(tmp_path: Path) -> None:
    folder = tmp_path / "clusters"
    folder.mkdir()
    (folder / "good.yaml").write_text("name: good\nscheduler: local\n")
    for name, (text, _) in REFUSED.items():
        (folder / f"{name.replace(' ', '-')}.yaml").write_text(text)
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\0")
    (folder / "directory.yaml").mkdir()
    (folder / "dangling.yaml").symlink_to("nowhere")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "zero.yaml").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.yaml")
    for verb, code in (("list", 0), ("validate", 2)):
        done = subprocess.run(
            [sys.executable, "-m", "launcher", "clusters", verb],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "COLUMNS": "200", "XDG_CONFIG_HOME": str(tmp_path / "none")},
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert "good" in done.stdout and "slurm-h100" in done.stdout
    assert "clusters/directory.yaml: Is a directory" in done.stdout
    assert "clusters/laughs.yaml:1: aliases make more than 5000 values of this" in done.stdout
