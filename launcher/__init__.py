"""launcher: a training job and a cluster become a run that fits into GPU memory."""

__version__ = "0.1.0"
