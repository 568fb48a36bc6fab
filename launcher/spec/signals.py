"""The signals that Slurm, systemd and a terminal send to every process of a run."""

from __future__ import annotations

import signal

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2})
"""Requests to stop, to which only the supervisor responds. torchrun would end all ranks at once without a
checkpoint, so the program that starts the ranks runs with these signals blocked."""

LEFT_TO_SUPERVISOR = frozenset({signal.SIGTERM, signal.SIGUSR2})
"""Stop signals that do not end a rank of `launcher.train`. Its worker ends a rank with SIGHUP, and
trackers end a training with SIGINT (`_thread.interrupt_main`)."""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
