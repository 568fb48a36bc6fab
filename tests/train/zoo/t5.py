"""An encoder-decoder of transformers, made from a config: T5, with tied embeddings and dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

from zoo.tasks import VOCABULARY, Tokens


class T5(Tokens):
    def model(self) -> nn.Module:
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2,
                num_heads=2, decoder_start_token_id=0, use_cache=False,
            )
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (tokens,) = batch
        source, target = tokens[:, :6], tokens[:, 6:]
        logits = model(input_ids=source, decoder_input_ids=target[:, :-1]).logits.float()
        wanted = target[:, 1:].flatten()
        return functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum"), len(wanted)
