"""Lightning with its W&B and TensorBoard loggers. An epoch is two steps of 16 samples."""

import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from small_gpu import SAMPLES, TinyModel, watch
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = watch(TinyModel())

    def training_step(self, batch, _number):
        loss = self.model(**batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
loader = DataLoader(SAMPLES[:32], batch_size=int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"]), shuffle=True)
folder = os.environ["LAUNCHER_RUN_DIR"]
trainer = lightning.Trainer(
    accelerator="auto",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=int(os.environ["LAUNCHER_EPOCHS"]),
    accumulate_grad_batches=int(os.environ["LAUNCHER_GRAD_ACCUM"]),
    callbacks=[ModelCheckpoint(os.environ["LAUNCHER_CHECKPOINT_DIR"], save_last=True)],
    logger=[TensorBoardLogger(folder), WandbLogger(project="frameworks", save_dir=folder)],
    log_every_n_steps=1,
)
trainer.fit(Module(), loader, ckpt_path="last")
