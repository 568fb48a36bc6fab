"""Pictures of a plan or a run. Knows nothing of how a run was started."""
