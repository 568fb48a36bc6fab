"""Measure on a node. Nothing here judges a value, and only `ranks` and what it imports import torch."""
