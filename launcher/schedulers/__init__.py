"""Schedulers: where a job runs. All implement one protocol (`base.py`)."""
