"""Undo of a failed step: `state_finder` finds the state besides trained parameters, `undo` copies and
restores it.

`objects` says how an object is searched, `kept` how its content is kept. `containers` and `fingerprint` are
cheap checks for changes.
"""
