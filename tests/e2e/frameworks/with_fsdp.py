"""PyTorch's FSDP2 with distributed checkpoints, W&B and TensorBoard."""

import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import wandb
from small_gpu import SAMPLES, TinyModel, watch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

micro_batch = int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"])
accumulate = int(os.environ["LAUNCHER_GRAD_ACCUM"])
checkpoints = Path(os.environ["LAUNCHER_CHECKPOINT_DIR"])

dist.init_process_group("gloo")
main_rank = dist.get_rank() == 0
if main_rank:
    folder, name = os.environ["LAUNCHER_RUN_DIR"], os.environ["LAUNCHER_RUN_ID"]
    run = wandb.init(project="frameworks", dir=folder, id=name, resume="allow")
    board = SummaryWriter(folder + "/tensorboard")

torch.manual_seed(0)
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(watch(TinyModel()), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step, steps = 0, int(os.environ["LAUNCHER_STEPS"])
if saved := sorted(checkpoints.glob("step-*/.metadata")):  # written last
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    step = int(saved[-1].parent.name.removeprefix("step-"))

sampler = DistributedSampler(SAMPLES, shuffle=True, seed=0)
loader = DataLoader(SAMPLES, batch_size=micro_batch, sampler=sampler, drop_last=True)
per_epoch = len(loader) // accumulate
while step < steps:
    sampler.set_epoch(step // per_epoch)
    batches = itertools.islice(loader, step % per_epoch * accumulate, per_epoch * accumulate)
    while step < steps and (group := list(itertools.islice(batches, accumulate))):
        for batch in group:
            loss = model(**batch) / accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if main_rank:
            run.log({"loss": loss.item() * accumulate}, step=step)
            board.add_scalar("loss", loss.item() * accumulate, step)
        if step % 2 == 0:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=checkpoints / f"step-{step:08d}")

if main_rank:
    board.close()
    run.finish()
dist.destroy_process_group()
