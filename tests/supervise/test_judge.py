"""Verdicts from evidence, as files and exit codes would leave it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from launcher.diagnosis.cause import clues_of_text
from launcher.spec.verdict import (
    EXIT_FOLLOWED,
    EXIT_OOM,
    EXIT_STOPPED,
    FETCHED,
    STILL_FETCHING,
    Verdict,
)
from launcher.supervise.judge import Evidence, judge


def ended(
    rank: int, code: int, time: float = 0.0, stopping: bool = False, lines: tuple[str, ...] = ()
) -> dict[str, Any]:
    clues = clues_of_text(map(str.encode, lines))
    return {
        "rank": rank,
        "node": 0,
        "time": time,
        "exit_code": code,
        "stopping": stopping,
        "last_lines": list(lines),
        "clues": [{**clue._asdict(), "time": time, "line": 0} for clue in clues],
    }


def said(rank: int, failure: str | None, time: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "node": 0, "time": time, "failure": failure, "exception": "E: m", **more}


def test_all_ranks_at_zero_is_success():
    verdict = judge(Evidence(ranks=2, exit_codes={0: 0}, exits=(ended(0, 0), ended(1, 0))))
    assert verdict.ok and verdict.confidence == "certain"


def test_the_rank_that_knows_its_reason_is_believed_over_everything_else():
    verdict = judge(
        Evidence(
            ranks=2,
            exit_codes={0: 1},
            errors=(said(1, "gpu-oom", 2.0, phase="backward", step=7),),
            exits=(ended(0, -15, 1.0, stopping=True), ended(1, EXIT_OOM, 2.1, lines=("a", "b"))),
        )
    )
    assert (verdict.failure, verdict.rank, verdict.phase, verdict.step) == ("gpu-oom", 1, "backward", 7)
    assert verdict.last_lines == ("a", "b") and verdict.exit_code == EXIT_OOM


def test_on_a_cpu_it_is_no_gpu_that_ran_out():
    told = Evidence(ranks=1, exit_codes={0: 1}, errors=(said(0, "gpu-oom", phase="forward", step=2),))
    assert judge(told).reason == "rank 0 ran out of GPU memory in forward of step 2"
    assert judge(replace(told, gpus=False)).reason == "rank 0 ran out of memory in forward of step 2"


def test_what_the_start_script_says_is_the_reason_where_no_rank_began():
    lines = ("hello", "bash: module: command not found", "launcher: line 2 of setup failed: module load x")
    told = Evidence(ranks=2, exit_codes={0: 78}, torchrun_lines=lines)
    verdict = judge(told)
    assert verdict.reason == "line 2 of setup failed: module load x" and verdict.last_lines == lines
    assert judge(replace(told, started={0: 0})).reason != verdict.reason


def test_without_a_rank_there_is_no_success():
    assert judge(Evidence(ranks=2, exit_codes={0: 0})).failure == "image-error"
    assert "before any rank began" in judge(Evidence(ranks=2, exit_codes={0: 0})).reason
    assert judge(Evidence(ranks=2, exit_codes={0: 0}, started={0: 0, 1: 0})).ok
    assert judge(Evidence(ranks=2, exit_codes={0: 0}, disk_full=True)).ok, "nothing could be written"


def test_a_rank_that_left_with_another_is_not_the_cause_even_when_nobody_could_say_why():
    lines = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",)
    exits = (ended(0, EXIT_FOLLOWED, 1.0), ended(1, EXIT_OOM, 1.1, lines=lines))
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, exits=exits))
    assert (verdict.failure, verdict.rank, verdict.exit_code) == ("gpu-oom", 1, EXIT_OOM)


def test_a_rank_hurt_by_another_is_not_the_cause_even_when_it_speaks_first():
    errors = (said(0, "nccl-timeout", 1.0), said(1, "user-error", 2.0))
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, errors=errors, exits=(ended(0, 1), ended(1, 1))))
    assert (verdict.failure, verdict.rank) == ("user-error", 1)


def test_a_network_failure_is_the_cause_when_there_is_no_other():
    errors = (said(1, "nccl-timeout", 2.0), said(0, "nccl-timeout", 3.0))
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, errors=errors))
    assert (verdict.failure, verdict.rank, verdict.confidence) == ("nccl-timeout", 1, "likely")


def test_a_rank_that_was_fetching_samples_is_named_as_the_one_that_the_others_waited_for():
    def reason(*lines: str) -> str:
        exits = (ended(0, 1), ended(1, -1, stopping=True, lines=lines))
        errors = (said(0, "nccl-timeout", 1.0),)
        return judge(Evidence(ranks=2, exit_codes={0: 1}, errors=errors, exits=exits, started={0: 0})).reason

    slow, late = f"rank 1 {STILL_FETCHING} after 300 s. The", f"rank 1 {FETCHED} after 400 s"
    assert "; rank 1 was still fetching samples: make that faster" in reason("step 3", slow)
    assert "fetching" not in reason(slow, late)


def test_ranks_that_call_a_block_a_different_number_of_times_wait_for_each_other_and_not_for_the_network():
    def of(rank: int, issued: list[int], begun: int = 2) -> dict[str, Any]:
        collectives = {"begun": begun, "units": ["the rest of the model", "layers.0"], "issued": issued}
        return said(rank, "nccl-timeout", phase="backward", step=2, collectives=collectives)

    def verdict_of(*errors: dict[str, Any]) -> Verdict:
        return judge(Evidence(ranks=2, exit_codes={0: 1}, errors=errors))

    verdict = verdict_of(of(0, [0, 1, ~1, ~0, 2]), of(1, [0, 1, ~1, 1]))
    assert (verdict.failure, verdict.confidence, verdict.step) == ("desync", "certain", 2)
    where = "rank 0 came to the gradients of the rest of the model where rank 1 came to layers.0. "
    assert where in (verdict.exception or "") and "equally often" in (verdict.exception or "")
    verdict = verdict_of(of(0, [0, 1, ~1, ~0, 2, 0]), of(1, [0, 1, ~1, ~0, 0]))
    assert "rank 0 came to the end of the micro-batch where" in (verdict.exception or "")
    late = verdict_of(of(0, [0, 1, ~1, ~0, 2]), of(1, [0, 1, ~1]))
    assert (late.failure, late.exception) == ("nccl-timeout", "E: m"), "the network may have kept it"
    assert verdict_of(of(0, [0, 1, ~1], begun=3), of(1, [0, 1, 1])).failure == "nccl-timeout"


def test_a_rank_killed_without_a_word_is_the_cause_although_its_peers_complain():
    verdict = judge(
        Evidence(
            ranks=2,
            exit_codes={0: 1},
            errors=(said(0, "nccl-timeout", 1.5),),
            exits=(ended(1, -9, 1.0), ended(0, 1, 1.6)),
        )
    )
    assert (verdict.failure, verdict.rank, verdict.exit_code) == ("unknown", 1, -9)


LOST = (
    "Traceback (most recent call last):",
    "RuntimeError: [...] Connection closed by peer [127.0.0.1]:1",
)


@pytest.mark.parametrize("errors", [(), (said(0, "nccl-timeout", 1.5),)], ids=["command", "task"])
def test_a_rank_that_left_without_a_word_is_the_cause_although_its_peers_complain(errors: tuple[Any, ...]):
    peer = ended(0, -15, 1.6, stopping=True, lines=LOST)
    told = Evidence(ranks=2, exit_codes={0: 7}, errors=errors, exits=(ended(1, 7, 1.7), peer))
    verdict = judge(told)
    assert (verdict.failure, verdict.rank, verdict.exit_code) == ("unknown", 1, 7)
    assert verdict.reason == "rank 1 ended with exit code 7, and its output holds no known error"
    late = judge(replace(told, exits=(ended(1, 7, 60.0), peer)))
    assert late.failure == "nccl-timeout", "it left long after the connection had been lost"
    spoke = judge(replace(told, exits=(ended(1, 7, 1.7, lines=LOST), ended(0, 1, 1.6, lines=LOST))))
    assert spoke.failure == "nccl-timeout"


def test_ranks_that_wait_for_one_that_has_finished_say_which_it_was():
    exits = (ended(0, 1, 1.6, lines=LOST), ended(1, 0, 1.0))
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, exits=exits))
    assert (verdict.failure, verdict.rank) == ("nccl-timeout", 0)
    assert verdict.reason == "rank 0 lost contact with the other ranks: rank 1 had ended with exit code 0"


def test_a_kill_while_the_kernel_was_out_of_memory_is_host_oom():
    evidence = Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, -9),), host_oom_kills={0: 1})
    verdict = judge(evidence)
    assert verdict.failure == "host-oom" and "oom_kill +1" in verdict.evidence
    assert judge(replace(evidence, host_oom_kills={0: 0, 1: 1})).failure == "unknown", "on another node"


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    raise ValueError('bad token')",
    "ValueError: bad token",
)


def test_a_foreign_script_is_judged_by_its_traceback():
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=TRACEBACK),)))
    assert (verdict.failure, verdict.exception) == ("user-error", "ValueError: bad token")


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu-oom"),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "gpu-oom",
        ),
        (
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
            "host-oom",
        ),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384", "nccl-timeout"),
        ("[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3", "nccl-timeout"),
        ("RuntimeError: Gloo connectFullMesh failed with [...] Connection refused", "rendezvous-failed"),
    ],
)
def test_known_messages_of_foreign_scripts_are_recognised(line, failure):
    lines = ("Traceback (most recent call last):", '  File "t.py", line 1', line)
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=lines),)))
    assert (verdict.failure, verdict.confidence) == (failure, "likely")


def test_the_sizes_of_a_message_over_several_lines_are_in_the_verdict():
    lines = (
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "t.py", line 1',
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.26 GiB.",
        "[rank0]: GPU 5 has a total capacity of 47.40 GiB of which 139.56 MiB is free.",
    )
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=lines),)))
    assert verdict.exception == lines[2].removeprefix("[rank0]: ")
    assert verdict.memory is not None
    assert (verdict.memory.kind, verdict.memory.requested) == ("gpu", int(6.26 * 2**30))
    assert verdict.memory.free == int(139.56 * 2**20)


NCCL_FAILED = (
    "Traceback (most recent call last):",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1296, unhandled cuda error",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Last error:",
)


@pytest.mark.parametrize(
    ("lines", "failure", "kind"),
    [
        ((*NCCL_FAILED, "Cuda failure 2 'out of memory'"), "gpu-oom", "gpu"),
        ((*NCCL_FAILED, "Cuda failure 1 'invalid argument'"), "user-error", None),
        (("n:1:2 [0] alloc.h:9 NCCL WARN Cuda failure 'out of memory'", *NCCL_FAILED[:2]), "gpu-oom", "gpu"),
        (
            ("n:1:2 [0] shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
             *NCCL_FAILED[:2]),
            "host-oom", "shared",
        ),
        (
            ("Traceback (most recent call last):", "RuntimeError: CUDA error: out of memory", "",
             "The above exception was the direct cause of the following exception:", "",
             "Traceback (most recent call last):", "mylib.StepError: step 3 failed"),
            "gpu-oom", "gpu",
        ),
        (
            ("Traceback (most recent call last):", "RuntimeError: CUDA error: out of memory",
             "trying again with half", "Traceback (most recent call last):", "ValueError: bad token"),
            "user-error", None,
        ),
        (("Traceback (most recent call last):", "ValueError: bad token",
          "[rank0]: Connection reset by peer"), "user-error", None),
    ],
)  # fmt: skip
def test_what_stands_around_an_exception_is_weighed(lines, failure, kind):
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=lines),)))
    assert verdict.failure == failure
    assert (verdict.memory.kind if verdict.memory else None) == kind


def test_too_little_shared_memory_is_no_full_disk_and_no_full_gpu():
    error = said(0, "host-oom", phase="data", step=1)
    error["exception"] = "RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)"
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, errors=(error,)))
    assert verdict.failure == "host-oom" and verdict.memory is not None
    assert verdict.reason == "rank 0 ran out of shared memory (/dev/shm) in data of step 1"


def test_an_error_file_of_torchelastic_is_believed_over_the_last_lines():
    record = {**ended(1, 1, lines=("bye",)), "exception": "RuntimeError: CUDA out of memory. Tried to ..."}
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, exits=(record, ended(0, -15, stopping=True))))
    assert (verdict.failure, verdict.rank, verdict.confidence) == ("gpu-oom", 1, "certain")
    assert verdict.exception == record["exception"]


def test_an_exception_that_is_printed_and_recorded_is_one_finding():
    lines = ("Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "data.Bad: no token")
    record = ended(0, 1, 5.0, lines=lines)
    record["clues"] = [clue._asdict() for clue in clues_of_text(line.encode() for line in lines)]
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=({**record, "exception": "Bad: no token"},)))
    [seen] = verdict.seen
    assert (seen.place, seen.before) == ("rank-000.err:3", lines[:2])
    assert verdict.failure == "user-error" and verdict.confidence == "certain"


def test_a_port_that_is_taken_is_no_matter_of_other_ranks():
    error = "RuntimeError: The server socket has failed to listen on any local network address. EADDRINUSE"
    for evidence in (
        Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=(*TRACEBACK[:-1], error)),)),
        Evidence(ranks=1, exit_codes={0: 1}, errors=({**said(0, "rendezvous-failed"), "exception": error},)),
    ):
        reason = judge(evidence).reason
        assert reason == "rank 0 could not listen at its port, which another program uses"


@pytest.mark.parametrize("length", [10, 5000])
def test_torchruns_copy_of_an_exception_does_not_hide_whose_it_is(length: int):
    error = f"ValueError: {'x' * length}"
    failed = ended(1, 1, 5.0, lines=(*TRACEBACK[:-1], error)) | {"exception": error[:4000]}
    copy = clues_of_text([b"  traceback : Traceback (most recent call last):", b"    f()", error.encode()])
    verdict = judge(
        Evidence(
            ranks=2,
            exit_codes={0: 1},
            exits=(failed, ended(0, -15, 6.0, stopping=True)),
            torchrun_clues={0: copy},
        )
    )
    assert copy and (verdict.failure, verdict.rank) == ("user-error", 1)


def test_among_foreign_scripts_a_closed_connection_comes_after_the_rank_that_closed_it():
    lost = (
        "Traceback (most recent call last):",
        "RuntimeError: [...] Connection closed by peer [127.0.0.1]:1",
    )
    exits = (ended(0, 1, 1.0, lines=lost), ended(1, 1, 1.1, lines=TRACEBACK))
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, exits=exits))
    assert (verdict.failure, verdict.rank) == ("user-error", 1)


@pytest.mark.parametrize("reason", ["cancelled", "preempted", "time-limit", "node-failed"])
def test_a_requested_stop_is_named_after_the_request(reason):
    exits = (ended(0, EXIT_STOPPED), ended(1, EXIT_STOPPED))
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, exits=exits, stop_reason=reason))
    assert verdict.failure == reason and "a checkpoint was written" in verdict.reason


def test_a_run_that_finished_although_it_was_asked_to_stop_has_succeeded():
    verdict = judge(Evidence(ranks=1, exit_codes={0: 0}, exits=(ended(0, 0),), stop_reason="preempted"))
    assert verdict.ok


def test_a_lost_node_is_named():
    verdict = judge(Evidence(ranks=4, exit_codes={0: -15}, lost_nodes=(1,)))
    assert (verdict.failure, verdict.node) == ("node-failed", 1)
    full = judge(Evidence(ranks=4, exit_codes={0: -15}, lost_nodes=(1,), disk_full=True))
    assert full.failure == "disk-full" and "No space left on device, and node 1" in full.reason


STARTER_KILLED = "the process that starts the ranks on node 0 was ended by SIGKILL"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_of_what_starts_the_ranks_before_any_ended_is_not_blamed_on_the_user(ranks: int):
    verdict = judge(Evidence(ranks=ranks, exit_codes={0: -9}, started=dict.fromkeys(range(ranks), 0)))
    assert (verdict.failure, verdict.rank, verdict.reason) == ("unknown", None, STARTER_KILLED)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_ended_because_what_started_them_was_killed_are_not_blamed(ranks: int):
    exits = tuple(ended(rank, -15, 1.0, stopping=True) for rank in range(ranks))
    verdict = judge(Evidence(ranks=ranks, exit_codes={0: -9}, exits=exits))
    assert (verdict.rank, verdict.reason) == (None, STARTER_KILLED)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kills", "failure"),
    [(0, "unknown"), (1, "host-oom")],
)
def test_ranks_that_are_killed_with_their_workers_are_named_though_none_has_a_record(
    kills: int, failure: str, ranks: int
):
    """The exit code of the process that started them tells of it."""
    started = dict.fromkeys(range(ranks), 0)
    verdict = judge(Evidence(ranks=ranks, exit_codes={0: 137}, started=started, host_oom_kills={0: kills}))
    assert (verdict.failure, verdict.rank) == (failure, 0) and "with the worker" in verdict.reason


def test_a_missing_record_alone_does_not_tell_of_a_kill():
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, started={0: 0, 1: 0}))
    assert verdict.reason == "the ranks ended without leaving a record"


CRASH = (
    "Fatal Python error: Segmentation fault",
    "",
    "Stack (most recent call first):",
    '  File "/env/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 134 in forward',
    '  File "/home/me/my_task.py", line 43 in loss',
    '  File "/env/lib/python3.12/site-packages/launcher/train/forward.py", line 29 in loss_of',
)


def test_a_crash_is_told_with_the_users_code_that_led_to_it():
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, -11, lines=CRASH),)))
    assert (verdict.failure, verdict.reason) == ("unknown", "rank 0 was ended by SIGSEGV")
    assert [seen.text for seen in verdict.seen] == [CRASH[0]]
    assert verdict.seen[0].before[-1] == CRASH[4]


def test_a_worker_that_a_signal_ended_is_named_with_it():
    verdict = judge(Evidence(ranks=1, exit_codes={0: 139}, started={0: 0}))
    assert verdict.reason == "the worker that watches a rank was ended by SIGSEGV"


def test_an_only_rank_that_somebody_ended_says_so():
    verdict = judge(Evidence(ranks=1, exit_codes={0: 0}, exits=(ended(0, -15, stopping=True),)))
    assert (verdict.failure, verdict.rank) == ("unknown", 0) and "SIGTERM" in verdict.reason


def test_a_script_that_cannot_start_is_the_users_error_with_what_bash_said():
    lines = ("start.sh: line 9: /no/python: No such file or directory",)
    verdict = judge(Evidence(ranks=2, exit_codes={0: 127}, torchrun_lines=lines))
    assert verdict.failure == "user-error" and verdict.last_lines == lines


def test_the_exception_that_ended_a_script_outranks_what_it_printed_before():
    lines = ("caught CUDA out of memory, going on", *TRACEBACK)
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=lines),)))
    assert (verdict.failure, verdict.exception) == ("user-error", "ValueError: bad token")


@pytest.mark.parametrize(
    "said", ["CUDA out of memory. Falling back", "torch.OutOfMemoryError: CUDA out of memory"]
)
def test_memory_that_a_script_had_looked_after_is_not_what_ended_it(said: str):
    lines = (f"epoch 1: {said}", said, "epoch 1 done", "train.py: error: data/val.jsonl not found")
    verdict = judge(Evidence(ranks=1, exit_codes={0: 2}, exits=(ended(0, 2, lines=lines),)))
    assert (verdict.failure, verdict.memory) == ("user-error", None)


CPP = (
    "terminate called after throwing an instance of 'c10::Error'",
    "  what():  CUDA error: out of memory",
    "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):",
    *(f"frame #{number}: <unknown function>" for number in range(9)),
)
RECORDED = YAML(typ="safe").load(Path(__file__).parents[1] / "diagnosis" / "out_of_memory.yaml")
TOLD = [message for message in RECORDED if message["kind"]]


@pytest.mark.parametrize(
    ("lines", "kind"),
    [(CPP, "gpu"), *((("    loss.backward()", *one["text"].splitlines(), ""), one["kind"]) for one in TOLD)],
    ids=["C++", *(one["source"] for one in TOLD)],
)
def test_what_a_script_says_at_last_is_why_it_ended_though_its_traceback_began_before(
    lines: tuple[str, ...], kind: str
):
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=lines),)))
    assert verdict.memory is not None and verdict.memory.kind == kind


@pytest.mark.parametrize(
    ("code", "lines", "failure"),
    [
        (-signal.SIGABRT, TRACEBACK, "user-error"),
        (-signal.SIGSEGV, TRACEBACK, "user-error"),
        (-signal.SIGKILL, TRACEBACK, "unknown"),
        (-signal.SIGTERM, TRACEBACK, "unknown"),
        (-signal.SIGABRT, (*TRACEBACK, *CPP), "gpu-oom"),
        (-signal.SIGABRT, CPP, "gpu-oom"),
        (-signal.SIGABRT, ("all is well",), "unknown"),
    ],
)
def test_an_exception_before_a_crash_counts_and_before_a_signal_from_outside_does_not(
    code: int, lines: tuple[str, ...], failure: str
) -> None:
    verdict = judge(Evidence(ranks=1, exit_codes={0: code}, exits=(ended(0, code, lines=lines),)))
    assert verdict.failure == failure


@pytest.mark.parametrize(
    ("lines", "reason", "decisive"),
    [
        (
            ("usage: x.py [-h]", "            [--lr LR]", "x.py: error: unrecognized arguments: --l 1"),
            "rank 0 printed an error message and failed",
            "x.py: error: unrecognized arguments: --l 1",
        ),
        (
            ("ERROR: out of memory, lower your batch size",),
            "rank 0 printed an error message and failed",
            "out of memory, lower your batch size",
        ),
        (
            ("OSError: [Errno 5] Input/output error: 'a.bin'",),
            "rank 0 used a file system that failed",
            "OSError: [Errno 5] Input/output error: 'a.bin'",
        ),
        (TRACEBACK, "rank 0 raised an exception", "ValueError: bad token"),
    ],
)
def test_the_reason_says_what_the_decisive_line_shows(
    lines: tuple[str, ...], reason: str, decisive: str
) -> None:
    """A line is no exception, and a file is no GPU."""
    verdict = judge(Evidence(ranks=1, exit_codes={0: 2}, exits=(ended(0, 2, lines=lines),)))
    assert verdict.reason == reason
    assert [seen.text for seen in verdict.seen] == [decisive]


def test_an_exit_code_of_137_is_no_signal_that_the_rank_got() -> None:
    """A shell ends so if its program was killed; any program may."""

    def reason(code: int) -> str:
        return judge(Evidence(ranks=1, exit_codes={0: 137}, exits=(ended(0, code),))).reason

    assert reason(-signal.SIGKILL) == "rank 0 was killed (SIGKILL), but not by launcher"
    assert reason(137) == (
        "rank 0 ended with exit code 137: a program that it ran was killed (SIGKILL), or it chose this code "
        "itself"
    )


@pytest.mark.parametrize("how", ["returned non-zero exit status 3", "died with <Signals.SIGKILL: 9>"])
def test_a_program_that_a_rank_ran_is_named_with_how_it_ended(how: str) -> None:
    error = f"subprocess.CalledProcessError: Command '['prepare', 'data']' {how}."
    lines = ("prepare: no data", *TRACEBACK[:-1], error)
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=lines),)))
    assert (verdict.failure, verdict.confidence, verdict.exception) == ("unknown", "guess", error)
    assert verdict.reason.startswith(f"rank 0 ended with exit code 1 because a program that it ran {how}, ")
    assert verdict.seen[0].before == ("prepare: no data",)


def test_a_rank_that_crashed_after_the_others_had_gone_is_not_the_first_to_fail() -> None:
    lost = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    hurt = (*TRACEBACK[:-1], lost)
    exits = (ended(0, -signal.SIGABRT, lines=hurt), ended(1, 1, lines=TRACEBACK))
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, exits=exits))
    assert (verdict.failure, verdict.rank) == ("user-error", 1)


def test_the_users_own_network_is_not_ours():
    line = "requests.exceptions.ConnectionError: hub: Connection reset by peer"
    lines = ("Traceback (most recent call last):", '  File "t.py", line 1', line)
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, exits=(ended(0, 1, lines=lines),)))
    assert verdict.failure == "user-error"


def test_a_full_disk_that_swallowed_every_record_is_named():
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, started={0: 0, 1: 0}, disk_full=True))
    assert verdict.failure == "disk-full" and "No space left on device" in verdict.reason


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("disk-full", "rank 0 ran out of disk space in checkpoint of step 6"),
        ("user-error", "rank 0 could not save in checkpoint of step 6"),
    ],
)
def test_a_last_checkpoint_that_cannot_be_written_is_the_users_to_mend(failure: str, reason: str) -> None:
    error = said(0, failure, phase="checkpoint", step=6)
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, errors=(error,)))
    assert (verdict.failure, verdict.reason) == (failure, reason)


def test_a_stop_whose_checkpoint_failed_is_still_a_stop_and_says_so():
    message = "NotSavedError: checkpoint of step 6 could not be written: No space left on device"
    errors = (said(0, "disk-full", phase="checkpoint", step=6, exception=message),)
    verdict = judge(Evidence(ranks=1, exit_codes={0: 1}, errors=errors, stop_reason="preempted"))
    assert verdict.failure == "preempted" and verdict.exception == message
    assert "rank 0 ran out of disk space in checkpoint of step 6" in verdict.reason


@pytest.mark.parametrize(
    ("exits", "errors", "how"),
    [
        ((ended(0, 1, stopping=True), ended(1, -15, stopping=True)), (), "rank 0 ended with exit code 1"),
        ((ended(0, -15, stopping=True), ended(1, 143, stopping=True)), (), "the ranks were ended"),
        (
            ({**ended(0, -9, stopping=True), "killed": False}, ended(1, -15, stopping=True)),
            (),
            "rank 0 was ended by SIGKILL",
        ),
        (
            ({**ended(0, -9, stopping=True), "killed": True}, ended(1, -15, stopping=True)),
            (),
            "ranks that did not end in time were killed",
        ),
        (
            (ended(0, 1, stopping=True), {**ended(1, -9, stopping=True), "killed": True}),
            (said(0, "gpu-oom", phase="forward", step=3),),
            "rank 0 ran out of GPU memory in forward of step 3; ranks that did not end in time were killed",
        ),
        (
            (ended(0, 1, stopping=True), {**ended(1, -9, stopping=True), "killed": True}),
            (said(0, "nccl-timeout", phase="forward", step=3),),
            "ranks that did not end in time were killed",
        ),
        (
            (ended(0, 1, stopping=True, lines=("ZeroDivisionError: division by zero",)), ended(1, 0)),
            (),
            "rank 0 ",
        ),
    ],
)
def test_a_rank_that_fails_by_itself_while_the_run_is_cancelled_is_named(
    exits: Any, errors: Any, how: str
) -> None:
    verdict = judge(Evidence(2, {0: 1}, exits=exits, errors=errors, stop_reason="cancelled"))
    assert (verdict.failure, verdict.confidence, verdict.exit_code) == ("cancelled", "certain", None)
    assert verdict.reason.removeprefix("cancelled by the user; ").startswith(how)
    assert ("killed" in verdict.reason) == ("killed" in how)


def test_ranks_that_started_and_left_no_record_are_not_said_to_have_never_started():
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, started={0: 0, 1: 0}))
    assert verdict.failure == "unknown"


def test_the_rank_whose_worker_was_killed_is_the_cause_although_only_the_others_left_a_record():
    evidence = Evidence(
        ranks=3,
        exit_codes={0: 1, 1: 1},
        started={0: 0, 1: 0, 2: 1},
        errors=(said(0, None, 1.5), said(1, "nccl-timeout", 1.6)),
        exits=(ended(0, 1, 1.6), ended(1, 1, 1.7)),
    )
    verdict = judge(evidence)
    assert (verdict.failure, verdict.rank, verdict.node, verdict.confidence) == ("unknown", 2, 1, "likely")
    assert "SIGKILL" in verdict.reason and verdict.evidence == ("no exits/rank-002.json",)
    assert judge(replace(evidence, host_oom_kills={0: 1, 1: 0})).failure == "unknown"
    short_of_memory = judge(replace(evidence, host_oom_kills={0: 0, 1: 1}))
    assert (short_of_memory.failure, short_of_memory.rank) == ("host-oom", 2)


def test_a_rank_that_knows_its_reason_is_believed_over_one_that_left_no_record():
    evidence = Evidence(
        ranks=2,
        exit_codes={0: 1},
        started={0: 0, 1: 0},
        errors=(said(0, "host-oom"),),
        exits=(ended(0, EXIT_OOM),),
    )
    assert (judge(evidence).failure, judge(evidence).rank) == ("host-oom", 0)


@pytest.mark.parametrize("why", [{"exit_codes": {0: -9}}, {"disk_full": True}])
def test_a_missing_record_that_has_another_explanation_blames_nobody(why: dict[str, Any]):
    evidence = Evidence(
        ranks=2, exit_codes={0: 1}, started={0: 0, 1: 0}, exits=(ended(0, -15, stopping=True),)
    )
    assert judge(evidence).rank == 1 and judge(replace(evidence, **why)).rank != 1
