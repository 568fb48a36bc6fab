"""The Trainer of transformers, reporting to W&B and TensorBoard."""

import os
from pathlib import Path

import torch
from small_gpu import SAMPLES, watch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

arguments = TrainingArguments(
    per_device_train_batch_size=int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"]),
    gradient_accumulation_steps=int(os.environ["LAUNCHER_GRAD_ACCUM"]),
    output_dir=os.environ["LAUNCHER_CHECKPOINT_DIR"],
    max_steps=int(os.environ["LAUNCHER_STEPS"]),
    save_steps=2,
    logging_steps=1,
    report_to=["wandb", "tensorboard"],
    use_cpu=not torch.cuda.is_available(),
)

config = GPT2Config(
    n_layer=1, n_head=1, n_embd=16, n_positions=8, vocab_size=64, bos_token_id=0, eos_token_id=0
)
trainer = Trainer(watch(GPT2LMHeadModel(config)), arguments, train_dataset=SAMPLES)
saved = Path(arguments.output_dir).glob("checkpoint-*/trainer_state.json")  # written last
newest = max(saved, key=lambda file: int(file.parent.name.partition("-")[2]), default=None)
trainer.train(resume_from_checkpoint=newest and str(newest.parent))
