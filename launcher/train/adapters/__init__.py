"""Adapters: trained LoRA layers (`adapter`) over `frozen` weights, which may be in 4 bits (`nf4`).

`adapter_use` finds adapters that get no gradient. `launcher.train.tensor.cut_adapter` cuts them with their
layers.
"""
