"""The run directory: where things lie and how they are written. What is in the files is others' concern."""
