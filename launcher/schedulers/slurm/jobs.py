"""Submitting: one job for one submission, whatever Slurm answers."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import TypeVar

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.over_ssh.login import NOT_FOUND, Answer, Login, LoginError, ask

PATIENCE_SECONDS = 20.0
"For a controller that is down or busy; a restart of one takes less."
FIRST_PAUSE_SECONDS = 0.5

# A submission from inside a job must not inherit what Slurm told that job of itself, nor may sbatch's
# variables, which win over the script, change what was shown; an account alone is often nowhere else.
_CLEAN = """\
for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do
  case $name in
    SLURM_CONF|SBATCH_ACCOUNT) ;;
    SLURM_*|SLURMD_*|SBATCH_*|SRUN_*|LAUNCHER_*) unset "$name" ;;
  esac
done
"""

# The controller was not reached, or could not take anything: there is no job.
_NOT_TAKEN = re.compile(
    r"connect failure|Connection refused|temporarily unable to accept|try again|Transport endpoint"
    r"|Unable to resolve|No route to host",
    re.IGNORECASE,
)
# The controller was reached, and its answer did not come: there may be one.
_UNCLEAR = re.compile(
    r"timed out|Zero Bytes|Unable to contact|Communication connection|Connection reset|Unexpected message"
    r"|Message (receive|send) failure|Insane message length",
    re.IGNORECASE,
)


BY_HAND = (
    ": submit on a host that has it, name a login node in the profile (`login:`), or write everything with "
    "`launcher render JOB -c CLUSTER --out DIR` and start it there with `sbatch DIR/scripts/job.sbatch`"
)


class NotSubmittedError(SchedulerError):
    """There is no job. The message says why."""


class NotYetError(Exception):
    """No answer now; there may be one later. `unclear`: what was asked for may have been done."""

    def __init__(self, words: str, unclear: bool) -> None:
        super().__init__(words)
        self.unclear = unclear


T = TypeVar("T")


def sbatch_command(script: PurePath | str, submission: int = 1) -> tuple[str, ...]:
    """`submission`: which of its run, for the script: of two jobs of one submission the first has the run."""
    return ("sbatch", "--parsable", str(script), str(submission))


def submission_of(run: RunDir) -> int:
    """The number of the one that is being made."""
    return sum(event.get("event") == "submitting" for event in run.read_events())


def sbatch_text(command: tuple[str, ...], first: str = "", then: str = "") -> str:
    """POSIX shell that submits in a clean environment, after `first`; `then` runs where a job, `$job`, was
    taken."""
    if not then:
        return f"{first}{_CLEAN}export LC_ALL=C\nexec {shlex.join(command)}"
    pick = "sed -n 's/^\\([0-9][0-9]*\\)\\(;.*\\)*$/\\1/p' | tail -n 1"
    return (
        f"{first}{_CLEAN}export LC_ALL=C\nsaid=$({shlex.join(command)}) || exit\n"
        f"printf '%s\\n' \"$said\"\njob=$(printf '%s\\n' \"$said\" | {pick})\n{then}"
    )


def submit(
    login: Login,
    command: tuple[str, ...],
    comment: str,
    patience: float = PATIENCE_SECONDS,
    *,
    earlier: Collection[str] = (),
    first: str = "",
    then: str = "",
) -> str:
    """The id of the job, which bears `comment`, as the `earlier` jobs of its run do.

    `first` and `then`: see `sbatch_text`.

    Tries again while there is certainly no job, and looks for one of which the answer was lost.
    Raises NotSubmittedError, UnclearError.
    """
    doubt = False

    def once() -> str:
        nonlocal doubt
        if doubt and (found := find(login, comment, earlier)):
            return found
        try:
            return _once(login, sbatch_text(command, first, then))
        except NotYetError as error:
            doubt = doubt or error.unclear
            raise

    try:
        return patiently(once, patience)
    except NotYetError as error:
        if not doubt:
            raise NotSubmittedError(f"{TAKES_NONE}: {error}") from None
        raise UnclearError(
            f"Slurm did not answer, the job may be in its queue or not: {error}; "
            "`launcher status` tells when Slurm answers again"
        ) from None


TAKES_NONE = "Slurm takes no job at the moment"


def patiently(once: Callable[[], T], patience: float = PATIENCE_SECONDS) -> T:
    """What `once` gives, tried again after each NotYetError for `patience` seconds; raises the last one."""
    began = time.monotonic()
    try:
        return once()
    except NotYetError as error:
        print(f"Slurm: {error}; trying for {patience:.0f} s", file=sys.stderr)
    time.sleep(FIRST_PAUSE_SECONDS)
    import tenacity

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(NotYetError),
        stop=tenacity.stop_after_delay(max(0.0, patience - (time.monotonic() - began))),
        wait=tenacity.wait_exponential(multiplier=2 * FIRST_PAUSE_SECONDS, max=4),
        reraise=True,
    )
    return attempts(once)


def _once(login: Login, script: str) -> str:
    try:
        done = login.run(script)
    except LoginError as error:
        raise NotYetError(str(error), unclear=True) from None
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == 0:
        return job_id(done.stdout.decode(errors="replace"))
    if unanswered(said):
        # Of two controllers the first may have taken it before the second could not be reached.
        unclear = any(_UNCLEAR.search(line) and not _NOT_TAKEN.search(line) for line in said.splitlines())
        raise NotYetError(_last(said), unclear=unclear)
    if absent(done.returncode, said):
        raise NotSubmittedError(f"there is no Slurm on {login.name}{BY_HAND}")
    raise NotSubmittedError(f"sbatch: {_words(said) or f'exit code {done.returncode}'}")


def unanswered(said: str) -> bool:
    """Whether one of Slurm's commands failed with these words for want of a controller that answers."""
    return bool(_NOT_TAKEN.search(said) or _UNCLEAR.search(said))


def absent(code: int, said: str) -> bool:
    """Whether there is no Slurm: no command, or one that knows no cluster. Ask `unanswered` first: a
    controller that is down may give no configuration either."""
    return code == NOT_FOUND or "configuration source" in said


def job_id(out: str) -> str:
    """Of `sbatch --parsable`: `123` or `123;cluster`, below what a site's plugins print."""
    for line in reversed(out.strip().splitlines()):
        if re.fullmatch(r"\d+(;[^;\s]+)?", line.strip()):
            return line.strip().partition(";")[0]
    raise UnclearError(f"sbatch answered {out!r}, in which there is no job id")


def find(login: Login, comment: str, earlier: Collection[str]) -> str | None:
    """The newest job with this comment that the controller knows, but for earlier ones.

    Raises NotYetError without an answer.
    """
    try:
        answer = ask(login, {"squeue": QUEUE})["squeue"]
    except LoginError as error:
        raise NotYetError(str(error), unclear=True) from None
    if answer.code:
        raise NotYetError(_last(answer.err), unclear=True)
    return found(answer, earlier).get(comment)


QUEUE = [
    *("sh", "-c"),
    'exec squeue --noheader --states=all --user="$(id -un)" --format="%F|%k|%o"',
]


def found(answer: Answer, earlier: Collection[str] = ()) -> dict[str, str]:
    """Comment, and the name of the folder that a script lies in -> the newest such job, but for earlier ones.

    Either is the id of a run or sweep; where `slurm.comment` is false, the folder alone.
    """
    newest: dict[str, str] = {}
    rows = [line.partition("|")[::2] for line in answer.out.splitlines()]
    for job, rest in sorted(rows, key=lambda row: int(row[0])):
        comment, _, command = rest.rpartition("|")
        if job not in earlier:
            newest |= {name: job for name in (comment or rest, folder_of_script(command)) if name}
    return newest


def folder_of_script(command: str) -> str | None:
    """The name of the run's folder, or the sweep's; None for a script that is not launcher's."""
    folder = _FOLDER_OF_SCRIPT.search(command)
    return folder[1] if folder is not None else None


# The run's directory, where the plan in force may have a folder of its own, or the sweep's; submitit sends
# a copy.
_FOLDER_OF_SCRIPT = re.compile(
    r"([^/]+)/(?:(?:(?:plans/\d+/)?scripts/job|array)\.sbatch|submitit/[^/]+\.sh)(?: |$)"
)


def begun(run: RunDir) -> bool:
    """By the run's own records: its batch script or its supervisor is there and heeds the file `cancel`."""
    if run.read_state().get("state") in ("running", "stopping"):
        return True
    kinds = ("submitting", "submitted", "resubmitted", "requeued", "job")
    return next((e["event"] for e in reversed(run.read_events()) if e.get("event") in kinds), "") == "job"


def jobs_of(run: RunDir) -> set[str]:
    """Every job that the run's records name; of an array the array's."""
    handles = (str(event.get("handle", "")) for event in run.read_events())
    return {handle.rpartition(":")[2].partition("_")[0] for handle in handles} - {""}


def _last(said: str) -> str:
    return said.splitlines()[-1] if said else "no answer"


def _words(said: str) -> str:
    """sbatch's own words, without its name before each line."""
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines())
    return "; ".join(line for line in lines if line)
