"""In the allocation, one per node: start an attempt, judge how it ended, choose the next."""
