"""A loop of your own with accelerate, its W&B and TensorBoard trackers on."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from small_gpu import SAMPLES, TinyModel, watch
from torch.utils.data import DataLoader

micro_batch = int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"])
accumulate = int(os.environ["LAUNCHER_GRAD_ACCUM"])
checkpoints = Path(os.environ["LAUNCHER_CHECKPOINT_DIR"])

accelerator = Accelerator(
    gradient_accumulation_steps=accumulate,
    log_with=["wandb", "tensorboard"],
    project_dir=os.environ["LAUNCHER_RUN_DIR"],
    cpu=not torch.cuda.is_available(),
)
accelerator.init_trackers("frameworks")
torch.manual_seed(0)
model = watch(TinyModel())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(SAMPLES, batch_size=micro_batch, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step, steps = 0, int(os.environ["LAUNCHER_STEPS"])
if saved := sorted(checkpoints.glob("step-*")):
    accelerator.load_state(saved[-1])
    step = int(saved[-1].name.removeprefix("step-"))

per_epoch = len(loader) // accumulate
while step < steps:
    loader.set_epoch(step // per_epoch)
    for batch in accelerator.skip_first_batches(loader, step % per_epoch * accumulate):
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        accelerator.log({"loss": loss.item()}, step=step)
        if step % 2 == 0:
            accelerator.save_state(checkpoints / "unfinished")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (checkpoints / "unfinished").rename(checkpoints / f"step-{step:08d}")
        if step == steps or step % per_epoch == 0:
            break
accelerator.end_training()
