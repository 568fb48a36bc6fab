"""The optimizers of a recipe. `spec/optimizers.py` lists them; `build.py` makes one."""
