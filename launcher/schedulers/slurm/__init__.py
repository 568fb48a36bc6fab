"""The Slurm scheduler: queries and their meaning, submission, and a run that spans one or more jobs."""
