"""Selections, offsets, merging and folding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.logs import merged_lines as merging
from launcher.logs.clean import harmless
from launcher.logs.files import attempt_files, parse_selection, ranges
from launcher.logs.read import OffsetReader, last_stamp, offset_of
from launcher.logs.show import parse_since
from launcher.rundir.layout import RunDir
from launcher.rundir.time import stamp
from tests.logs.helpers import START, shown, write_rank

DAY = 86_400.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_selection_is_numbers_and_ranges() -> None:
    assert parse_selection("0,3-5, 7") == {0, 3, 4, 5, 7}
    assert ranges({7, 3, 5, 0, 4}) == "0,3-5,7" and ranges([3, 0, 3]) == "0,3" and ranges([]) == ""


@pytest.mark.parametrize("text", ["", "x", "1,", "5-3", "-1", "1-2-3", "0;1"])
def test_a_wrong_selection_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rank|go backwards"):
        parse_selection(text)


def test_files_are_found_by_attempt_rank_node_and_stream(run: RunDir) -> None:
    for attempt in (0, 1):
        for rank in range(4):
            for stream in ("out", "err"):
                write_rank(run, rank, [], attempt, node=rank // 2, stream=stream)
    (run.attempt(0).logs / "node-00" / "torchrun.err").write_text("unstamped\n")
    assert len(attempt_files(run.attempt(1))) == 8
    found = attempt_files(run.attempt(1), ranks={1, 2, 9}, nodes={1}, streams=("err",))
    assert [(file.attempt, file.rank, file.node, file.stream) for file in found] == [(1, 2, 1, "err")]
    assert attempt_files(run.attempt(7)) == []


@given(st.lists(st.binary(max_size=60), max_size=12), st.integers(1, 80))
def test_reading_by_offset_shows_no_torn_line_and_loses_none(writes: list[bytes], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        reader, got = OffsetReader(path), b""
        assert reader.read(limit) == b""
        with open(path, "ab", buffering=0) as file:
            for data in writes:
                file.write(data)
                block = reader.read(limit)
                assert block == b"" or block.endswith(b"\n")
                got += block
        while block := reader.read(limit):
            got += block
        written = b"".join(writes)
        assert got == written[: written.rfind(b"\n") + 1]


@given(st.lists(st.integers(0, 50), max_size=40).map(sorted), st.integers(-1, 51))
def test_the_first_line_since_a_time_is_found(seconds: list[int], since: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        path = write_rank(run, 0, [(at, b"x" * (at % 7)) for at in seconds])
        data = path.read_bytes()[offset_of(path, stamp(START + since).encode()) :]
        assert data.count(b"\n") == sum(1 for at in seconds if at >= since)


@pytest.mark.parametrize("length", [6, 2000])
def test_the_time_of_the_last_complete_line_is_found(run: RunDir, length: int) -> None:
    path = write_rank(run, 0, [(i, b"x" * length) for i in range(100)])
    with open(path, "ab") as file:
        file.write(b"torn")
    assert last_stamp(path) == stamp(START + 99)
    path.write_bytes(b"torn")
    assert last_stamp(path) is last_stamp(run.path / "none") is None


LINES = st.lists(
    st.tuples(
        st.integers(0, 300_000), st.text("abc \n\tZ", max_size=6).map(lambda t: t.replace("\n", "").encode())
    ),
    max_size=30,
)


@given(st.lists(LINES, max_size=6), st.integers(1, 200))
def test_the_merge_is_every_line_in_order_of_time(ranks: list[list[tuple[int, bytes]]], block: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        expected = []
        for rank, lines in enumerate(ranks):
            ordered = sorted(lines, key=lambda line: line[0])
            write_rank(run, rank, [(float(at), text) for at, text in ordered])
            expected += [(at, rank, text) for at, text in ordered]
        old = merging._BLOCKS, merging._WINDOW
        merging._BLOCKS, merging._WINDOW = (block, block), block
        try:
            got = shown(run, fold=False)
        finally:
            merging._BLOCKS, merging._WINDOW = old
        # Between ranks the order of equal times is open; within a rank it is that of the file.
        expected.sort(key=lambda line: line[0])
        assert [line[:15] for line in got] == [stamp(START + at)[11:26].encode() for at, _, _ in expected]
        for rank in range(len(ranks)):
            mine = [line.partition(b" | ")[2] for line in got if line[16:22] == b"0:r%03d" % rank]
            assert mine == [text for _, number, text in expected if number == rank]


def test_a_line_has_time_attempt_rank_and_stream(run: RunDir) -> None:
    write_rank(run, 3, [(0.5, b"hello")])
    write_rank(run, 11, [(0.25, b"oh")], attempt=1, stream="err")
    clock = stamp(START)[11:20].encode()
    assert shown(run) == [clock + b"500000 0:r003 | hello", clock + b"250000 1:r011 ! oh"]
    assert shown(run, colour=True, ranks="3") == [clock + b"500000 \x1b[35m0:r003\x1b[0m | hello"]


def test_attempts_ranks_nodes_streams_since_and_grep_select(run: RunDir) -> None:
    for attempt in (0, 1):
        for rank in range(4):
            write_rank(run, rank, [(attempt * 10, b"out"), (attempt * 10 + 1, b"loss 3")], attempt, rank // 2)
            write_rank(run, rank, [(attempt * 10, b"err")], attempt, rank // 2, "err")
    assert len(shown(run, fold=False)) == 24
    assert len(shown(run, fold=False, attempt=1)) == 12
    assert len(shown(run, fold=False, ranks="0,2-3")) == 18
    assert len(shown(run, fold=False, nodes="1", streams="err")) == 4
    assert len(shown(run, fold=False, since=stamp(START + 10))) == 12
    assert len(shown(run, fold=False, grep="^loss [0-9]$")) == 8
    assert shown(run, grep="nothing") == []
    for wrong in ({"grep": "("}, {"since": "yesterday"}, {"ranks": "a"}, {"nodes": "a"}):
        with pytest.raises(ValueError, match=r"regular expression|duration|rank|node"):
            shown(run, **wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "9"}, "no rank 9; there are 0-3"),
        ({"ranks": "0,3-5"}, "no rank 4-5; there are 0-3"),
        ({"nodes": "2"}, "no node 2; there are 0-1"),
        ({"nodes": "1", "ranks": "0"}, "no rank 0 there; there are 2-3"),
        ({"attempt": 9}, "no attempt 9; there is only 0"),
        ({"attempt": -1}, "no attempt -1; there is only 0"),
        ({"attempt": -1, "follow": True}, "no attempt -1; there is only 0"),
    ],
)
def test_what_the_run_does_not_have_is_named(run: RunDir, options: dict[str, object], message: str) -> None:
    for rank in range(4):
        write_rank(run, rank, [(0, b"x")], node=rank // 2)
    with pytest.raises(ValueError, match=f"^{message}$"):
        shown(run, **options)


def test_before_the_first_line_a_chosen_rank_is_named_too(run: RunDir) -> None:
    with pytest.raises(ValueError, match=r"^no rank 0: nothing was written yet$"):
        shown(run, ranks="0")
    assert shown(run) == []


def test_since_is_a_duration_or_a_time() -> None:
    assert parse_since("10m", now=START) == stamp(START - 600).encode()
    assert parse_since("2026-11-21T08:54") == b"2026-11-21T08:54:00.000000Z"
    assert parse_since("2026-11-21T08:54:01Z") == b"2026-11-21T08:54:01.000000Z"
    assert parse_since("2026-11-21 08:54+01:00") == b"2026-11-21T07:54:00.000000Z"


def test_days_are_told_and_do_not_mix(run: RunDir) -> None:
    write_rank(run, 0, [(0, b"a"), (DAY, b"c"), (3 * DAY, b"e")])
    write_rank(run, 1, [(1, b"b"), (DAY + 1, b"d")])
    assert [line[-1:] for line in shown(run)] == [b"a", b"b", b"c", b"d", b"e"]


def test_lines_that_no_capture_wrote_are_shown_too(run: RunDir) -> None:
    path = write_rank(run, 0, [(0, b"one")])
    with open(path, "ab") as file:
        file.write(b"from elsewhere\n\n")
    write_rank(run, 0, [(1, b"two")])
    got = b"\n".join(shown(run))
    assert b"one" in got and b"from elsewhere" in got and b"two" in got
    path.write_bytes(b"no stamp at all\n")
    assert b"no stamp at all" in b"\n".join(shown(run))


@given(st.binary(max_size=300))
def test_nothing_that_steers_a_terminal_is_printed(data: bytes) -> None:
    clean = harmless(data)
    assert clean.count(b"\n") == data.count(b"\n")
    left = re.sub(rb"\x1b\[[0-9;:]*m", b"", clean)
    assert not re.search(rb"[\x00\x05\x07\x08\x0b-\x0f\x11\x13\x18\x1a\x1b\x7f]|\xc2[\x80-\x9f]", left)


def test_colours_stay_and_end_with_their_line() -> None:
    assert harmless(b"\x1b[31mred\nplain \xc2\xb0C\n") == b"\x1b[31mred\x1b[0m\nplain \xc2\xb0C\n"
    assert harmless(b"title \x1b]0;owned\x07 \x1b[2J\x1b[1;1H") == b"title ^[]0;owned^G ^[[2J^[[1;1H"


def test_equal_lines_of_many_ranks_are_one_line(run: RunDir) -> None:
    for rank in range(64):
        write_rank(run, rank, [(rank / 100, b"loading"), (2, b"rank %d" % rank), (3, b"done")])
    got = shown(run)
    assert got[0].endswith(b"0:r000 | loading (63 other ranks)")
    assert len(got) == 66
    assert got[-1].endswith(b"done (63 other ranks)")


def test_one_other_rank_is_singular_and_err_does_not_hide_in_out(run: RunDir) -> None:
    write_rank(run, 0, [(0, b"x")])
    write_rank(run, 1, [(0, b"x")])
    write_rank(run, 1, [(0.5, b"x")], stream="err")
    assert [line.partition(b" | ")[2] or line[-3:] for line in shown(run)] == [b"x (1 other rank)", b"! x"]


def test_a_rank_that_repeats_itself_and_equal_lines_at_other_times_stay(run: RunDir) -> None:
    write_rank(run, 0, [(0, b"retry"), (0.1, b"retry"), (0.2, b"retry"), (9, b"retry")])
    write_rank(run, 1, [(0.3, b"retry"), (20, b"retry")])
    endings = [line.partition(b" | ")[2] for line in shown(run)]
    assert endings == [b"retry (1 other rank)", b"retry", b"retry", b"retry", b"retry"]


TEXTS = st.lists(
    st.tuples(st.integers(0, 3000), st.sampled_from([b"a", b"b", b"", b"a (1 other rank)"])), max_size=15
)


@given(st.lists(TEXTS, max_size=5))
def test_folding_counts_every_line(ranks: list[list[tuple[int, bytes]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        for rank, lines in enumerate(ranks):
            write_rank(run, rank, [(at / 1000, text) for at, text in sorted(lines, key=lambda line: line[0])])
        plain, folded = shown(run, fold=False), shown(run)
        endings = [re.search(rb" \((\d+) other ranks?\)$", line) for line in folded]
        count = len(folded) + sum(int(found[1]) for found in endings if found is not None)
        assert len(folded) <= len(plain) <= count
        # A program may print such an ending itself; then the count is not known.
        if not any(b"other" in text for lines in ranks for _, text in lines):
            assert count == len(plain)
        assert [line[:15] for line in folded] == sorted(line[:15] for line in folded)


def python(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_1100_files_are_merged_with_64_file_handles(run: RunDir) -> None:
    for rank in range(1100):
        write_rank(run, rank, [(rank + second * 1000, b"line of %d" % rank) for second in range(2)])
    program = (
        "import resource, sys, pathlib; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "from launcher.logs.show import *; from launcher.rundir.layout import RunDir;"
        "show_logs(RunDir(pathlib.Path(sys.argv[1])), LogOptions(), sys.stdout.buffer, False)"
    )
    assert python(program, str(run.path)).count("\n") >= 2200


@pytest.mark.slow
def test_the_merge_of_200_mib_takes_little_memory(run: RunDir) -> None:
    text = [(at / 10, b"step %06d " % at + b"x" * 80) for at in range(8000)]
    first = write_rank(run, 0, text)
    for rank in range(1, 200):
        os.link(first, run.attempt(0).rank_log(0, rank, "out"))
    program = (
        "import sys, pathlib;"
        "from launcher.logs.show import *; from launcher.rundir.layout import RunDir;"
        "out = open('/dev/null', 'wb'); run = RunDir(pathlib.Path(sys.argv[1]));"
        "show_logs(run, LogOptions(fold=False), out, False);"
        # Not ru_maxrss: that begins with what the process which forked this one had.
        "status = pathlib.Path('/proc/self/status').read_text();"
        "print(int(status.split('VmHWM:')[1].split()[0]) // 1024)"
    )
    assert int(python(program, str(run.path))) < 250


def test_a_traceback_that_torch_marks_with_its_rank_is_shown_once(run: RunDir) -> None:
    for rank in range(4):
        texts = (b"Traceback (most recent call last):", b"ValueError: no", b"[rank0]: of another")
        own = b"[rank%d]: " % rank
        write_rank(run, rank, [(0.001 * rank, own + texts[0]), (0.01, own + texts[1]), (0.02, texts[2])])
    got = [line.partition(b" | ")[2] for line in shown(run)]
    assert got[:2] == [
        b"[rank0]: Traceback (most recent call last): (3 other ranks)",
        b"[rank0]: ValueError: no (3 other ranks)",
    ]
    assert len(got) == 4, "what is marked with another rank is that rank's word, and no part of the text"
