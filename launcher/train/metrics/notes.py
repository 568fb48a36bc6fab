"""Printed lines and events from any rank. If the disk is full, events are lost and training continues."""

from __future__ import annotations

from launcher.spec.events import Event
from launcher.train.error_report import masked
from launcher.train.rank import Rank

_WORDS = ("reason", "because")
"Event fields that may quote an exception."


class Notes:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._complained = False

    def line(self, text: str) -> None:
        """Print a line from this rank; the log adds the rank's number."""
        print(text, flush=True)

    def event(self, event: Event) -> None:
        """Append to events.jsonl, which several processes may write to."""
        try:
            self.rank.run.append(with_masked_words(event))
        except OSError as error:
            self.complain(error)

    def complain(self, error: OSError) -> None:
        """Report a failed write, only once per rank."""
        if not self._complained:
            self._complained = True
            self.line(f"metrics or events could not be written; training continues: {error}")


def with_masked_words(event: Event) -> Event:
    """Return the event without secrets."""
    fields = event.as_json()
    return event.of(
        {**fields, **{name: masked(fields[name]) for name in _WORDS if isinstance(fields.get(name), str)}}
    )
