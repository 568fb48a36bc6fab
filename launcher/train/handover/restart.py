"""End of an attempt after an OOM, or when the run must stop before the current step can end.

Every rank hands over its last complete state, then all ranks exit together.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, cast

import torch.distributed as dist

from launcher.spec.events import CheckpointSaved, HandedOver, HandoverSkipped
from launcher.spec.quantities import format_bytes
from launcher.spec.verdict import EXIT_FOLLOWED
from launcher.train.error_report import CLOSING_SECONDS, leave, within
from launcher.train.handover.alarm import Alarm
from launcher.train.handover.handover import Handover
from launcher.train.host_memory import free_for_handover
from launcher.train.metrics.notes import with_masked_words
from launcher.train.rank import Rank

UPDATE_SECONDS = 10.0
"Time for a rank to finish the update that it has begun."
ANSWER_SECONDS = 15.0
"Time for every rank to send its offer; longer than UPDATE_SECONDS."
WRITE_SECONDS, MOST_SECONDS = 5.0, 60.0
"Base time for writing, and its maximum together with the time for the bytes."
BYTES_PER_SECOND = 0.25e9
"A low estimate per node: from GPUs to memory that is not pinned, all ranks at once."
SAVING_SECONDS = 300.0
"Time for the checkpoint that is being written in the background, before the rank ends."

Why = Literal["memory", "time"]


@dataclass(frozen=True)
class Offer:
    """The state that one rank can hand over."""

    rank: int
    node: int
    step: int
    "The last complete step; 0 if there is none."
    recorded: bool
    "Evaluation and metrics of the step are done."
    saved: int
    "The step of the newest checkpoint."
    bytes: int
    free: int
    "Free bytes for handovers on the rank's node."
    torn: bool = False
    "The rank is, or was interrupted, in the middle of the update after `step`."


class Restart:
    """Ends the attempt on one rank. Create it once the ranks are connected; set `handover` once there is a
    state to hand over."""

    def __init__(self, rank: Rank, began: float) -> None:
        """`began` is the start of the process, by time.monotonic. Raises dist.DistError."""
        self.rank, self.began = rank, began
        self.handover: Handover | None = None
        self._alarm = Alarm(rank)
        self._lock = threading.Lock()
        "Held by the thread that hands over. Released only if the attempt continues."
        self._tried = self._held = False
        self._alarm.listen(self._heard)

    def out_of_memory(self, close: Callable[[], object]) -> None:
        """End the attempt after an OOM. Called on the failing rank's main thread; returns once all ranks are
        ready to exit."""
        if not self._lock.acquire(blocking=False):
            self.wait_if_under_way()  # another rank has already rung the alarm
            return
        self._end_attempt("memory", close, ring=True)

    def out_of_time(self) -> None:
        """End the attempt because the current step cannot end before the ranks are killed. Called on a thread
        of one rank. Returns only if nothing could be handed over; the step then uses the remaining time."""
        self._leave_with("time", ring=True)

    def end(self) -> None:
        """Stop the alarm before this rank leaves without having rung it."""
        with contextlib.suppress(dist.DistError):
            self._alarm.end()

    def finish_saving(self, *, records: bool = True) -> None:
        """Wait until the checkpoint that is being written is complete, and write its event if `records`.

        Each rank writes a part of it, which no other rank can finish after this process has ended.
        """
        if self.handover is None:
            return
        say, run = partial(print, flush=True) if records else self.rank.say, self.rank.run
        saved = self.handover.checkpoints.complete(SAVING_SECONDS, say)
        if saved is None or not records or (self.rank.no_shared_folder and self.rank.node > 0):
            return
        if not any(
            isinstance(event, CheckpointSaved) and event.step == saved.step for event in run.read_events()
        ):
            with contextlib.suppress(OSError):
                run.append(CheckpointSaved(step=saved.step, path=str(saved.path)))

    def wait_if_under_way(self) -> None:
        """Wait if another thread of this rank is handing over; that thread then ends the process."""
        self._lock.acquire(timeout=MOST_SECONDS + ANSWER_SECONDS + UPDATE_SECONDS)

    def _heard(self, why: str) -> None:
        self._leave_with(cast(Why, why), ring=False)

    def _leave_with(self, why: Why, *, ring: bool) -> None:
        if self._lock.acquire(blocking=False):
            if self._end_attempt(why, lambda: None, ring=ring):
                leave(EXIT_FOLLOWED)
            self._lock.release()

    def _end_attempt(self, why: Why, close: Callable[[], object], *, ring: bool) -> bool:
        """Hand over the state and return True if the attempt ends. After an OOM it ends even if the handover
        fails: the next attempt starts from the checkpoint."""
        outcome = None
        try:
            if ring:
                self._alarm.ring(why)
            # A second exchange would return the other ranks' answers to the first one.
            outcome = self._hand_over() if not self._tried else None
            if outcome is not None and self.rank.first:
                self.rank.run.append(with_masked_words(outcome))
        except Exception as error:
            print(f"nothing is handed over: {type(error).__name__}: {error}", file=sys.stderr)
        if why == "time" and not isinstance(outcome, HandedOver):
            self._tried = True
            self._let_go()
            return False
        if why == "memory":
            self.finish_saving(records=ring)
        within(CLOSING_SECONDS, close)
        with contextlib.suppress(dist.DistError):
            # When one rank has failed, the others are ended.
            self._alarm.leave(CLOSING_SECONDS + 1)
        return True

    def _hand_over(self) -> HandedOver | HandoverSkipped | None:
        """Hand over the state and return the event that reports it. None if no step is complete yet."""
        attempt, offers = self.rank.attempt.number, self._offers()
        steps = {offer.step for offer in offers.values()}
        if steps == {0}:
            return None
        if (reason := refusal(offers, self.rank.world)) is not None:
            return HandoverSkipped(attempt=attempt, step=min(steps), reason=reason)
        assert self.handover is not None
        started, problem, size = time.monotonic(), "", 0
        try:
            size = self.handover.give()
        except (OSError, RuntimeError) as error:
            problem = f"rank {self.rank.number}: {type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        limit = min(MOST_SECONDS, WRITE_SECONDS + max(_by_node(offers).values()) / BYTES_PER_SECOND)
        answers = self._alarm.exchange("written", [size, seconds, problem], limit)
        problems = [answer[2] for answer in answers.values() if answer[2]]
        problems += [f"rank {n} did not finish" for n in range(self.rank.world) if n not in answers]
        [step] = steps
        if problems:
            return HandoverSkipped(attempt=attempt, step=step, reason=problems[0])
        return HandedOver(
            attempt=attempt,
            step=step,
            bytes=sum(answer[0] for answer in answers.values()),
            seconds=round(max(answer[1] for answer in answers.values()), 3),
        )

    def _offers(self) -> dict[int, Offer]:
        """Return the offers of all ranks that answer, with updates blocked.

        A rank that is one step behind gets time to catch up. It can: the rank ahead has already taken part in
        every collective of that step.
        """
        self._held = self._hold()
        offers = self._exchange("offer", self._offer())
        positions = {(offer.step, offer.recorded) for offer in offers.values()}
        cannot_catch_up = len(offers) < self.rank.world or any(offer.torn for offer in offers.values())
        if len(positions) == 1 or cannot_catch_up:
            return offers
        if self._held and self.handover is not None and self.handover.progress.position < max(positions):
            progress = self.handover.progress
            self._let_go()
            deadline = time.monotonic() + UPDATE_SECONDS
            while progress.position < max(positions) and time.monotonic() < deadline:
                time.sleep(0.01)
            self._held = self._hold()
        return self._exchange("offer again", self._offer())

    def _exchange(self, topic: str, offer: Offer) -> dict[int, Offer]:
        answers = self._alarm.exchange(topic, asdict(offer), ANSWER_SECONDS)
        return {number: Offer(**answer) for number, answer in answers.items()}

    def _hold(self) -> bool:
        return self.handover is not None and self.handover.progress.hold(UPDATE_SECONDS)

    def _let_go(self) -> None:
        if self._held and self.handover is not None:
            self._held = False
            self.handover.progress.let_go()

    def _offer(self) -> Offer:
        rank, handover = self.rank, self.handover
        if handover is None:
            return Offer(rank.number, rank.node, 0, True, 0, 0, 0)
        return Offer(
            rank.number,
            rank.node,
            *handover.progress.position,
            handover.checkpoints.saved,
            handover.bytes(),
            free_for_handover(),
            torn=not self._held or handover.progress.torn,
        )


def refusal(offers: Mapping[int, Offer], world: int) -> str | None:
    """Return why there is no handover, or None if every rank can write its part. The same on every rank."""
    missing = [str(number) for number in range(world) if number not in offers]
    if missing:
        return f"rank {', '.join(missing)} did not answer"
    for offer in offers.values():
        if offer.torn:
            return f"rank {offer.rank} was in the middle of the update of step {offer.step + 1}"
    steps = sorted({offer.step for offer in offers.values()})
    if len(steps) > 1:
        return f"the ranks were between steps {steps[0]} and {steps[-1]}"
    if len({offer.recorded for offer in offers.values()}) > 1:
        return f"only some ranks had finished with step {steps[0]}"
    if steps[0] <= max(offer.saved for offer in offers.values()):
        return f"the checkpoint of step {steps[0]} is as new"
    for node, needed in _by_node(offers).items():
        free = min(offer.free for offer in offers.values() if offer.node == node)
        if needed > free:
            return (
                f"the state takes {format_bytes(needed)} of shared memory on node {node}, "
                f"where {format_bytes(free)} are free"
            )
    return None


def _by_node(offers: Mapping[int, Offer]) -> dict[int, int]:
    bytes_by_node: dict[int, int] = {}
    for offer in offers.values():
        bytes_by_node[offer.node] = bytes_by_node.get(offer.node, 0) + offer.bytes
    return bytes_by_node
