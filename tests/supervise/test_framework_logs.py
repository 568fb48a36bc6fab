"""Logs that frameworks write by themselves become lines of metrics.jsonl: written by the real libraries."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.files import append_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.supervise.framework_logs import follower
from launcher.supervise.framework_logs.follower import FrameworkLogs
from launcher.supervise.framework_logs.search import files_named
from launcher.supervise.framework_logs.sources import Source
from launcher.supervise.host import supervisor_lock
from tests import warm
from tests.lab import PATIENCE, Lab, merged_steps, wait_for

LONG_AGO = 1e9
NET = """
import os, torch
from torch import nn
rows = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(32)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}
"""
TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
out = os.environ["LAUNCHER_CHECKPOINT_DIR"]
args = TrainingArguments(output_dir=out, max_steps=int(os.environ["STEPS"]), logging_steps=2,
    eval_strategy="steps", eval_steps=4, save_steps=4, per_device_train_batch_size=8, use_cpu=True,
    report_to=os.environ["TO"].split(), disable_tqdm=True)
Trainer(Net(), args, train_dataset=rows, eval_dataset=rows).train(get_last_checkpoint(out))
"""
LIGHTNING = """
import lightning
from torch.utils.data import DataLoader
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
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
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=8, log_every_n_steps=2,
    logger=eval(os.environ["TO"]), enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), DataLoader(rows, 8), DataLoader(rows, 8))
"""
WANDB = """
import wandb
run = wandb.init(project="p", config={"lr": 0.1})
for step in range(300):  # several blocks of 32 KiB
    run.log({"train/loss": 1 / (step + 1), "nested": {"a": step}, "note": "x" * 100, "nan": float("nan")})
run.finish()
"""


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run beside its working folder `work`."""
    run = RunDir(tmp_path / "runs" / "this")
    for folder in (run.path, tmp_path / "work"):
        folder.mkdir(parents=True)
    replace_json(run.run, {"job": {"batch": {"global": 16}}, "workdir": str(tmp_path / "work")})
    return run


def work(run: RunDir) -> Path:
    return run.path.parents[1] / "work"


def taken_over(run: RunDir, attempt: int = 0, since: float = LONG_AGO) -> list[dict[str, Any]]:
    """What the end of a rank adds to metrics.jsonl."""
    before = len(run.read_metrics())
    FrameworkLogs(run, attempt, work(run), since, {}).close()
    return run.read_metrics()[before:]


def program(text: str, folder: Path) -> None:
    """Run a user's script in a folder."""
    script = folder.with_name(f"{folder.name}.py")
    script.write_text(text)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    ended = warm.run(warm.Program(False, [str(script)], environ, folder), PATIENCE)
    assert ended.returncode == 0, ended.stderr


@needs("wandb")
def test_wandb_offline(run: RunDir) -> None:
    program(WANDB, work(run))
    lines = taken_over(run)
    assert [line["step"] for line in lines] == list(range(1, 301)), "W&B counts from 0"
    assert lines[-1]["loss"] == pytest.approx(1 / 300) and lines[-1]["nested.a"] == 299
    assert lines[-1]["nan"] is None and "note" not in lines[-1]
    assert {line["from"] for line in lines} == {"wandb"}
    assert lines[1]["samples"] == 16 and lines[1]["seconds"] > 0


CALLS = """
import wandb
for counter in (False, True):
    run = wandb.init(project="p", dir=os.environ["DIR"] + str(counter))
    run.log({"parameters": 5})
    for step in range(6):
        run.log({"loss": 1 / (step + 1), **({"global_step": step} if counter else {})})
        run.log({"lr": 0.1})
        if step % 3 == 2:
            run.log({"val_loss": step})
    run.finish()
"""


@needs("wandb")
def test_calls_of_wandb_beside_those_of_the_training_are_no_steps(run: RunDir, tmp_path: Path) -> None:
    program(f"import os\nos.environ['DIR'] = {str(tmp_path)!r} + '/'\n" + CALLS, tmp_path)
    for counter in ("False", "True"):
        shutil.move(tmp_path / counter, run.path / "logs")
        lines = taken_over(run)
        assert {line["step"]: line["loss"] for line in lines if "loss" in line} == {
            step: pytest.approx(1 / step) for step in range(1, 7)
        }
        assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
        assert {line["step"] for line in lines if "lr" in line} == {*range(1, 7)}
        shutil.rmtree(run.path / "logs")


@needs("wandb")
def test_a_record_of_wandb_that_is_not_complete_is_read_later(run: RunDir, tmp_path: Path) -> None:
    program(WANDB, tmp_path)
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert len(data) > 3 * 2**15
    source = Source(run, work(run), LONG_AGO)
    steps: list[int] = []
    for end in (3, 7, 2**15 - 3, 2**15, 2**15 + 5, 2**16 + 100, len(data)):  # as its blocks are written
        (work(run) / "run-x.wandb").write_bytes(data[:end])
        steps += [reading.step for reading in source.read(search=True)[1]]
    assert steps == list(range(300))


@needs("torch", "tensorboard")
def test_tensorboard(run: RunDir) -> None:
    text = """
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter("runs/first")
    writer.add_text("about", "a run", 0)
    for step in range(1, 4):
        writer.add_scalar("train/loss", 1 / step, step)
        writer.add_scalar("val/accuracy", step / 10, step)
    writer.add_image("picture", __import__("numpy").zeros((3, 600, 600), "uint8"), 3)
    writer.close()
    writer = SummaryWriter("runs/first")  # a further file
    writer.add_scalar("train/loss", 0.25, 4)
    writer.close()
    """
    program(textwrap.dedent(text), work(run))
    lines = taken_over(run)
    assert [(line["step"], line["loss"]) for line in lines] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)
    ]  # fmt: skip
    assert lines[2]["eval_accuracy"] == pytest.approx(0.3)
    assert {line["from"] for line in lines} == {"tensorboard"}


@needs("torch", "tensorboard")
def test_a_metric_under_its_epoch_belongs_to_the_last_step_and_a_training_may_begin_again(
    run: RunDir,
) -> None:
    text = """
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter("logs")
    for step in range(1, 7):
        writer.add_scalar("loss", 1 / step, step)
        if step % 3 == 0:
            writer.add_scalar("val_loss", 2 / step, step // 3 - 1)
            writer.add_scalar("val_accuracy", step / 10, step // 3 - 1)
    if AGAIN:
        writer.add_scalar("loss", 5.0, 1)
        writer.add_scalar("loss", 4.0, 2)
    writer.close()
    """
    program(textwrap.dedent(text).replace("AGAIN", "False"), work(run))
    lines = merged_steps(taken_over(run))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    found = [(line["loss"], line["eval_loss"], line["eval_accuracy"]) for line in (lines[2], lines[5])]
    assert found == [pytest.approx((1 / 3, 2 / 3, 0.3)), pytest.approx((1 / 6, 2 / 6, 0.6))]
    assert lines[3]["samples"] == 16
    for path in work(run).glob("logs/*"):
        path.unlink()
    program(textwrap.dedent(text).replace("AGAIN", "True"), work(run))
    again = merged_steps(taken_over(run, 1))
    assert [(line["step"], line["loss"]) for line in again] == [(1, 5.0), (2, 4.0)]


@needs("torch", "tensorboard")
@pytest.mark.parametrize("first", [0, 1])
def test_a_resumed_log_counts_its_steps_as_the_first_attempt_did(run: RunDir, first: int) -> None:
    text = """
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter("logs")
    for step in range(BEGIN, BEGIN + 4):
        writer.add_scalar("loss", step, step)
    writer.close()
    """
    for attempt, begin in enumerate((0, 3, 5)):  # the second and third resume from a checkpoint
        run.attempt(attempt).path.mkdir(parents=True)
        since = time.time()
        program(textwrap.dedent(text).replace("BEGIN", str(first + begin)), work(run))
        lines = taken_over(run, attempt, since)
        assert [line["step"] for line in lines] == [begin + 1, begin + 2, begin + 3, begin + 4]
        assert lines[0]["loss"] == first + begin


@needs("tensorboard")
def test_an_evaluation_that_counts_its_batches_loses_no_step_of_the_training(run: RunDir) -> None:
    text = """
    from torch.utils.tensorboard import SummaryWriter
    writer, batches = SummaryWriter("logs"), 0
    for step in range(6):
        writer.add_scalars("parts", {"z": 1.0}, step)  # in folders of their own
        writer.add_scalar("train/loss", 1 / (step + 1), step)
        if step % 2:
            for _ in range(5):
                writer.add_scalar("val/batch", batches, batches)
                batches += 1
            writer.add_scalar("val/loss", 1 / step, step)
    writer.close()
    """
    program(textwrap.dedent(text), work(run))
    lines = merged_steps(taken_over(run))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == pytest.approx([1 / step for step in range(1, 7)])
    assert [line.get("eval_loss") for line in lines[3:]] == pytest.approx([1 / 3, None, 1 / 5])
    assert lines[5]["eval_batch"] == 14


def event(step: int, value: float) -> bytes:
    """A record of an event file: the scalar `loss`."""
    scalar = b"\x0a\x04loss\x15" + struct.pack("<f", value)
    summary = bytes([0x0A, len(scalar)]) + scalar
    message = bytes([0x10, step, 0x2A, len(summary)]) + summary
    return struct.pack("<QI", len(message), 0) + message + bytes(4)


def test_event_files_of_another_process_in_the_same_folder_are_not_read(run: RunDir) -> None:
    def write(process: int, *steps: int) -> None:
        name = f"events.out.tfevents.17642000{steps[0]:02d}.a.host.{process}.0"
        (work(run) / name).write_bytes(b"".join(event(step, process) for step in steps))

    write(41, 1, 2)
    source = Source(run, work(run), LONG_AGO)
    read = [reading.step for reading in source.read()[1]]
    write(42, 3, 4, 5)
    write(41, 6, 7)
    read += [reading.step for reading in source.read()[1]]
    assert read == [1, 2, 6, 7]


def test_a_damaged_record_costs_no_other_one(run: RunDir) -> None:
    damaged = struct.pack("<QI", 9, 0) + b"\xff" * 13
    (work(run) / "events.out.tfevents.1").write_bytes(event(1, 3.0) + damaged + event(2, 2.0) + b"\1\0")
    with open(work(run) / "events.out.tfevents.0", "wb") as zeros:
        zeros.truncate(2**33)
    assert [(line["step"], line["loss"]) for line in taken_over(run)] == [(1, 3.0), (2, 2.0)]


@needs("lightning")
def test_the_file_of_lightnings_csv_logger_is_read_while_it_grows_and_gets_columns(run: RunDir) -> None:
    from lightning.pytorch.loggers import CSVLogger

    source = Source(run, work(run), LONG_AGO)
    logger = CSVLogger(work(run))
    read = []
    for metrics, step in (
        ({"train_loss": 3.0, "epoch": 0}, 0),
        ({"train_loss": 2.0, "epoch": 0}, 1),
        ({"val_loss": 2.5, "epoch": 0}, 1),  # a new column: the file is written again
        ({"train_loss": 1.0, "epoch": 1}, 2),
    ):
        logger.log_metrics(metrics, step)
        logger.save()
        read.append([(one.step + 1 - one.first, dict(one.metrics)) for one in source.read(search=True)[1]])
    assert read == [
        [(1, {"train_loss": 3.0, "epoch": 0.0})],
        [(2, {"train_loss": 2.0, "epoch": 0.0})],
        [(2, {"val_loss": 2.5, "epoch": 0.0})],
        [(3, {"train_loss": 1.0, "epoch": 1.0})],
    ]


@needs("lightning", "tensorboard")
@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_the_batches_of_lightnings_evaluations_are_no_steps(run: RunDir, kind: str) -> None:
    """`self.log("val_loss", loss, on_step=True, on_epoch=True)`, as the Trainer calls its loggers."""
    from lightning.pytorch import loggers

    logger = getattr(loggers, kind)(work(run))
    batches = 0
    for epoch in (0, 1):
        for step in (2 * epoch, 2 * epoch + 1):
            logger.log_metrics({"train_loss": 1 / (step + 1), "epoch": epoch}, step)
        for _ in range(9):
            logger.log_metrics({"val_loss_step": 5.0}, batches)
            batches += 1
        logger.log_metrics({"val_loss_epoch": 4.0 - epoch, "epoch": epoch}, 2 * epoch + 1)
    logger.save()
    logger.finalize("success")
    lines = merged_steps(taken_over(run))
    assert [(line["step"], line["loss"]) for line in lines] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)
    ]  # fmt: skip
    assert [line.get("eval_loss_epoch") for line in lines] == [None, 4.0, None, 3.0]
    assert sum(line.get("samples", 0) for line in lines) == 3 * 16


def save_state(run: RunDir, *steps: int) -> None:
    from transformers import TrainerState

    folder = run.checkpoints / f"checkpoint-{steps[-1]}"
    folder.mkdir(parents=True, exist_ok=True)
    line = {"learning_rate": 0.1, "epoch": 1.0, "train_runtime": 1.0}  # the time with counted tokens only
    history = [{"loss": 1 / step, "step": step, **line} for step in steps]
    history.append({"train_runtime": 1.0, "train_loss": 9.0, "step": steps[-1]})
    state = TrainerState(global_step=steps[-1], max_steps=40, log_history=history)
    state.save_to_json(str(folder / "trainer_state.json"))


@needs("transformers")
def test_a_trainer_that_goes_on_does_not_tell_again_what_earlier_attempts_logged(run: RunDir) -> None:
    save_state(run, 1, 2)
    save_state(run, 1, 2, 3, 4)
    first = taken_over(run)
    assert [(line["step"], line["loss"], line["steps"]) for line in first] == [
        (1, 1.0, 40), (2, 0.5, 40), (3, pytest.approx(1 / 3), 40), (4, 0.25, 40)
    ]  # fmt: skip
    for path in run.checkpoints.glob("*/*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    since = time.time() - 5.0
    save_state(run, 1, 2, 3, 4, 5)
    assert [line["step"] for line in taken_over(run, 1, since)] == [5], "from checkpoint-4"
    for path in run.checkpoints.glob("*/*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    save_state(run, 1, 2)
    assert [line["step"] for line in taken_over(run, 2, since)] == [1, 2], "from the beginning"


@needs("transformers")
def test_a_trainer_that_keeps_one_checkpoint_does_not_tell_again_either(run: RunDir) -> None:
    save_state(run, 1, 2, 3, 4)
    for path in run.checkpoints.glob("*/*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    follower = FrameworkLogs(run, 1, work(run), time.time() - 5.0, {})
    wait_for(lambda: follower.searched, "first search")
    save_state(run, 1, 2, 3, 4, 5, 6)
    shutil.rmtree(run.checkpoints / "checkpoint-4")  # save_total_limit=1
    follower.close()
    assert [line["step"] for line in run.read_metrics()] == [5, 6]


def rows(folder: Path, *steps: int) -> Path:
    """Write what CSVLogger would."""
    path = folder / "lightning_logs" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["epoch,step,train_loss", *(f"0,{step - 1},{1 / step}" for step in steps)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_one_log_is_followed_and_none_once_the_script_calls_launcher_log(run: RunDir) -> None:
    rows(run.path / "one", 1, 2)
    rows(work(run), 1, 2)
    follower = FrameworkLogs(run, 0, work(run), LONG_AGO, {})
    wait_for(lambda: len(run.read_metrics()) == 2, "lines while the run goes on")
    append_json(run.metrics, {"time": "2026-11-26T00:00:00", "attempt": 0, "step": 3, "seconds": 1.0})
    rows(run.path / "one", 1, 2, 3, 4)
    follower.close()
    assert [(line["step"], line.get("from")) for line in run.read_metrics()] == [
        (1, "lightning"), (2, "lightning"), (3, None)
    ]  # fmt: skip


def test_a_text_in_a_row_costs_no_number(run: RunDir) -> None:
    (work(run) / "metrics.csv").write_text(
        "epoch,step,train_loss,note\n0,0,1.5,\n0,1,1.0,warm restart\n,2,,end\n"
    )
    assert [(line["step"], line["loss"]) for line in taken_over(run)] == [(1, 1.5), (2, 1.0)]
    assert not any("note" in line for line in run.read_metrics())


def test_a_secret_is_masked_in_the_names_of_a_framework(run: RunDir) -> None:
    path = work(run) / "lightning_logs" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("epoch,step,hunter2-hunter2\n0,0,1.5\n")
    FrameworkLogs(run, 0, work(run), LONG_AGO, {"LAUNCHER_SECRETS": "KEY", "KEY": "hunter2-hunter2"}).close()
    assert [line["***"] for line in run.read_metrics()] == [1.5]


def test_times_that_a_log_does_not_tell_are_spread_and_the_first_ones_are_no_speed(run: RunDir) -> None:
    rows(run.path, 1, 2)
    began = time.time()
    follower = FrameworkLogs(run, 0, work(run), began - 1.0, {})
    wait_for(lambda: len(run.read_metrics()) == 2, "first lines")
    rows(run.path, 1, 2, 3, 4)
    follower.close()
    lines = run.read_metrics()
    assert [line["seconds"] > 0 for line in lines] == [False, False, True, True]
    assert lines[2]["seconds"] == pytest.approx(lines[3]["seconds"], abs=1e-5)
    assert [line["time"] for line in lines] == sorted({line["time"] for line in lines})


def test_a_log_in_a_working_folder_of_two_runs_at_once_is_not_read(run: RunDir) -> None:
    rows(work(run), 1, 2)
    other = RunDir(run.path.parent / "other")
    other.path.mkdir()
    replace_json(other.run, {"workdir": str(work(run))})
    other.attempt(0).path.mkdir(parents=True)
    replace_json(other.state, {"state": "submitted"})
    with supervisor_lock(other):
        assert [line["step"] for line in taken_over(run)] == [1, 2], "the other run waits for its turn"
        replace_json(other.state, {"state": "running"})
        assert taken_over(run) == []
        rows(run.path, 1)
        assert [line["step"] for line in taken_over(run)] == [1], "its own directory is not shared"
    (run.path / "lightning_logs" / "version_0" / "metrics.csv").unlink()
    assert taken_over(run) == [], "the other run has ended, but trained at the same time"
    for path in (other.supervisor_lock, other.state):
        os.utime(path, (LONG_AGO - 1, LONG_AGO - 1))
    assert [line["step"] for line in taken_over(run)] == [1, 2], "the other run ended before"
    replace_json(other.run, {"workdir": str(work(run) / "lightning_logs")})
    with supervisor_lock(other):
        assert taken_over(run) == [], "a folder below the run's own"
        (work(run) / "metrics.csv").write_text("step,loss\n1,0.5\n")
        assert [line["loss"] for line in taken_over(run)] == [0.5]


@needs("tensorboard")
def test_a_log_in_a_shared_working_folder_is_read_if_a_process_of_this_run_writes_it(run: RunDir) -> None:
    other = RunDir(run.path.parent / "other")
    other.attempt(0).path.mkdir(parents=True)
    replace_json(other.run, {"workdir": str(work(run))})
    replace_json(other.state, {"state": "running"})
    marks = {"LAUNCHER_RUN_DIR": str(run.path), "LAUNCHER_ATTEMPT": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(work(run) / "ours")],
        env=os.environ | marks,
        stdin=subprocess.PIPE,
    ) as ours:
        wait_for(lambda: [one for one in work(run).glob("ours/events*") if one.stat().st_size > 100], "a log")
        (work(run) / "theirs").mkdir()
        [log] = work(run).glob("ours/events*")
        shutil.copy(log, work(run) / "theirs" / log.name.replace(f".{ours.pid}.", ".1."))
        follower = FrameworkLogs(run, 0, work(run), LONG_AGO, {})
        wait_for(lambda: len(run.read_metrics()) == 2, "its steps")
        assert ours.stdin is not None
        ours.stdin.close()
    follower.close()
    assert [line["step"] for line in run.read_metrics()] == [1, 2]


WRITER = """
import sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(sys.argv[1])
for step in (1, 2):
    value = Summary.Value(tag="loss", simple_value=1 / step)
    writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=[value])))
writer.flush()
sys.stdin.read()
"""


def test_logs_that_are_damaged_or_of_another_kind_change_nothing(run: RunDir) -> None:
    at = run.path
    (at / "metrics.csv").write_text("name,value\nx,1\n")
    (at / "run-a.wandb").write_bytes(b"no log")
    (at / "run-b.wandb").write_bytes(b":W&B\0\0\0" + b"\0\0\0\0\5\0\1" + b"\xff" * 5)
    (at / "events.out.tfevents.1").write_bytes(struct.pack("<QI", 2**60, 0) + b"x" * 99)
    (at / "events.out.tfevents.2").write_bytes(struct.pack("<QI", 9, 0) + b"\xff" * 13)
    (at / "trainer_state.json").write_text('{"log_history": [1, {"step": "x"}, {"step": -3, "loss": 1}]}')
    os.mkfifo(at / "run-c.wandb")
    assert taken_over(run) == []
    huge = {"step": 1, "loss": 10**400, "time": 5, "attempt": 7, "ok": 1, "flag": True, "text": "x"}
    (at / "trainer_state.json").write_text(json.dumps({"log_history": [huge]}))
    [line] = taken_over(run)
    assert (line["step"], line["attempt"], line["loss"], line["ok"]) == (1, 0, None, 1)
    assert "flag" not in line and "text" not in line and isinstance(line["time"], str)


def test_a_search_leaves_out_other_runs_environments_and_what_is_old_or_too_deep(tmp_path: Path) -> None:
    def file(*folders: str) -> Path:
        path = tmp_path.joinpath(*folders, "metrics.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    expected = {file("out"), file("a", "b", "c", "d", "e", "f")}
    file(*"abcdefg"), file(".hidden"), file("env", "lib"), file("runs", "one", "x")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "runs" / "one" / "run.json").touch()
    os.utime(file("old"), (LONG_AGO, LONG_AGO))
    (tmp_path / "out" / "loop").symlink_to(tmp_path)
    assert set(files_named({"metrics.csv": time.time() - 3600}, tmp_path)) == expected


@pytest.mark.slow
@needs("transformers", "accelerate", "tensorboard", "wandb")
@pytest.mark.parametrize("to", ["tensorboard wandb", "wandb", "none"])
def test_a_trainer_without_any_change(lab: Lab, to: str) -> None:
    lines = _trained(lab, NET + TRANSFORMERS, {"TO": to, "STEPS": "8"})
    assert {line["from"] for line in lines} == {"transformers" if to == "none" else to.split()[0]}
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert all({"loss", "lr", "grad_norm"} <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8]
    [state] = lab.folder.glob("runs/*/checkpoints/checkpoint-8/trainer_state.json")
    history = json.loads(state.read_text())["log_history"]
    logged = [entry["loss"] for entry in history if "loss" in entry]
    assert [line["loss"] for line in lines] == pytest.approx(logged, rel=1e-6), "TensorBoard has 32 bits"


@pytest.mark.slow
@needs("lightning", "tensorboard", "wandb")
@pytest.mark.parametrize(
    ("to", "kind"),
    [
        ("CSVLogger('.')", "lightning"),
        ("TensorBoardLogger('.')", "tensorboard"),
        ("WandbLogger(offline=True)", "wandb"),
    ],
)
def test_lightning_without_any_change(lab: Lab, to: str, kind: str) -> None:
    lines = _trained(lab, NET + LIGHTNING, {"TO": to})
    assert {line["from"] for line in lines} == {kind}
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8]
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8]


def _trained(lab: Lab, script: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    """Run a script as a job of one rank, and return the steps of its metrics."""
    lab.script(script)
    job = lab.job(
        command="python train.py",
        recipe=None,
        steps=8,
        resources={"gpus_per_node": 0, "ranks_per_node": 1},
        env={**environ, "WANDB_MODE": "offline"},
    )
    done = lab.cli("run", str(job), "-c", "local")
    run = lab.newest()
    assert done.returncode == 0, done.stderr + lab.all_logs(run)
    status = lab.status(run)
    assert (status["step"], status["steps"]) == (8, 8)
    return merged_steps(run.read_metrics())


def test_a_log_that_cannot_be_read_to_its_end_holds_up_no_rank(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(work(run) / "metrics.csv")
    assert list(files_named({"metrics.csv": LONG_AGO}, work(run))) == []
    go = threading.Event()
    monkeypatch.setattr(Source, "read", lambda *_, **__: (go.wait(), ()))
    monkeypatch.setattr(follower, "CLOSING_SECONDS", 0.1)
    FrameworkLogs(run, 0, work(run), LONG_AGO, {}).close()
    go.set()
