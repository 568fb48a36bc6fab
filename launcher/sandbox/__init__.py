"""A server that simulates RunPod on this machine, for trying out launcher and for tests."""
