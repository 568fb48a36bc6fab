"""Models that recovery has to hold for, each small and in a file of its own.

Run where `tests/train` is on the path: `zoo.vq_vae:VqVae` is the name of a task.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Model:
    """A task of the zoo, and what is known of it."""

    task: str
    job: dict[str, Any] = field(default_factory=dict)
    "Fields of the job that it needs."
    coupled: bool = False
    "Its loss depends on which samples are in a micro-batch together."
    checks: bool = False
    "Its forward refuses values that its parameters never have."
    sends: bool = False
    "It calls collectives itself: under FSDP memory that runs out is always a restart."
    forgets: bool = False
    "It has state in attributes of the model, which a new attempt begins without."
    changes_large: bool = False
    "Its blocks change a buffer of more than 1 MiB, of which a recomputation has no copy: it is refused."
    fails_in: str | None = None
    "Name of the module in which memory runs out; one in the middle of the trained blocks if left out."


MODELS = {
    "VQ-VAE": Model("zoo.vq_vae:VqVae"),
    "learned sigma": Model("zoo.learned_sigma:LearnedSigma", checks=True),
    "temperature": Model("zoo.temperature:Temperature", checks=True),
    "weight norm": Model("zoo.weight_norm:WeightNorm", checks=True),
    "spectral norm": Model("zoo.spectral_norm:SpectralNorm"),
    "categorical": Model("zoo.categorical:Policy", checks=True),
    "frozen teacher": Model("zoo.frozen_teacher:MeanTeacher"),
    "running mean": Model("zoo.running_mean:RunningMean", forgets=True),
    "replay": Model("zoo.replay:Replay", forgets=True),
    "own generators": Model("zoo.own_generators:OwnGenerators", forgets=True),
    "hidden teacher": Model("zoo.hidden_teacher:HiddenTeacher", forgets=True),
    "plain objects": Model("zoo.plain_objects:PlainObjects", forgets=True),
    "task state": Model("zoo.task_state:Curriculum"),
    "contrastive": Model("zoo.contrastive:Contrastive", coupled=True),
    "contrastive over ranks": Model(
        "zoo.contrastive_over_ranks:ContrastiveOverRanks", coupled=True, sends=True
    ),
    "masking": Model("zoo.masking:Masking"),
    "diffusion": Model("zoo.diffusion:Diffusion"),
    "GAN": Model("zoo.gan:Gan"),
    "masked autoencoder": Model("zoo.masked_autoencoder:MaskedAutoencoder"),
    "Mamba": Model("zoo.mamba:Mamba"),
    "graphs": Model("zoo.graph:Graphs"),
    "embeddings": Model("zoo.embeddings:Embeddings"),
    "stochastic depth": Model("zoo.stochastic_depth:StochasticDepth"),
    "nested units": Model("zoo.nested_units:NestedUnits"),
    "called twice": Model("zoo.called_twice:CalledTwice"),
    "T5": Model("zoo.t5:T5"),
    "experts": Model("zoo.experts:Experts", job={"train": {"find_unused_parameters": True}}),
    "quantised": Model("zoo.quantised:Quantised"),
    "late buffer": Model("zoo.late_buffer:LateBuffer"),
    "carried state": Model("zoo.carried_state:CarriedState", forgets=True),
    "shared buffers": Model("zoo.shared_buffers:SharedBuffers", changes_large=True),
    "gradient statistics": Model("zoo.gradient_statistics:GradientStatistics", forgets=True),
    "memory bank": Model("zoo.memory_bank:MemoryBank"),
    "input gradient": Model("zoo.input_gradient:InputGradient"),
}

if "ZOO_FAILS" in os.environ:
    from zoo.failing import arm_from_environment

    arm_from_environment()
