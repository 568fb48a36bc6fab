"""The optimizers that a recipe can name. `spec/optimizers.py` lists them; `build.py` creates one.

`offload` and `host_gradients` run one on the host.
"""
