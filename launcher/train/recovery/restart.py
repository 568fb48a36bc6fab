"""One rank is out of memory, or the run is to stop before the step under way can end.

Every rank hands over its last complete state, then all leave at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, cast

import torch.distributed as dist

from launcher.spec.base import format_bytes
from launcher.spec.events import HandedOver, HandoverSkipped
from launcher.spec.verdict import EXIT_FOLLOWED
from launcher.train.failure import leave, within
from launcher.train.metrics.notes import with_masked_words
from launcher.train.rank import Rank
from launcher.train.recovery.alarm import Alarm
from launcher.train.recovery.handover import Handover
from launcher.train.recovery.room import free_for_handover

UPDATE_SECONDS = 10.0
"For an update that is under way on some rank: its own last one, not a new one."
ANSWER_SECONDS = 15.0
"For every rank to say what it has. Longer than an update is waited for."
WRITE_SECONDS, MOST_SECONDS = 5.0, 60.0
"For the writing, and the most that it may take with its bytes."
BYTES_PER_SECOND = 0.25e9
"Of a node, slowly: from GPUs to memory that is not pinned, all ranks at once."
CLOSING_SECONDS = 10.0
"For the failing rank's tracker; the same as without a handover."

Why = Literal["memory", "time"]


@dataclass(frozen=True)
class Offer:
    """What one rank could hand over."""

    rank: int
    node: int
    step: int
    "The last complete one; 0: none."
    recorded: bool
    "It is evaluated where that was due, and in the metrics."
    saved: int
    "The step of the newest checkpoint."
    bytes: int
    free: int
    "On its node."
    torn: bool = False
    "It is or was in the middle of the update after `step`."


class Restart:
    """Made when the ranks have met; `handover` follows when there is something to hand over."""

    def __init__(self, rank: Rank, began: float) -> None:
        """`began`: the process, by time.monotonic. Raises dist.DistError."""
        self.rank, self.began = rank, began
        self.handover: Handover | None = None
        self._alarm = Alarm(rank)
        self._mine = threading.Lock()
        "Of the thread that hands over. Given back only where the attempt goes on without."
        self._tried = self._held = False
        self._alarm.listen(self._heard)

    def out_of_memory(self, close: Callable[[], object]) -> None:
        """On the main thread of the rank that failed: returns when all are ready to leave."""
        if not self._mine.acquire(blocking=False):
            self.wait_if_under_way()  # another rank was faster
            return
        self._end_attempt("memory", close, ring=True)

    def out_of_time(self) -> None:
        """On a thread of one rank: the step under way does not end before the ranks are killed. Returns when
        nothing could be handed over: the step then has what time is left."""
        self._leave_with("time", ring=True)

    def wait_if_under_way(self) -> None:
        """Another thread of this rank hands over what others wait for, and then ends the process."""
        self._mine.acquire(timeout=MOST_SECONDS + ANSWER_SECONDS + UPDATE_SECONDS)

    def _heard(self, why: str) -> None:
        self._leave_with(cast(Why, why), ring=False)

    def _leave_with(self, why: Why, *, ring: bool) -> None:
        if self._mine.acquire(blocking=False):
            if self._end_attempt(why, lambda: None, ring=ring):
                leave(EXIT_FOLLOWED)
            self._mine.release()

    def _end_attempt(self, why: Why, close: Callable[[], object], *, ring: bool) -> bool:
        """Whatever goes wrong here, without memory the attempt ends: the next one has the checkpoint. False:
        it goes on."""
        outcome = None
        try:
            if ring:
                self._alarm.ring(why)
            # A second time the others would be heard saying what they had the first time.
            outcome = self._hand_over() if not self._tried else None
            if outcome is not None and self.rank.first:
                self.rank.run.append(with_masked_words(outcome))
        except Exception as error:
            print(f"nothing is handed over: {type(error).__name__}: {error}", file=sys.stderr)
        if why == "time" and not isinstance(outcome, HandedOver):
            self._tried = True
            self._let_go()
            return False
        within(CLOSING_SECONDS, close)
        with contextlib.suppress(dist.DistError):
            # The first to leave makes torchrun end the others.
            self._alarm.exchange("leaving", True, CLOSING_SECONDS + 1)
        return True

    def _hand_over(self) -> HandedOver | HandoverSkipped | None:
        """The event that tells of it. None: there was nothing to hand over, and nobody expects it."""
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
        """Of all ranks that answer, their states held still.

        A rank that is behind has what it needs to go on: the one ahead has met it in every collective up to
        there. It gets the time to catch up.
        """
        self._held = self._hold()
        offers = self._exchange("offer", self._offer())
        positions = {(offer.step, offer.recorded) for offer in offers.values()}
        waits_in_vain = len(offers) < self.rank.world or any(offer.torn for offer in offers.values())
        if len(positions) == 1 or waits_in_vain:
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
    """Why nothing is handed over; None: every rank writes its part. The same on every rank."""
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
                f"the state takes {format_bytes(needed)} of the memory of node {node}, "
                f"where {format_bytes(free)} are free for it"
            )
    return None


def _by_node(offers: Mapping[int, Offer]) -> dict[int, int]:
    found: dict[int, int] = {}
    for offer in offers.values():
        found[offer.node] = found.get(offer.node, 0) + offer.bytes
    return found
