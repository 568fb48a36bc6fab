"""The callbacks of frameworks, with the frameworks themselves: each trains a few steps on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir

ROOT = Path(__file__).parents[2]
DATA = """
import torch
from torch import nn
rows = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(32)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}
"""
ACCELERATE = """
from accelerate import Accelerator
from launcher.callbacks.accelerate import LogTracker
accelerator = Accelerator(cpu=True, log_with=LogTracker())
accelerator.init_trackers("run", config={"lr": 0.1})
model = accelerator.prepare(Net())
for step, row in enumerate(rows[:4], 1):
    loss = model(**row)["loss"]
    accelerator.backward(loss)
    accelerator.log({"train_loss": loss.item(), "epoch": 0, "step": 9, "steps": 9, "rank": 1}, step=step)
accelerator.end_training()
"""
TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from launcher.callbacks.transformers import LogCallback
args = TrainingArguments(output_dir="out", max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=4,
    per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    include_num_input_tokens_seen="COUNT")
Trainer(Net(), args, train_dataset=rows, eval_dataset=rows, callbacks=[LogCallback()]).train()
"""
RESUMED = """
from transformers import Trainer, TrainingArguments
from launcher.callbacks.transformers import LogCallback
for steps, resumes in ((4, False), (6, True)):
    args = TrainingArguments(output_dir="out", max_steps=steps, logging_steps=2, save_steps=4,
        per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True,
        include_num_input_tokens_seen="all")
    Trainer(Net(), args, train_dataset=rows, callbacks=[LogCallback()]).train(resume_from_checkpoint=resumes)
"""
LIGHTNING = """
import lightning
from torch.utils.data import DataLoader
from launcher.callbacks.lightning import LogLogger
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, row, index):
        loss = self.net(**row)["loss"]
        self.log("train_loss", loss)
        return loss
    def validation_step(self, row, index):
        self.log("val_loss", self.net(**row)["loss"])
        self.log("val_batch", float(index), on_step=True, on_epoch=False)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=4, log_every_n_steps=2,
    val_check_interval=2, logger=LogLogger(), enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False)
trainer.fit(Module(), DataLoader(rows, 8), DataLoader(rows, 8))
"""


def recorded(script: str, folder: Path) -> list[dict[str, Any]]:
    run = RunDir(folder / "run")
    run.path.mkdir()
    (folder / "train.py").write_text(DATA + script)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ |= {"LAUNCHER_RUN_DIR": str(run.path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return run.read_metrics()


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate(tmp_path: Path) -> None:
    lines = recorded(ACCELERATE, tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["loss"] > 0 and line["rank"] == 1 for line in lines)
    assert not any({"epoch", "steps"} & line.keys() for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("count", ["no", "all"])
def test_transformers(tmp_path: Path, count: str) -> None:
    lines = recorded(TRANSFORMERS.replace("COUNT", count), tmp_path)
    training = [line for line in lines if "loss" in line]
    assert [(line["step"], line["steps"], line["samples"]) for line in training] == [(2, 4, 16), (4, 4, 16)]
    assert all({"lr", "grad_norm"} <= line.keys() for line in training)
    (evaluation,) = [line for line in lines if "eval_loss" in line]
    assert evaluation["step"] == 4 and len(lines) == 3


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_resumed_training_of_transformers_counts_from_its_checkpoint_on(tmp_path: Path) -> None:
    lines = recorded(RESUMED, tmp_path)
    assert [(line["step"], line["samples"]) for line in lines] == [(2, 16), (4, 16), (6, 16)]
    assert len({line.get("tokens") for line in lines}) == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning(tmp_path: Path) -> None:
    lines = recorded(LIGHTNING, tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == [2, 4]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    assert [line["step"] for line in lines if "eval_batch" in line] == [2] * 4 + [4] * 4, "no steps"
