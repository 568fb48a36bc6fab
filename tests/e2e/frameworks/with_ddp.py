"""PyTorch's DistributedDataParallel, W&B and TensorBoard."""

import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import wandb
from small_gpu import SAMPLES, TinyModel, watch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

micro_batch = int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"])
accumulate = int(os.environ["LAUNCHER_GRAD_ACCUM"])
newest = Path(os.environ["LAUNCHER_CHECKPOINT_DIR"]) / "newest.pt"

dist.init_process_group("gloo")
main_rank = dist.get_rank() == 0
if main_rank:
    folder, name = os.environ["LAUNCHER_RUN_DIR"], os.environ["LAUNCHER_RUN_ID"]
    run = wandb.init(project="frameworks", dir=folder, id=name, resume="allow")
    board = SummaryWriter(folder + "/tensorboard")

torch.manual_seed(0)
model = DistributedDataParallel(watch(TinyModel()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step, steps = 0, int(os.environ["LAUNCHER_STEPS"])
if newest.exists():
    saved = torch.load(newest)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]

sampler = DistributedSampler(SAMPLES, shuffle=True, seed=0)
loader = DataLoader(SAMPLES, batch_size=micro_batch, sampler=sampler, drop_last=True)
per_epoch = len(loader) // accumulate
while step < steps:
    sampler.set_epoch(step // per_epoch)
    batches = itertools.islice(loader, step % per_epoch * accumulate, per_epoch * accumulate)
    while step < steps and (group := list(itertools.islice(batches, accumulate))):
        for number, batch in enumerate(group, start=1):
            model.require_backward_grad_sync = number == accumulate
            loss = model(**batch) / accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if main_rank:
            run.log({"loss": loss.item() * accumulate}, step=step)
            board.add_scalar("loss", loss.item() * accumulate, step)
        if main_rank and step % 2 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, newest.with_suffix(".part"))
            newest.with_suffix(".part").replace(newest)

if main_rank:
    board.close()
    run.finish()
dist.destroy_process_group()
