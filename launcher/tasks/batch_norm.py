"""BatchNorm that computes in fp32, whatever the recipe stores or computes in."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNorm(_BatchNorm):
    """Over any number of dimensions behind (samples, channels).

    torch's own wants weight, input and running statistics in matching types, which FSDP's mixed precision
    does not give it: weights come in bf16, buffers stay in fp32. With buffers in bf16 the statistics are
    updated in fp32 and stored rounded.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None and self.running_var is not None
        mean, variance = self.running_mean.float(), self.running_var.float()
        y = functional.batch_norm(
            x.float(),
            mean,
            variance,
            self.weight.float(),
            self.bias.float(),
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        if self.training and mean is not self.running_mean:
            self.running_mean.copy_(mean)
            self.running_var.copy_(variance)
        return y.to(x.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any number of dimensions is right."""
