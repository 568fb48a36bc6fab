"""Adapters: trained LoRA layers (`adapter`) over weights that stay `frozen`, in 4 bits if asked for (`nf4`).

`adapter_use` finds adapters that take no part. `launcher.train.tensor.cut_adapter` cuts them with their
layers.
"""
