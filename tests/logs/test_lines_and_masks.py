"""From bytes in any chunks to lines, and secrets that no chunk border lets through."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.logs.lines import LONGEST_LINE, OTHER_TEXTS, LineAssembler
from launcher.rundir.secret_masking import Masker, masked_text, secrets_of


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(borders)]


def assemble(chunks: list[bytes], seconds: float = 0.0) -> bytes:
    lines, now, result = LineAssembler(), 0.0, b""
    for chunk in chunks:
        result += lines.feed(chunk, now)
        now += seconds
        result += lines.expire(now)
    return result + lines.flush(now)


CUTS = st.lists(st.integers(0, 10**6), max_size=20)


@given(st.binary(max_size=400).map(lambda data: data.replace(b"\r", b"\n")), CUTS)
def test_any_bytes_in_any_chunks_come_out_as_the_same_lines(data: bytes, cuts: list[int]) -> None:
    whole = data if data.endswith(b"\n") or not data else data + b"\n"
    assert assemble(chunked(data, cuts)) == whole


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\xff\x00"]), max_size=40), CUTS)
def test_of_a_progress_bar_the_last_text_of_each_line_comes_out(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    got = assemble(chunked(data, cuts)).split(b"\n")[:-1]
    expected = [line.rstrip(b"\r").split(b"\r")[-1] for line in data.split(b"\n")]
    if not expected[-1]:
        expected.pop()
    # States of a bar may come before its last one; each is one that the program wrote. Where the last one was
    # logged before its line ended, it is not logged again.
    written = {piece for line in data.split(b"\n") for piece in line.split(b"\r")}
    assert set(got) <= written
    rest = iter(got)
    assert all(want in rest for want in expected if want)
    assert len(got) >= sum(1 for want in expected if want)


def test_a_progress_bar_is_logged_once_a_second_and_at_its_end() -> None:
    lines, out = LineAssembler(), b""
    for tick in range(1001):
        out += lines.feed(b"\r%4d/1000" % tick, tick / 100)
    out += lines.feed(b"\n", 10.01)
    states = [int(line.split(b"/")[0]) for line in out.split(b"\n")[:-1]]
    assert states[0] == 0
    assert states[-1] == 1000
    assert all(99 <= b - a <= 102 for a, b in pairwise(states))


def test_a_bar_that_is_replaced_within_a_chunk_costs_one_line() -> None:
    assert LineAssembler().feed(b"1%\r2%\r3%\nnext\r\nx", 0.0) == b"3%\nnext\n"


@given(CUTS)
def test_an_exceptions_text_before_a_carriage_return_is_logged_and_bars_still_fold(cuts: list[int]) -> None:
    message = b"ValueError: bad row 'one\rtwo\rthree'\n"
    assert assemble(chunked(message, cuts)) == message.replace(b"\r", b"\n")
    bars = b"".join(b"\rEpoch 1: %3d%%|%s| 5/9 [3.2it/s]" % (n, b"#" * n) for n in range(50)) + b"\n"
    assert assemble(chunked(bars, cuts)).count(b"\n") <= 3, "the state, its half at a cut, and one a second"
    files = b"".join(b"\rfetch %s" % (b"abcdefghij"[n % 10 :] * 2) for n in range(500)) + b"\n"
    assert assemble(chunked(files, cuts)).count(b"\n") <= 2 + OTHER_TEXTS


def test_a_prompt_is_logged_after_a_second_and_its_line_end_adds_nothing() -> None:
    lines = LineAssembler()
    assert lines.feed(b"Password: ", 5.0) == b""
    assert lines.deadline() == 6.0
    assert lines.expire(5.9) == b""
    assert lines.expire(6.0) == b"Password: \n"
    assert lines.deadline() is None
    assert lines.feed(b"\nok\n", 7.0) == b"ok\n"


@given(st.integers(0, 3 * LONGEST_LINE), st.lists(st.integers(1, LONGEST_LINE), min_size=1, max_size=6))
def test_an_endless_line_is_cut_into_pieces_of_64_kib(length: int, sizes: list[int]) -> None:
    data, chunks = b"x" * length + b"\nend\n", []
    while data:
        size = sizes[len(chunks) % len(sizes)] if len(chunks) < 20 else LONGEST_LINE
        chunks.append(data[:size])
        data = data[size:]
    got = assemble(chunks).split(b"\n")[:-1]
    assert got[-1] == b"end"
    assert b"".join(got[:-1]) == b"x" * length
    assert max(map(len, got)) <= LONGEST_LINE
    assert len(got) == max(1, -(-length // LONGEST_LINE)) + 1


SECRETS = st.lists(st.text("abc\n", min_size=1, max_size=6).map(str.encode), max_size=3)


@given(st.text("abc\n", max_size=60).map(str.encode), SECRETS, CUTS)
def test_no_secret_comes_out_in_any_chunking(data: bytes, secrets: list[bytes], cuts: list[int]) -> None:
    masker = Masker(secrets)
    got = b"".join(masker.feed(chunk) for chunk in chunked(data, cuts)) + masker.flush()
    for secret in secrets:
        if secret.strip():
            assert secret not in got
            assert secret.strip() not in got


@given(st.binary(max_size=200), CUTS)
def test_what_holds_no_secret_is_not_changed(data: bytes, cuts: list[int]) -> None:
    secret = b"hunter2-is-not-in-random-bytes"
    masker = Masker([secret])
    assert b"".join(masker.feed(chunk) for chunk in chunked(data + secret[:9], cuts)) + masker.flush() == (
        data + secret[:9]
    )


@given(CUTS)
def test_a_secret_of_several_lines_is_masked_whole_and_line_by_line(cuts: list[int]) -> None:
    key = b"-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----\n"
    printed = b"key is " + key + b"and again > MIIEvQIBADANBg\r\n> kqhkiG9w0BAQEF\r\n"
    masker = Masker([key])
    got = b"".join(masker.feed(chunk) for chunk in chunked(printed, cuts)) + masker.flush()
    assert got == b"key is ***and again > ***\r\n> ***\r\n"


def test_a_flood_of_overlapping_secrets_is_not_held_for_ever() -> None:
    masker, out = Masker([b"aaa", b"ab" * 10]), b""
    for _ in range(200):
        out += masker.feed(b"a" * 1000)
        assert len(masker._held) < 200
    assert b"aaa" not in out + masker.flush()


def test_the_secrets_are_named_by_one_variable() -> None:
    environ = {"LAUNCHER_SECRETS": "TOKEN,EMPTY,MISSING,KEY", "TOKEN": "t0k", "EMPTY": "", "KEY": "k\udcff"}
    assert secrets_of(environ) == [b"t0k", b"k\xff"]
    assert secrets_of({"RUNPOD_API_KEY": "rpa_1"}) == [b"rpa_1"], "this one is never shown"


# What repr() and JSON escape, among letters.
NASTY_SECRETS = st.text("ab\"'\\\n\té\x00", min_size=4, max_size=12).filter(str.strip)


@given(NASTY_SECRETS, st.sampled_from(["", "'", '"', "'\""]))
def test_no_secret_comes_out_escaped_by_repr_or_json(secret: str, beside: str) -> None:
    masker = Masker([secret.encode()])
    for text in (secret, f"x{beside}={secret}={beside}y"):
        for printed in (
            *(repr(text), ascii(text), repr(text.encode()), repr(KeyError(text)), repr([text, beside])),
            *(json.dumps({"key": text}), json.dumps([text], ensure_ascii=False)),
        ):
            got = masker.whole(printed.encode()).decode()
            assert "***" in got
            for form in (secret, repr(secret)[1:-1], ascii(secret)[1:-1], json.dumps(secret)[1:-1]):
                assert form not in got


def test_a_text_is_masked_by_the_names_in_the_environment() -> None:
    environ = {"LAUNCHER_SECRETS": "TOKEN", "TOKEN": 'a"b\\c\nd'}
    error = KeyError(environ["TOKEN"])
    assert masked_text(f"KeyError: {error}", environ) == "KeyError: '***'"
    assert masked_text(f"half {chr(0xD800)} {environ['TOKEN']}", environ) == "half \\ud800 ***"
    assert masked_text("nothing", {}) == "nothing"


@pytest.mark.parametrize(
    "prints",
    [
        'set -x; echo "$TOKEN"',
        "declare -p TOKEN",
        'printf "%q\n" "$TOKEN"',
        'cat "$TOKEN"',
        'echo "${TOKEN@Q}"',
    ],
)
@pytest.mark.parametrize("secret", ["pa$$w\"or'd\\x`y s3cr3t", "it's s3cr3t", "a b$(s3cr3t)", "s3cr3t!*?[]~"])
def test_a_secret_that_bash_quotes_is_masked(prints: str, secret: str) -> None:
    done = subprocess.run(
        ["bash", "-c", prints], env={"TOKEN": secret, "PATH": os.environ["PATH"]}, capture_output=True
    )
    assert b"s3cr3t" in done.stdout + done.stderr
    assert b"s3cr3t" not in Masker([secret.encode()]).whole(done.stdout + done.stderr)
