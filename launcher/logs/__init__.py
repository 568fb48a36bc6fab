"""Logs: every line of every rank with its time; captured, read by offset, merged, folded, followed."""
