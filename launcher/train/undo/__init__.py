"""To undo a failed step: `state_finder` finds the state besides trained parameters, `undo` copies
and restores it.

`containers` and `fingerprint` tell cheaply whether anything has changed.
"""
