"""DeepSpeed with ZeRO, its W&B and TensorBoard monitors on."""

import itertools
import os
from pathlib import Path

import deepspeed
import torch
from small_gpu import SAMPLES, TinyModel, watch
from torch.utils.data import DataLoader, DistributedSampler

if not torch.cuda.is_available():
    # Only on a CPU DeepSpeed has a kernel for shared memory, which it would compile for two minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")

config = {
    "train_micro_batch_size_per_gpu": int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"]),
    "gradient_accumulation_steps": int(os.environ["LAUNCHER_GRAD_ACCUM"]),
    "zero_optimization": {"stage": 1},
    "wandb": {"enabled": True, "project": "frameworks"},
    "tensorboard": {
        "enabled": True,
        "output_path": os.environ["LAUNCHER_RUN_DIR"],
        "job_name": "tensorboard",
    },
}
checkpoints = Path(os.environ["LAUNCHER_CHECKPOINT_DIR"])

torch.manual_seed(0)
model = watch(TinyModel())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.load_checkpoint(checkpoints)

accumulate = engine.gradient_accumulation_steps()
sampler = DistributedSampler(SAMPLES, shuffle=True, seed=0)
micro_batch = engine.train_micro_batch_size_per_gpu()
loader = DataLoader(SAMPLES, batch_size=micro_batch, sampler=sampler, drop_last=True)
per_epoch = len(loader) // accumulate
steps = int(os.environ["LAUNCHER_STEPS"])
while engine.global_steps < steps:
    sampler.set_epoch(engine.global_steps // per_epoch)
    skipped = engine.global_steps % per_epoch * accumulate
    for batch in itertools.islice(loader, skipped, per_epoch * accumulate):
        engine.backward(engine(**batch))
        last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if last and engine.global_steps % 2 == 0:
            engine.save_checkpoint(checkpoints, save_latest=False)  # waits for all ranks
            if engine.global_rank == 0:
                (checkpoints / "latest.part").write_text(f"global_step{engine.global_steps}")
                (checkpoints / "latest.part").replace(checkpoints / "latest")
        if engine.global_steps == steps:
            break
engine.destroy()
