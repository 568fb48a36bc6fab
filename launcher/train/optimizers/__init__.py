"""The optimizers of a recipe. `table.py` says which library runs which, and why; `build.py` makes it."""
