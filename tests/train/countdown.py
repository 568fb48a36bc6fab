"""Counts the allocations of a memory budget, and lets one of them fail."""

from __future__ import annotations


class Countdown:
    """Stands for the drills of a budget: `budget.drills = Countdown()`."""

    def __init__(self) -> None:
        self.allocations = 0
        "Allocations so far, including those that failed and those that grew a storage."
        self._fails_at: int | None = None

    def fail_in(self, allocations: int | None) -> None:
        """Let the n-th allocation from now fail, where 1 is the next; None cancels this."""
        self._fails_at = None if allocations is None else self.allocations + allocations

    def strikes(self) -> str | None:
        self.allocations += 1
        return "of a test" if self.allocations == self._fails_at else None
