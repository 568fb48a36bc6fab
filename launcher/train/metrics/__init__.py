"""What a training tells the world: metrics, memory, snapshots of it, trackers."""
