"""The process that starts one rank, writes its logs and records how it ended.

On one host `local_ranks` forks it. Otherwise torchrun starts `python -m launcher.supervise.worker -- ARGV...`
once per rank. It imports little because one runs for every rank. Its exit status is the rank's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.diagnosis.clue import failure_patterns
from launcher.logs.capture import RankCapture
from launcher.rundir.files import read_record, replace_json
from launcher.rundir.host_memory import memory_limit
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.secret_masking import masked_strings, secrets_of
from launcher.rundir.shared_memory_folders import make_error_folder, remove_error_folders, remove_handover
from launcher.spec import variables
from launcher.spec.command import environment_name, fill, values_of
from launcher.spec.records import RunRecord
from launcher.spec.signals import LEFT_TO_SUPERVISOR, STOP_SIGNALS
from launcher.spec.variables import split
from launcher.spec.verdict import EXIT_FOLLOWED, EXIT_OOM, EXIT_STOPPED, EXIT_TRAINED
from launcher.supervise.process import (
    KILL_RANK,
    adopt_orphans,
    descendants,
    die_with_parent,
    dying_with,
    end_processes,
    processes_of,
    reap,
    signal_group,
)

GRACE_SECONDS = 20.0
"Time from the end of another rank to SIGKILL of this one. The parent kills this process after 30 s."
ORPHAN_GRACE_SECONDS = 3.0
"Time until SIGKILL of the rank if the parent or the supervisor is gone."

CONFIRM_SECONDS = 5.0
"Time that the supervisor has to record that it stops the attempt, after a SIGTERM to every process."

PARENT_DIED = signal.SIGUSR2
"Sent by the kernel when the parent dies, with the parent as sender. The parent itself never sends it."

RESERVE_BYTES = 128 * 1024
"More than the record needs: 20 last lines of at most 2,000 characters, and the clues."

MAX_CLUES = 24
"Maximum clues in a record, those that explain most first. Each has at most 4 kB."

MAX_EXCEPTION = 4000
"Maximum characters of an exception's message. XLA's messages list every buffer."

CPU_HEAP = (
    "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864"
    ":glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=2147483648"
)
"""Sizes in bytes. CPU tensors are in glibc's heap, which by default returns freed memory to the kernel after
each step and requests it again in the next one, in pages of 4 KiB. Keeping huge pages shortens a step by 4 to
7 % (benchmarks/train.py). Source: glibc manual, "Memory Allocation Tunables"; older versions and other C
libraries ignore the variable."""

ENDED_EARLY = (
    "the process ended with exit code {} before its training did: code of the task or of a library called "
    "os._exit() or exit()"
)
OF_TRAINING = frozenset({EXIT_STOPPED, EXIT_OOM, EXIT_FOLLOWED})
"Exit codes that `launcher.train` may choose without a file that says why."

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit codes of a shell


class Worker:
    """One rank of one attempt."""

    def __init__(self, environ: dict[str, str], parent: int) -> None:
        """`parent` is the pid of the process that starts the ranks of this node, or of torchrun."""
        environ, job = split(environ)
        self.environ = {**environ, **job}
        "The rank's environment, without the variables that are known only when it starts."
        self.path_of_job = "PATH" in job
        self.parent = parent
        self.supervisor = int(environ.get(variables.SUPERVISED, 0))
        "Pid of the supervisor, or 0 if start.sh was started by hand."
        self.parent_died = False
        self.child: subprocess.Popen[bytes] | None = None
        self.stopping = False
        "Whether the rank was told to end."
        self.killed = False
        "Whether this worker killed the rank because it did not end in time."
        self.ambiguous_sigterm = False
        "Whether a SIGTERM came that may have been sent to every process of the run."
        self.error_file: Path | None = None
        self.run = RunDir(Path(environ[variables.RUN_DIR]))
        self.attempt: AttemptDir = self.run.started(environ)
        about = self.run.read_about()
        self.trains = about.job.task is not None
        """Whether the rank is `launcher.train`. It then checks for the request to stop, records its memory,
        and a signal sent to every process does not end it."""
        self.on_gpu = bool(about.gpus_per_node)
        self.node = int(environ.get(variables.NODE_RANK, "0"))
        self.rank = int(environ["RANK"])
        self.capture = RankCapture(
            self.attempt.rank_log(self.node, self.rank, "out"),
            self.attempt.rank_log(self.node, self.rank, "err"),
            secrets_of(self.environ),
            failure_patterns(about),
        )
        # Deleted before the record is written, so that it and the notice of lost lines fit on a full disk.
        self.reserve = self.attempt.exit(self.rank).with_suffix(".reserve")
        with contextlib.suppress(OSError):
            self.reserve.parent.mkdir(parents=True, exist_ok=True)
            self.reserve.write_bytes(b"\0" * RESERVE_BYTES)

    def main(self, argv: list[str]) -> int:
        """Run the rank to its end. Return its exit code, negative for a signal."""
        die_with_parent(PARENT_DIED, self.parent)
        adopt_orphans()
        started = time.time()
        self.error_file = self._error_file()
        before_start = signal.SIGTERM in signal.sigpending()  # so the rank does not receive it
        try:
            self.child = subprocess.Popen(
                self._with_values(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=self._environment(),
                preexec_fn=dying_with(
                    os.getpid(),
                    signal.SIGKILL,
                    own_group=True,
                    blocked=LEFT_TO_SUPERVISOR if self.trains else (),  # until the rank has its handler
                ),
            )
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            advice = ": a script begins with `#!` and its interpreter" if error.errno == errno.ENOEXEC else ""
            self.capture.note(f"cannot start {argv[0]!r}: {error.strerror}{advice}")
        else:
            threading.Thread(target=self._listen, args=(before_start,), daemon=True).start()
            signal.signal(signal.SIGCHLD, self._reap)
            self._reap()
            with contextlib.nullcontext() if self.trains else self._watching(self.child.pid, started):
                code = self.capture.pump(self.child)
            signal_group(self.child.pid, signal.SIGKILL)  # processes that the rank left in its group
        if self.trains:
            code = self._of_training(code)
        if self.ambiguous_sigterm and not self.stopping:
            self.stopping = self._asked_to_stop()
        if code == 0 and not self.trains and self.attempt.stop.exists():
            self.stopping = True  # a script that looks for the file may end before its SIGTERM
        with contextlib.suppress(OSError):
            self.reserve.unlink(missing_ok=True)
        self.capture.close()
        self._record(code, started)
        remove_error_folders(self.run, self.node, self.rank)
        if self._orphaned():
            # The supervisor, which ends leftover processes, is gone, so this worker ends those that left the
            # rank's group. Other workers do the same, and must live to do it.
            end_processes(self._remaining, grace=ORPHAN_GRACE_SECONDS)
            remove_handover(self.run, self.node)
            remove_error_folders(self.run, self.node)
        return code

    def _of_training(self, code: int) -> int:
        """Return the exit code to report for that of `launcher.train`.

        Record it if other code, such as os._exit() or a C library, has ended the process before its training
        did.
        """
        if code == EXIT_TRAINED:
            return 0
        if code == 0 or self._chosen_by_other_code(code):
            what = ENDED_EARLY.format(code)
            record = {
                "rank": self.rank,
                "node": self.node,
                "time": time.time(),
                "failure": "user-error",
                "exception": what,
            }
            self.capture.note(what)
            with contextlib.suppress(OSError):
                self.attempt.error(self.rank).parent.mkdir(parents=True, exist_ok=True)
                replace_json(self.attempt.error(self.rank), record)
            return code or 1
        return code

    def _chosen_by_other_code(self, code: int) -> bool:
        """Return whether neither `launcher.train` nor a line of output explains this exit code.

        Codes from NOT_EXECUTABLE on may be those of a container or shell that runs the rank.
        """
        own = code in OF_TRAINING or self.stopping or self.attempt.error(self.rank).exists()
        return 0 < code < NOT_EXECUTABLE and not own and not self.capture.clues

    @contextlib.contextmanager
    def _watching(self, pid: int, started: float) -> Iterator[None]:
        """Record the memory of a `command:`, and on rank 0 what its framework logs."""
        from launcher.supervise.framework_logs.follower import FrameworkLogs
        from launcher.supervise.memory_sampler import MemorySampler

        ranks = int(self.environ.get("WORLD_SIZE", "1"))
        with contextlib.ExitStack() as watchers:
            sampler = MemorySampler(self.attempt.memory(self.rank), pid, ranks=ranks, gpus=self.on_gpu)
            watchers.callback(sampler.close)
            if self.rank == 0:
                logs = FrameworkLogs(self.run, self.attempt.number, Path.cwd(), started, self.environ)
                watchers.callback(logs.close)
            yield

    def _environment(self) -> dict[str, str]:
        """Return the rank's environment.

        Unless the job sets PATH, `python` means launcher's interpreter. Variables hold the values of a
        command's placeholders, for scripts that take no arguments.
        """
        values = placeholder_values(self.run, self.attempt)
        placeholders = {environment_name(name): value for name, value in values.items() if value}
        heap = cpu_heap_variables(self.run.read_about())
        # Sets of strings, such as the words of a vocabulary, have one order on all ranks and in all attempts.
        python = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
        environment = {**python, **heap, **self.environ, **placeholders}
        if not self.path_of_job:
            environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
        return {
            **environment,
            "TORCHELASTIC_ERROR_FILE": str(self.error_file or ""),
            variables.WORKER: str(os.getpid()),
        }

    def _remaining(self) -> set[int]:
        marked = processes_of(self.run.path, self.attempt.number, self.node, of_ranks=True)
        return {*marked, *descendants()}

    def _error_file(self) -> Path | None:
        """Return the file in which torchelastic's @record writes the rank's exception.

        The file is in memory and only this user can read it. `_recorded_exception` masks it and passes it
        on. None if there is no such memory.
        """
        try:
            return make_error_folder(self.run, self.node, self.rank) / "error.json"
        except OSError:
            return None

    def _reap(self, _signum: int = 0, _frame: object = None) -> None:
        assert self.child is not None
        reap(self.child.pid)

    def _with_values(self, argv: list[str]) -> list[str]:
        values = placeholder_values(self.run, self.attempt)
        return [fill(argument, values) for argument in argv]

    def _listen(self, before_start: bool) -> None:
        """Handle this process's signals one after the other, with their senders. `before_start`: a SIGTERM
        came before the rank was started."""
        kill_at: float | None = None
        if before_start:
            self._ask_rank_to_end()
        while True:
            timeout = 3600.0 if kill_at is None else max(0.0, kill_at - time.monotonic())
            received = signal.sigtimedwait(STOP_SIGNALS, timeout)
            if received is not None:
                kill_at = self._handle_signal(received.si_signo, received.si_pid, kill_at)
            elif kill_at is not None:
                self._signal_rank(signal.SIGKILL)
                kill_at = None

    def _handle_signal(self, signum: int, sender: int, kill_at: float | None) -> float | None:
        """Act on a signal. Return when to kill the rank, by time.monotonic, or None."""
        self.parent_died = self.parent_died or (signum == PARENT_DIED and sender == self.parent)
        if self._orphaned():
            self._ask_rank_to_end()
            return time.monotonic() + ORPHAN_GRACE_SECONDS
        if self.supervisor and sender == self.supervisor:
            if signum == KILL_RANK:
                self.stopping = True
                self._signal_rank(signal.SIGKILL)
            else:
                self._ask_rank_to_end()  # the supervisor limits how long the rank may take
            return kill_at
        if not self.supervisor or sender == self.parent:
            self._ask_rank_to_end()
            return time.monotonic() + GRACE_SECONDS
        # If it went to every process of the run, the rank included, the supervisor decides what follows.
        self.ambiguous_sigterm = self.ambiguous_sigterm or (signum == signal.SIGTERM and not self.trains)
        return kill_at

    def _asked_to_stop(self) -> bool:
        """Return whether the supervisor stops the attempt, which it records as soon as it gets the request.

        A SIGTERM may also have been sent to this process alone (`pkill -f train.py` finds it and not the
        supervisor). Then the rank's end is judged like any other.
        """
        deadline = time.monotonic() + CONFIRM_SECONDS
        while not self.attempt.stop.exists():
            if self.stopping or self._orphaned():  # told by the supervisor or the parent in the meantime
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _orphaned(self) -> bool:
        """Return whether the parent has died.

        While the threads of a killed parent end one by one, its pid is still this process's parent.
        """
        return self.parent_died or os.getppid() != self.parent

    def _ask_rank_to_end(self) -> None:
        """Tell the rank to end, only once: a second signal could interrupt a script that is saving."""
        if not self.stopping:
            self.stopping = True
            if not self.ambiguous_sigterm:
                self._signal_rank(signal.SIGHUP if self.trains else signal.SIGTERM)

    def _signal_rank(self, signum: signal.Signals) -> None:
        """Signal the rank's group. `capture.pump` notices the end by the closed pipes."""
        if self.child is not None:
            self.killed = self.killed or signum == signal.SIGKILL
            signal_group(self.child.pid, signum)

    def _record(self, code: int, started: float) -> None:
        ended = time.time()
        record = {
            "rank": self.rank,
            "node": self.node,
            "time": ended,
            "exit_code": code,
            "seconds": round(ended - started, 3),
            "max_rss": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "memory_limit": memory_limit(),
            "last_lines": self.capture.last_lines,
            "clues": [clue._asdict() for clue in self.capture.clues[:MAX_CLUES]],
            "exception": self._recorded_exception() if code else None,
            "stopping": self.stopping,
            "killed": self.killed,
        }
        path = self.attempt.exit(self.rank)
        with contextlib.suppress(OSError):  # on a full disk the exit status still shows the end
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, record)

    def _recorded_exception(self) -> str | None:
        """Return `Type: message` if the script's main function is decorated with torchelastic's @record.

        The masked record is also written to the file that torchrun named, because torchrun prints it.
        """
        if self.error_file is None:
            return None
        record = masked_strings(read_record(self.error_file), self.environ)
        if record and (torchrun_file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            with contextlib.suppress(OSError):
                replace_json(Path(torchrun_file), record)
        message = record.get("message")
        text = message.get("message") if isinstance(message, dict) else message
        return text[:MAX_EXCEPTION] if isinstance(text, str) else None


def cpu_heap_variables(about: RunRecord) -> dict[str, str]:
    """Return the variables that tune glibc's heap, for a task that trains on the CPU."""
    on_cpu = about.job.task is not None and not about.gpus_per_node
    return {"GLIBC_TUNABLES": CPU_HEAP} if on_cpu else {}


def placeholder_values(run: RunDir, attempt: AttemptDir) -> dict[str, str]:
    """Return every placeholder of spec/command.py with its value in this attempt."""
    run_values = {"id": run.id, "dir": run.path, "checkpoints": run.checkpoints, "attempt": attempt.number}
    return values_of(run.read_about().job.as_json(), run.read_recipe(attempt), run_values)


def watch(argv: list[str], parent: int) -> int:
    """Run the rank that this process's environment describes. Return its exit code, or end by its signal.

    `parent` is explained in Worker.
    """
    if variables.CPU_BIND in os.environ:
        from launcher.supervise.cpus import bind

        bind(os.environ)
    # Block the signals until there is a rank to tell. This comes before the log is made: a rank with a log
    # but no record counts as killed (judge.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    worker = Worker(dict(os.environ), parent)
    code = worker.main(argv)
    if worker.stopping and worker.supervisor:
        # The record holds the real code. On a failure, the parent would end all other ranks within 30 s.
        return 0
    if code < 0:
        # End by the same signal, so that the parent reports it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal.raise_signal(-code)  # to this thread; a signal to the process may go to another thread
    return code


def main() -> None:
    argv = sys.argv[1:]
    sys.exit(watch(argv[1:] if argv[:1] == ["--"] else argv, os.getppid()))


if __name__ == "__main__":
    main()
