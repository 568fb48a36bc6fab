"""A server that stands in for RunPod on this machine, for trying launcher out and for tests."""
