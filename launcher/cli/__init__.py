"""The verbs: parse, call one function, print. Heavy imports stand inside the functions."""

import atexit
import gc

# A verb lives for a moment, and most of that is imports. To look for cycles among what they make, at the
# usual threshold of 700 objects and once more at the end, is a sixth of it. `logs -f` lives on and collects.
gc.set_threshold(50_000)
atexit.register(gc.freeze)
