"""The command line: parse, call one function, print. Heavy imports are inside the functions."""

import atexit
import gc

# A verb runs for a moment, and most of that time is imports. Searching their objects for cycles, at the
# default threshold of 700 objects and once more at the end, takes a sixth of it. `logs -f` runs longer and
# collects.
gc.set_threshold(50_000)
atexit.register(gc.freeze)
