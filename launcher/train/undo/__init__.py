"""Undo of a failed step: `state_finder` finds the state besides trained parameters, `undo` copies and
restores it.

`containers` and `fingerprint` are cheap checks for changes.
"""
