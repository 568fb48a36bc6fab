"""The output of `launcher why`: the root cause first, in under 15 lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from launcher.diagnosis.cause import label_of, other_sentence
from launcher.doctor.options import Options
from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import LIVING, Status
from launcher.spec.events import CheckpointFailed, CheckpointSaved, Downgrade, StepLeftOut
from launcher.spec.failures import OF_THE_CLUSTER
from launcher.spec.quantities import format_bytes
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import REMEDY, LiveTensor, OutOfMemory, Verdict
from launcher.supervise.policy import advice
from launcher.supervise.unsaved_state import outcome_of

MAX_LINES = 14
_SHOWN_LOG_LINES = 5
_WIDTH = 160
_MESSAGE = 700
"Maximum characters of an exception or an action."
_BETWEEN = {"submitted": "it has not restarted yet", "stopping": "its ranks have not ended yet"}
"States in which the last verdict belongs to an earlier start or attempt."
_UNJUDGED = ("rendered", "damaged", "lost")
"States that no verdict explains."
_NO_ACTION_STATES = ("succeeded", "running")
"States in which there is nothing to do."


def verdicts(run: RunDir) -> list[tuple[int, Verdict, str]]:
    """Return (attempt, verdict, what was done then) for every judged attempt."""
    judged_attempts = []
    for attempt in run.attempts():
        if (judged := attempt.read_verdict()) is not None:  # skip a damaged verdict
            judged_attempts.append((attempt.number, judged.verdict, judged.then))
    return judged_attempts


def why(run: RunDir, status: Status) -> list[str]:
    """Return at most MAX_LINES lines: class, rank, phase, exception, log lines, what was done, what to do."""
    judged, state = verdicts(run), status.state
    if state in (*_BETWEEN, *_UNJUDGED) or not judged:
        return _unjudged(run, status, _BETWEEN.get(state, "") if judged else "")
    failures = [entry for entry in judged if not entry[1].ok]
    if not failures:
        return _without_failure(run) if state == "succeeded" else _unjudged(run, status)
    number, verdict, _ = failures[-1]
    ended = run.read_state()
    between = ended.reason not in ("", verdict.reason) and ended.failure != verdict.failure
    if between and state not in _NO_ACTION_STATES:
        return [
            f"{run.id} {_sentence(state)}",
            f"cause     {ended.failure}: {cut(ended.reason, _MESSAGE)} (after attempt {number})",
            f"before    attempt {number}: {verdict.failure}: {cut(verdict.reason)}",
            f"do        launcher resume {run.id}",
        ]
    return _failed(run, state, failures)


def _recipe_of(run: RunDir, attempt: int) -> Recipe | None:
    """Return the recipe of an attempt, or None if its record is damaged."""
    try:
        return Recipe.model_validate(run.read_recipe(run.attempt(attempt)))
    except ValidationError:
        return None


def _unjudged(run: RunDir, status: Status, reason: str = "") -> list[str]:
    """Return why a run is in a state that no verdict explains. `reason` is used if the status has none."""
    state, reason = status.state, status.reason or reason
    if state == "lost":
        when = f"in attempt {len(run.attempts()) - 1}" if run.attempts() else "before the first attempt"
        advice = [f"do        launcher resume {run.id}"] if status.resumable else []
        return [f"{run.id} is lost: {reason}", f"cause     node-failed, {when}", *advice]
    nothing = "no attempt was judged"
    if state in LIVING:
        nothing = "".join(unsaved(run)) or "nothing has failed so far."
    return [f"{run.id} is {state}: {reason or nothing}"]


def _without_failure(run: RunDir) -> list[str]:
    first, left_out = f"{run.id} succeeded", skipped(run)
    if len(run.attempts()) == 1:
        first += " in its first attempt"
    if any(isinstance(event, Downgrade) for event in run.read_events()):
        return [*left_out, f"{first}; memory ran out on the way:"]
    return [f"{first}: no attempt failed.", *left_out] if left_out else [f"{first}: nothing failed."]


def _failed(run: RunDir, state: str, failures: Sequence[tuple[int, Verdict, str]]) -> list[str]:
    """Return the last failure, and what to do if the run has ended with it."""
    number, verdict, then = failures[-1]
    lines = [
        f"{run.id} {_sentence(state)}",
        f"cause     {verdict.failure}: {verdict.reason} (attempt {number})",
    ]
    where = {
        "rank": verdict.rank,
        "node": verdict.node,
        "phase": verdict.phase,
        "step": verdict.step,
        "exit code": verdict.exit_code,
    }
    known = [f"{name} {value}" for name, value in where.items() if value not in (None, "")]
    if known:
        lines.append(f"where     {', '.join(known)}")
    if verdict.exception:
        lines.append(f"exception {_with_remedy(verdict.exception)}")
    memory = memory_text(verdict.memory)
    if memory:
        lines.append(f"memory    {cut(memory, _MESSAGE)}")
    kept = None if state in _NO_ACTION_STATES else _kept(run)
    lines += _decisive(verdict, _SHOWN_LOG_LINES - bool(memory) - bool(kept))
    if verdict.evidence:
        lines.append(f"evidence  {cut('; '.join(verdict.evidence))} ({verdict.confidence})")
    if snapshot := _snapshot(run, number, verdict):
        lines.append(f"snapshot  {snapshot}")
    if then and then != verdict.reason:
        lines.append(f"done      {cut(then, _MESSAGE)}")
    if len(failures) > 1:
        earlier = ", ".join(f"attempt {n}: {v.failure}" for n, v, _ in failures[:-1][-4:])
        lines.append(f"before    {earlier}")
    if state == "succeeded":
        lines += skipped(run)
    if state in _NO_ACTION_STATES:
        return lines[:MAX_LINES]
    if kept:
        lines.append(kept)
    about = run.read_about()
    to_do = advice(
        verdict,
        command=about.job.command is not None,
        recipe=_recipe_of(run, number),
        sent=bool(about.code_digest),
    )
    lines.append(f"do        {to_do.replace('RUN', run.id)}")
    examine = _examine(run, verdict)
    return [*lines[: MAX_LINES - len(examine)], *examine]


def _examine(run: RunDir, verdict: Verdict) -> list[str]:
    """Return the doctor's command if the cluster may be to blame. A doctor's run needs no such line."""
    about = run.read_about()
    if verdict.failure not in OF_THE_CLUSTER or Options.of_command(about.job.command or ()) is not None:
        return []
    nodes = read_record(run.plan).get("layout", {}).get("nodes", 1)
    more = f" --nodes {nodes}" if nodes > 1 else ""
    return [f"examine   launcher doctor -c {about.cluster.name or 'local'}{more}"]


def _decisive(verdict: Verdict, most: int) -> list[str]:
    """Return the decisive line with its place and the lines before it, then other findings.

    If no line was decisive, return the last lines. There are at most `most` lines.
    """
    cause = next((finding for finding in verdict.seen if not finding.why), None)
    if cause is None or not cause.place:
        last = [line for line in verdict.last_lines if line.strip() and not _repeats(line, verdict.exception)]
        shown = [f"  | {cut(line)}" for line in last[-most:]]
    else:
        shown = [f"  | {cut(line)}" for line in cause.before[-2:] if line.strip()]
        text = "" if _repeats(cause.text, verdict.exception) else f"  {cause.text}"
        shown.append(f"line      {cut(cause.place + text)}")
    others = [finding for finding in verdict.seen if finding.why]
    room = most - len(shown)
    shown += [
        f"{label_of(finding.why):<10}{cut(f'{label}: {finding.place}  {finding.text}'.strip())}"
        for finding in others[: max(room, 1)]
        for label in [other_sentence(finding.failure, finding.why)]
    ]
    return shown


def unsaved(run: RunDir) -> list[str]:
    """Return a line that says why the newest checkpoint could not be written, or nothing if it was."""
    for event in reversed(run.read_events()):
        if isinstance(event, CheckpointSaved):
            break
        if isinstance(event, CheckpointFailed) and event.from_ is None:
            return [event.reason]
    return []


def skipped(run: RunDir) -> list[str]:
    """Return a line about steps that did not change the model, or none."""
    left_out = [event for event in run.read_events() if isinstance(event, StepLeftOut)]
    if not left_out:
        return []
    steps = len({event.step for event in left_out})
    last = f"step {left_out[-1].step}: {left_out[-1].reason}"
    return [f"skipped   {steps} {'step' if steps == 1 else 'steps'}, the last one {cut(last)}"]


def _kept(run: RunDir) -> str | None:
    """Describe what happened to the last step's state when the run ended; None if there was none."""
    outcome = outcome_of(run.read_events())
    if outcome is None:
        return None
    if outcome.reason:
        return f"lost      {cut(outcome.words(), _MESSAGE)}"
    return f"kept      {outcome.words()}; `launcher resume {run.id}` continues from it"


def memory_text(memory: OutOfMemory | None) -> str:
    """Describe how much memory was requested, free and in use; return "" if nothing is known."""
    if memory is None:
        return ""
    parts = []
    if memory.requested is not None:
        parts.append(f"{format_bytes(memory.requested)} requested")
    if memory.free is not None and memory.total is not None:
        parts.append(f"{format_bytes(memory.free)} of {format_bytes(memory.total)} free")
    largest = ", ".join(_tensor(tensor) for tensor in memory.largest)
    return "; largest: ".join(part for part in (", ".join(parts), largest) if part)


def _tensor(tensor: LiveTensor) -> str:
    kind = f" {tensor.dtype} {list(tensor.shape)}" if tensor.shape is not None else ""
    return f"{tensor.name or 'a tensor'} {format_bytes(tensor.bytes)}{kind}"


def _snapshot(run: RunDir, attempt: int, verdict: Verdict) -> Path | None:
    """Return the memory snapshot of the rank that ran out of memory, or None."""
    if verdict.failure != "gpu-oom" or verdict.rank is None:
        return None
    return run.attempt(attempt).oom_snapshot(verdict.rank)


def _repeats(line: str, exception: str | None) -> bool:
    """Return whether the line is the traceback's last one, with or without the module, already shown."""
    return exception is not None and exception[:60] in line


def _sentence(state: str) -> str:
    return {
        "succeeded": "succeeded in the end; what failed on the way:",
        "running": "is running again; what failed before:",
    }.get(state, f"ended: {state}")


def _with_remedy(exception: str) -> str:
    """Cut the message of an exception, and keep what to do about it: messages of torch are long."""
    message, mark, remedy = exception.rpartition(REMEDY)
    end = mark + " ".join(remedy.splitlines())
    if len(end) > _MESSAGE // 2:
        return cut(exception, _MESSAGE)
    return cut(message, _MESSAGE - len(end)) + end


def cut(text: str, width: int = _WIDTH) -> str:
    text = " ".join(text.splitlines()).rstrip()
    return text if len(text) <= width else f"{text[: width - 3]}..."
