"""The table of patterns against logs from public threads."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from benchmarks.verdicts import GOALS, judged

from launcher.diagnosis.collector import pattern_of
from launcher.diagnosis.patterns import PATTERNS
from launcher.spec.verdict import EXIT_CODES
from tests.corpus import Log, logs
from tests.corpus.surrounding_output import COLLECTORS, HEADS, TAILS


def share_right(part: list[Log]) -> float:
    return sum(judged(log.text)[0] == log.failure for log in part) / len(part)


def test_every_class_of_a_failure_has_at_least_fifteen_logs() -> None:
    corpus = logs()
    counts = {name: sum(log.failure == name for log in corpus) for name in EXIT_CODES if name != "succeeded"}
    assert len(corpus) >= 300 and {name: n for name, n in counts.items() if n < 15} == {}
    assert sum(log.mentions_memory and log.failure not in ("gpu-oom", "host-oom") for log in corpus) >= 40


def test_the_cause_is_found_in_logs_that_were_looked_at() -> None:
    assert share_right([log for log in logs() if not log.held_back]) >= GOALS["tuning"]


def test_the_cause_is_found_in_logs_that_were_not_looked_at() -> None:
    """The goal is that of benchmarks/verdicts.py; here a change that makes it worse is to fail."""
    assert share_right([log for log in logs() if log.held_back]) >= 0.92


@pytest.mark.parametrize(("confidence", "least"), [("certain", 0.98), ("likely", 0.90)])
def test_what_is_said_to_be_sure_is_right(confidence: str, least: float) -> None:
    verdicts = [(judged(log.text), log.failure) for log in logs()]
    sure = [failure == label for (failure, how), label in verdicts if how == confidence]
    assert sum(sure) >= least * len(sure)


def test_memory_that_is_only_mentioned_is_not_lowered() -> None:
    """Only `certain` and `likely` lower it."""
    misleading = [log for log in logs() if log.mentions_memory and log.failure != "host-oom"]
    taken = [
        log.source
        for log in misleading
        if judged(log.text) in (("gpu-oom", "likely"), ("gpu-oom", "certain"))
    ]
    assert taken == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HEADS, *TAILS])
def test_what_stands_around_a_failure_changes_nothing(name: str) -> None:
    """On one log in twelve; the benchmark takes all."""
    for log in logs()[::12]:
        alone = judged(log.text)[0]
        if name in TAILS:
            assert judged(f"{log.text}\n{TAILS[name]}")[0] == alone, log.source
        if name in HEADS:
            assert judged(f"{HEADS[name]}\n{log.text}")[0] == alone, log.source


@pytest.mark.parametrize("name", COLLECTORS)
def test_what_a_collector_adds_to_each_line_changes_nothing(name: str) -> None:
    """On one log in forty, another one for each collector; the benchmark takes all."""
    for log in logs()[[*COLLECTORS].index(name) :: 40]:
        collected = "\n".join(map(COLLECTORS[name], log.text.split("\n")))
        assert judged(collected)[0] == judged(log.text)[0], log.source


def test_a_traceback_that_a_collector_has_put_into_one_line_is_read() -> None:
    text = "Traceback (most recent call last):\n  File \"t.py\", line 3, in <module>\nKeyError: 'labels'"
    escaped = text.replace("\n", "\\n")
    records: list[dict[str, Any]] = [
        {"message": text},
        {"event": "failed", "exception": text},
        {"jsonPayload": {"message": text}},
        {"log": json.dumps({"message": text}) + "\n", "stream": "stderr"},
    ]
    for line in (*map(json.dumps, records), f'message: "exit status 1. {escaped}"'):
        assert judged(line) == ("user-error", "likely"), line
    nested = '{"a": ' * 9000 + "1" + "}" * 9000
    for line in ('{"log": 7}', '{"loss": 2.5}', "{not json}", "{" * 9000 + "}", nested):
        assert judged(line) == ("unknown", "guess")


@pytest.mark.parametrize("name", [*HEADS, *TAILS])
def test_what_stands_around_a_failure_is_none_itself(name: str) -> None:
    failure, confidence = judged({**HEADS, **TAILS}[name])
    assert failure == "unknown" or confidence == "guess"


def test_each_class_stands_in_one_place() -> None:
    kinds = [one.kind for one in PATTERNS]
    blocks = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert len(blocks) == len(set(kinds))


def test_every_pattern_names_its_source_and_can_match() -> None:
    for pattern in PATTERNS:
        assert pattern.source, pattern.expression
        assert not re.search(pattern.expression, ""), pattern.expression
    assert len({(one.kind, one.expression) for one in PATTERNS}) == len(PATTERNS)


@pytest.mark.parametrize(
    "line",
    [
        "gradient checkpointing is on to save memory",
        "step 12 loss 2.31 memory 38.2 GiB oom 0",
        "If this runs out of memory, lower the batch size.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid CUDA out of memory errors",
        "loading 12 of 24 shards, 0 errors, 0 failures",
        "max_memory_allocated: 12.3 GiB",
        "using device cuda:0, pin_memory=True",
        "epoch 3 finished in 12.1 s, no nan found",
        "2023-03-06 12:41:16,652 WARNING [trainer.py:680] (2/4) Grad scale is small: 0.0078125",
        "checkpoint: wrote 12 shards instead of 16, 4 were up to date",
        "Failed to bind threads to cores 0-7: affinity is off",
        "If you run out of GPU memory, lower the batch size",
        "the GPU can run out of memory with long sequences",
        "auto_find_batch_size retries on CUDA OOM",
        "CUDA OOMs: 0            |        cudaMalloc retries: 0",
        "GPU OOM count: 0",
        "GPU 0: out of 24 GiB memory 3 GiB are used",
        "Unable to allocate 8 GPUs on node n1",
        "Failed requests are allocated to another GPU",
        "GPU memory monitor failed to start",
        "Allocation on device cuda:0: 3.2 GiB",
        "the device is out of members",
    ],
)
def test_ordinary_lines_match_nothing(line: str) -> None:
    assert pattern_of(line) is None


@pytest.mark.parametrize("words", ["gpu 12 alloc ", "failed alloc ", "cuda out of "])
def test_a_long_line_about_memory_is_read_at_once(words: str) -> None:
    begun = time.process_time()
    pattern_of(words * (16_000 // len(words)))
    assert time.process_time() - begun < 2
