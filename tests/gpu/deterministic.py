"""A task whose kernels add up in the same order each time: two equal runs on a GPU are equal to the bit."""

from __future__ import annotations

import os

import torch
from torch import nn

from launcher.tasks import gpt


class PydocGPT(gpt.PydocGPT):
    def model(self) -> nn.Module:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS starts
        torch.use_deterministic_algorithms(True)
        return super().model()
