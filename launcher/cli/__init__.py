"""The command line: parse, call one function, print. Heavy imports are inside the functions."""

import atexit
import gc
import signal

# A verb runs for a moment, and most of that time is imports. Searching their objects for cycles, at the
# default threshold of 700 objects and once more at the end, takes a sixth of it. `logs -f` runs longer and
# collects.
gc.set_threshold(50_000)
atexit.register(gc.freeze)


def start() -> None:
    """The console script. Ctrl-C during its imports, which take seconds on a slow disk, ends it silently."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise the shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from launcher.cli.main import main

    signal.signal(signal.SIGINT, handler)
    main()
