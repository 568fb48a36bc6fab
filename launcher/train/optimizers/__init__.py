"""The optimizers that a recipe can name. `spec/optimizer_table.py` lists them; `build.py` creates one.

`offload` and `host_gradients` run one on the host.
"""
