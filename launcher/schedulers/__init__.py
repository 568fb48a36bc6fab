"""Where a job runs. One file per scheduler, one protocol (`base.py`) for all."""
