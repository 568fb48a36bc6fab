"""Lines and events from any rank. A full disk costs them, not the training."""

from __future__ import annotations

from launcher.spec.events import Event
from launcher.train.failure import masked
from launcher.train.rank import Rank

_WORDS = ("reason", "because")
"Fields of events that may quote an exception."


class Notes:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._complained = False

    def line(self, text: str) -> None:
        """For a person, from this rank; the log says which one it is."""
        print(text, flush=True)

    def event(self, event: Event) -> None:
        """Into events.jsonl, which takes lines of several writers."""
        try:
            self.rank.run.append(with_masked_words(event))
        except OSError as error:
            self.complain(error)

    def complain(self, error: OSError) -> None:
        """Once: a disk that is full stays full."""
        if not self._complained:
            self._complained = True
            self.line(f"metrics or events could not be written, the training goes on: {error}")


def with_masked_words(event: Event) -> Event:
    """Return the event without secrets."""
    words = {name: masked(event[name]) for name in _WORDS if isinstance(event.get(name), str)}
    return event.of({**event, **words})
