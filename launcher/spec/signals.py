"""The signals that Slurm, systemd and a terminal send to every process of a run."""

from __future__ import annotations

import signal

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2})
"""Requests to stop, which only the supervisor answers. torchrun would end all ranks at once without a
checkpoint. What starts the ranks therefore runs with them blocked."""

LEFT_TO_SUPERVISOR = frozenset({signal.SIGTERM, signal.SIGUSR2})
"""Those that do not end a rank of `launcher.train`. Its worker ends it by SIGHUP. Trackers end a training by
SIGINT (`_thread.interrupt_main`)."""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
