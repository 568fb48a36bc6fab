"""A server on this machine that stands in for RunPod: for trying it out, and for tests."""
