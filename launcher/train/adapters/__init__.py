"""Adapters: trained LoRA layers (`adapter`) over weights that stay `frozen`, in 4 bits if asked for (`nf4`).

`cut_adapter` cuts them with a tensor-parallel layer; `adapter_use` finds adapters that take no part.
"""
