"""Hosts that share no folder: what one node writes, the others find in their own run directory."""
