"""Logs: every line of every rank with its time.

They are captured, read by offset, merged, folded, followed.
"""
