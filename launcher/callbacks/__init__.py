"""Connect `launcher.log` to the loops of other frameworks. Each module imports its framework."""
