"""Copy files between nodes without a shared folder. Each node finds them in its own run directory."""
