"""Which lines are kept, and what is thought of them."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.diagnosis.cause import Candidate, cause_of, clues_of_text
from launcher.diagnosis.clue import Clue, Kind, clue_of
from launcher.diagnosis.collector import _SOURCE, MAX_SHAPES, Collector, _rows, pattern_of
from launcher.diagnosis.lines import lines_of, normalise
from launcher.report.why_log import why_log
from tests.corpus import logs
from tests.corpus.surrounding_output import IGNORED, STEPS, THREAD, TORCHRUN, WANDB

OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
TRACEBACK = f'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    step()\n{OOM}'


def cause(text: str) -> tuple[str, str, str]:
    """Return class, confidence and the decisive text."""
    found = cause_of(Candidate(clue) for clue in clues_of_text(text.encode().split(b"\n")))
    return (found.failure, found.confidence, found.candidate.clue.text) if found else ("", "", "")


def clues(text: str) -> list[Clue]:
    return clues_of_text(text.encode().split(b"\n"))


def test_the_number_of_a_line_and_what_stands_around_it_are_kept() -> None:
    text = f"{STEPS}\n{TRACEBACK}\nIncluding non-PyTorch memory, this process has 22 GiB in use\nbye"
    (clue,) = clues(text)
    assert text.split("\n")[clue.line - 1] == OOM
    assert clue.before[-1].strip() == "step()" and clue.after[0].startswith("Including")


def test_source_code_in_a_traceback_is_not_output() -> None:
    code = '    raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")'
    text = f'Traceback (most recent call last):\n  File "t.py", line 3\n{code}\nKeyError: 7'
    assert cause(text)[0] == "user-error"


def test_an_exception_in_a_chain_that_tells_of_memory_is_the_cause() -> None:
    chain = f"{TRACEBACK}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text = f'{chain}Traceback (most recent call last):\n  File "t.py", line 9\nKeyError: "loss"'
    assert cause(text)[0] == "gpu-oom"


def test_an_exception_group_and_a_box_are_read() -> None:
    group = "\n".join(f"    | {line}" for line in TRACEBACK.split("\n"))
    assert cause(f"  + Exception Group Traceback (most recent call last):\n{group}")[0] == "gpu-oom"
    box = f"╭──── Traceback (most recent call last) ────╮\n│ t.py:3 in <module>  │\n╰────╯\n{OOM}"
    assert cause(box)[0] == "gpu-oom"


def test_prefixes_of_ranks_loggers_and_collectors_do_not_matter() -> None:
    for prefix in (
        "[rank3]: ", "[default0]:", "2024-03-12 10:11:12,131 - ERROR - ", "0: ", "(RayTrainWorker pid=7) ",
        "\x1b[31m", "worker-1  | ", "[1,0]<stderr>:", "2024-03-12T10:11:12.131Z ", "[ERROR] ",
        "[2024-03-12 10:11:12.131] [train] [error] ",
        "GPUCA6E: ", "10.0.0.7: ", "ip-10-0-0-7.internal: [rank1]: ",
    ):  # fmt: skip
        text = "\n".join(prefix + line for line in TRACEBACK.split("\n"))
        assert cause(text)[::2] == ("gpu-oom", OOM), prefix


def test_an_exception_behind_the_name_of_a_host_is_read() -> None:
    program = [*TRACEBACK.split("\n")[:-1], "KeyError: 'labels'"]
    (clue,) = clues("\n".join(f"gn17: {line}" for line in program))
    assert (clue.kind, clue.text, clue.label) == ("exception", "KeyError: 'labels'", "gn17:")
    assert clue.uncaught
    logged = clues("\n".join(("trainer: " + program[0], *program[1:])))  # a logger's name is no host
    assert [(one.text, one.uncaught, one.label) for one in logged] == [("KeyError: 'labels'", True, "")]
    frames = 'RuntimeError:   File "w.py", line 9, in f'
    (clue,) = clues("\n".join([*program[:-1], frames, "    g()"]))
    assert (clue.text, clue.uncaught) == (frames, True)


def test_a_line_that_a_collector_has_wrapped_is_read() -> None:
    assert (
        cause("[10:11:12] torch.cuda.OutOfMemoryError while running the step: CUDA out of\nmemory. Tried")[0]
        == "gpu-oom"
    )


def test_interleaved_ranks_are_told_apart() -> None:
    ranks = [[f"[rank{rank}]: {line}" for line in TRACEBACK.split("\n")] for rank in (0, 3)]
    ranks[0][-1] = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.7]:1"
    both = "\n".join(line for pair in zip(*ranks, strict=True) for line in pair)
    found = cause_of(Candidate(clue) for clue in clues(both))
    assert found is not None and (found.failure, found.candidate.clue.label) == ("gpu-oom", "[rank3]:")


def test_what_the_program_survived_is_no_cause() -> None:
    finder = f"{TRACEBACK}\nbatch 64 does not fit\n{STEPS}"
    assert cause(finder)[:2] == ("unknown", "guess")
    assert (
        cause(f'{finder}\nTraceback (most recent call last):\n  File "t.py", line 9\nKeyError: 7')[0]
        == "user-error"
    )
    assert cause(f"{finder}\n{TRACEBACK}")[0] == "gpu-oom", "again, and this time for good"
    retried = f"{OOM}\nretrying with batch size 8"
    assert cause(retried)[:2] == ("gpu-oom", "guess")


def test_a_progress_bar_that_is_drawn_again_is_no_progress() -> None:
    bar = "Epoch 0:  12%|█▏   | 12/100 [00:03<00:22,  3.98it/s, loss=2.310]"
    assert cause(f"{bar}\n{TRACEBACK}\n{bar}\n{bar}")[0] == "gpu-oom"


def test_a_rank_before_each_line_is_read_where_the_first_line_follows_a_progress_bar() -> None:
    code = "    if full: raise RuntimeError('CUDA out of memory. Tried to allocate 1 GiB')"
    exception = f'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n{code}\nKeyError: 7'
    lines = "\n".join(f"[rank1]: {line}" for line in exception.split("\n"))
    (clue,) = clues(f"  62%|███   | 5/8 [00:00<00:00, 39.96it/s]{lines}\n")
    assert (clue.text, clue.label, clue.uncaught) == ("KeyError: 7", "[rank1]:", True)


def test_noise_at_the_end_is_no_cause_and_is_the_best_guess_alone() -> None:
    for noise in (IGNORED, THREAD, TORCHRUN, WANDB):
        assert cause(f"{TRACEBACK}\n{noise}")[:2] == ("gpu-oom", "likely")
        assert cause(noise)[1] in ("", "guess")


def test_others_tell_why_they_are_not_the_cause() -> None:
    found = cause_of(Candidate(clue) for clue in clues(f"{TRACEBACK}\nConnection closed by peer\n{IGNORED}"))
    assert found is not None
    assert [why for _, why in found.others] == ["explained by gpu-oom", *["follows from another failure"] * 2]
    said = "\n".join(why_log("a.log", found))
    assert "follows   nccl-timeout, explained by gpu-oom: " in said
    assert "follows   from another failure: " in said


def test_what_other_ranks_report_of_the_same_cause_is_no_other_candidate() -> None:
    both = f"{TRACEBACK}\n{TRACEBACK.replace('2.00', '1.50')}\nKeyError: 'labels'"
    found = cause_of(Candidate(clue, rank) for rank in (1, 0) for clue in clues(both))
    assert found is not None and found.failure == "gpu-oom" and found.others
    assert {(one.clue.kind, why) for one, why in found.others} == {("exception", "explained by gpu-oom")}


def test_the_job_s_own_words_come_first() -> None:
    own = [(r"server is gone, code \d", "disk-full")]
    found = cause_of(Candidate(one) for one in clues_of_text([b"the reward server is gone, code 7"], own))  # type: ignore[arg-type]
    assert found is not None and found.failure == "disk-full"


@pytest.mark.slow
def test_memory_stays_bounded_whatever_is_printed() -> None:
    collector = Collector()
    for number in range(3):
        words = b"".join(
            b"error: %s failed with %d\n" % (hex(hash((number, i))).encode(), i) for i in range(9000)
        )
        collector.feed("err", words, 1 + number * 9000)
        collector.feed("err", b"ValueError: sample %d is bad\n" % number * 500, 1)
    assert len(collector.clues()) < 20
    assert len(collector._harmless) <= MAX_SHAPES
    assert all(len(clue.text) <= 1000 and len(clue.after) <= 8 for clue in collector.clues())


def test_clues_survive_their_file() -> None:
    (clue,) = clues(TRACEBACK)
    assert clue_of({**clue._asdict(), "before": list(clue.before), "after": list(clue.after)}) == clue
    assert (
        clue_of({"kind": "nonsense"}) is None
        and clue_of("text") is None
        and clue_of({"kind": "desync", "line": "x"}) is None
    )


PIECES = [TRACEBACK, STEPS, WANDB, IGNORED, THREAD, TORCHRUN, "Connection closed by peer", "all is well", ""]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), st.data())
def test_how_output_arrives_does_not_change_what_is_found(pieces: list[str], data: st.DataObject) -> None:
    lines = ("\n".join(pieces) + "\n").encode().split(b"\n")[:-1]
    whole, parts = Collector(), Collector()
    whole.feed("err", b"\n".join(lines) + b"\n", 1)
    at = 0
    while at < len(lines):
        size = data.draw(st.integers(1, 40))
        parts.feed("err", b"\n".join(lines[at : at + size]) + b"\n", at + 1)
        at += size
    assert whole.clues() == parts.clues()


@pytest.mark.slow
def test_looking_for_words_first_finds_what_looking_for_all_finds() -> None:
    """A row is tried only on lines that hold one of the words that it needs."""
    for log in logs():
        for raw in log.text.split("\n"):
            text = normalise(raw).text.strip()
            if _SOURCE.match(text) is None:
                assert pattern_of(text) is next((row.pattern for row in _rows() if row.matches(text)), None)


def test_what_steers_a_terminal_is_not_kept() -> None:
    (clue,) = clues(f"\x1b]0;title\x07\x1b[2Jnow\x08\n{OOM}")
    assert clue.before == ("now",)


def test_own_words_are_searched_in_each_line() -> None:
    own: list[tuple[str, Kind]] = [("answered 503", "disk-full")]
    lines = [b"server answered 200"] * 3 + [b"server answered 503"]
    found = cause_of(Candidate(one) for one in clues_of_text(lines, own))
    assert found is not None and found.failure == "disk-full"


class OneLongLine(io.RawIOBase):
    """200 MB without a newline, none of which is kept by the file itself."""

    def __init__(self, end: bytes) -> None:
        self.left, self.end = 200 * 2**20, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.left > 0:
            size = min(len(buffer), self.left)
            buffer[:size] = b"x" * size
            self.left -= size
            return size
        size = min(len(buffer), len(self.end))
        buffer[:size], self.end = self.end[:size], self.end[size:]
        return size


def test_a_line_of_any_length_is_read_in_bounded_memory() -> None:
    with io.BufferedReader(OneLongLine(f" {OOM}\nnext line\n".encode())) as file:
        tracemalloc.start()
        found = clues_of_text(lines_of(file))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert [(clue.kind, clue.line) for clue in found] == [("gpu-memory", 1)]
    assert peak < 4 * 2**20


def test_lines_of_a_file_are_whole_while_they_are_short() -> None:
    text = b"a\n\nbb\r\n" + b"c" * 100_000 + b"\nd"
    assert [line[:3] for line in lines_of(io.BytesIO(text))] == [b"a\n", b"\n", b"bb\r", b"ccc", b"d"]


def test_a_program_that_skips_each_batch_that_does_not_fit_is_remembered_in_bounded_memory() -> None:
    collector = Collector()
    lines = b"CUDA out of memory. Tried to allocate 2.00 GiB\nskipping batch\n"
    for number in range(1, 100, 2):
        collector.feed("err", lines, number)
    assert [(clue.strength, clue.line) for clue in collector.clues()] == [("weak", 1), ("weak", 99)]


def test_one_of_several_ranks_may_go_on_after_its_clue_was_forgotten() -> None:
    collector = Collector()
    said = [f"[rank{rank}]: CUDA out of memory. Tried to allocate 2.00 GiB" for rank in range(3)]
    for number, line in enumerate((*said, "[rank1]: skipping batch", "[rank2]: skipping batch"), 1):
        collector.feed("", line.encode() + b"\n", number)
    assert {clue.label: clue.strength for clue in collector.clues()} == {
        "[rank0]:": "words",
        "[rank2]:": "weak",
    }


class _Counted(str):
    """A line that counts the words it is searched for."""

    searches = 0

    def lower(self) -> str:
        return self

    def __contains__(self, word: str) -> bool:
        type(self).searches += 1
        return super().__contains__(word)


def test_an_ordinary_line_is_searched_for_few_words() -> None:
    """A program that prints much text of its own, such as samples of a language model, waits for this."""
    line = "the lighthouse keeper went down to the harbour to look for his brother"
    assert pattern_of(_Counted(line)) is None
    assert _Counted.searches < 90, "of 900 words"
