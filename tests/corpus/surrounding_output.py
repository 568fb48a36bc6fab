"""What stands around a failure in real outputs: heads before it, tails after it, what a collector adds to each
line. None of it is a failure."""

from __future__ import annotations

import json
from collections.abc import Callable

WANDB = """\
wandb: Waiting for W&B process to finish... (failed 1). Press Control-C to abort syncing.
wandb: - 0.012 MB of 0.012 MB uploaded (0.000 MB deduped)
wandb: \\ 0.012 MB of 0.031 MB uploaded (0.000 MB deduped)
wandb:
wandb: Run history:
wandb:         epoch ▁▁▁▁▂▂▂▂▃▃▃▃▅▅▅▅▆▆▆▆▇▇▇▇██
wandb:    train/loss █▇▆▅▅▄▄▃▃▃▂▂▂▂▁▁▁▁▁▁
wandb:      train/lr ▁▂▃▄▅▆▇███▇▆▅▄▃▂▁
wandb: train/samples ▁▂▃▄▅▆▇█
wandb:
wandb: Run summary:
wandb:         epoch 3
wandb:    train/loss 2.31415
wandb:      train/lr 0.0003
wandb: train/samples 4096
wandb:
wandb: You can sync this run to the cloud by running:
wandb: wandb sync /work/wandb/offline-run-20240312_101112-ab12cd34
wandb: Find logs at: ./wandb/offline-run-20240312_101112-ab12cd34/logs
wandb: Synced 6 W&B file(s), 0 media file(s), 2 artifact file(s) and 0 other file(s)
wandb: View run brisk-sun-12 at: https://wandb.ai/me/llm/runs/ab12cd34
wandb: View project at: https://wandb.ai/me/llm
wandb: Rotating log file
wandb: WARNING The wandb process is still uploading
wandb: Done."""

IGNORED = """\
Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f2b1c0d5e50>
Traceback (most recent call last):
  File "/opt/conda/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line 1478, in __del__
    self._shutdown_workers()
  File "/opt/conda/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line 1442, in _shutdown_workers
    if w.is_alive():
  File "/opt/conda/lib/python3.10/multiprocessing/process.py", line 160, in is_alive
    assert self._parent_pid == os.getpid(), 'can only test a child process'
AssertionError: can only test a child process"""

THREAD = """\
Exception in thread Thread-3 (_monitor):
Traceback (most recent call last):
  File "/opt/conda/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/opt/conda/lib/python3.11/socket.py", line 706, in readinto
    return self._sock.recv_into(b)
ConnectionResetError: [Errno 104] Connection reset by peer"""

ATEXIT = """\
Error in atexit._run_exitfuncs:
Traceback (most recent call last):
  File "/opt/conda/lib/python3.10/site-packages/wandb/sdk/lib/exit_hooks.py", line 36, in exit
    self.hook()
  File "/opt/conda/lib/python3.10/multiprocessing/connection.py", line 368, in _send
    n = write(self._handle, buf)
BrokenPipeError: [Errno 32] Broken pipe"""

DESTRUCTOR = """\
[rank0]:[W312 10:11:12.131415926 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not \
called before program exit, which can leak resources. For more info, please see \
https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())"""

TRACKER = """\
/opt/conda/lib/python3.10/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear \
to be 6 leaked semaphore objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '"""

TORCHRUN = """\
W0312 10:11:13.141592 139 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 141 closing signal SIGTERM
E0312 10:11:14.151617 139 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 142) of binary: /opt/conda/bin/python
Traceback (most recent call last):
  File "/opt/conda/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/conda/lib/python3.10/site-packages/torch/distributed/launcher/api.py", line 264, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2024-03-12_10:11:13
  host      : node-3
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 142)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""

LIGHTNING = """\
[rank: 1] Child process with PID 4711 terminated with code 1. Forcefully terminating all other processes to avoid zombies
Epoch 0:  12%|█▏        | 12/100 [00:03<00:22,  3.98it/s, v_num=3, train_loss=2.310]
Attempting graceful shutdown ..."""

TRAINER = """\
 12%|█▏        | 12/100 [00:03<00:22,  3.98it/s]
{'train_runtime': 3.1415, 'train_samples_per_second': 12.3, 'train_steps_per_second': 1.2, 'epoch': 0.12}
  0%|          | 0/100 [00:00<?, ?it/s]"""

TENSORBOARD = """\
2024-03-12 10:11:12.131415: I tensorflow/core/platform/cpu_feature_guard.cc:182] This TensorFlow binary is optimized
TensorBoard 2.16.2 at http://localhost:6006/ (Press CTRL+C to quit)
closing events.out.tfevents.1710238272.node-3.141.0"""

SRUN = """\
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: node-3: task 1: Exited with exit code 1
srun: Terminating StepId=4711.0"""

SLOW = "\n".join(
    f"record {number}: written 4096 bytes to shard-{number % 64:05d}" for number in range(10_000)
)

PROSE = "\n".join(
    f"sample {number}: the {('red', 'old', 'tall')[number % 3]} house by the lake has {number % 17} windows"
    for number in range(200)
)

STARTED = """\
The following values were not passed to `accelerate launch` and had defaults used instead:
	`--num_processes` was set to a value of `2`
[2024-03-12 10:11:12,131] [INFO] [real_accelerator.py:191:get_accelerator] Setting ds_accelerator to cuda (auto detect)
/opt/conda/lib/python3.10/site-packages/torch/utils/checkpoint.py:464: UserWarning: torch.utils.checkpoint: the \
use_reentrant parameter should be passed explicitly. To save memory, use_reentrant=False is recommended.
NCCL version 2.20.5+cuda12.4
trainable params: 6,742,609,920 || all params: 6,742,609,920 || trainable%: 100.0"""

STEPS = "\n".join(
    f"step {number} loss {3 - number / 100:.3f} lr 3.0e-04 mem 38.2 GiB" for number in range(1, 60)
)

GPUS = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   31C    P0             62W /  400W |     423MiB /  81920MiB |      0%      Default |
+-----------------------------------------------------------------------------------------+"""

SETUP = """\
Loading cuda/12.4
  Loading requirement: gcc/12.2.0
Collecting environment information...
PyTorch version: 2.4.0+cu124
OS: Ubuntu 22.04.4 LTS (x86_64)"""

BATCH_FINDER = """\
Batch size 64 failed, trying batch size 32: CUDA out of memory. Tried to allocate 4.00 GiB. Skipping.
Batch size 32 succeeded
step 1 loss 3.101 lr 3.0e-04
step 2 loss 2.992 lr 3.0e-04
step 3 loss 2.911 lr 3.0e-04"""

HUB_RETRY = """\
'(MaxRetryError("HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded"), '(Request ID: 1)')' \
thrown while requesting HEAD https://huggingface.co/gpt2/resolve/main/config.json
Retrying in 1s [Retry 1/5].
step 1 loss 3.101 lr 3.0e-04
step 2 loss 2.992 lr 3.0e-04"""

TAILS = {
    "wandb": WANDB,
    "exception ignored": IGNORED,
    "thread": THREAD,
    "atexit": ATEXIT,
    "NCCL destructor": DESTRUCTOR,
    "resource tracker": TRACKER,
    "torchrun": TORCHRUN,
    "Lightning": LIGHTNING,
    "Trainer": TRAINER,
    "tensorboard": TENSORBOARD,
    "srun": SRUN,
    "10,000 lines": SLOW,
    "prose": PROSE,
}
HEADS = {
    "started": STARTED,
    "steps": STEPS,
    "nvidia-smi": GPUS,
    "modules": SETUP,
    "batch-size finder": BATCH_FINDER,
    "download retried": HUB_RETRY,
    "prose": PROSE,
}


def _json(**record: str) -> str:
    return json.dumps(record)


AT = "2024-03-12T10:11:12.131313131Z"
COLLECTORS: dict[str, Callable[[str], str]] = {
    "Kubernetes on the node": lambda line: f"{AT} stderr F {line}",  # CRI's logging format
    "kubectl --timestamps": lambda line: f"{AT} {line}",
    "kubectl --prefix": lambda line: f"[pod/train-worker-0/pytorch] {line}",
    "kubectl --prefix --timestamps": lambda line: f"[pod/train-worker-0/pytorch] {AT} {line}",
    "Docker's json-file": lambda line: _json(log=f"{line}\n", stream="stderr", time=AT),
    "docker compose": lambda line: f"trainer-1  | {line}",
    "docker-compose": lambda line: f"trainer_1  | {line}",
    "docker service logs": lambda line: f"ml_trainer.1.k3j2h1@node1    | {line}",
    "Google Cloud": lambda line: _json(textPayload=line, severity="ERROR", timestamp=AT),
    "a logger of JSON": lambda line: _json(message=line, timestamp=AT),
    "a logger of JSON, on the node of Kubernetes": lambda line: (
        f"{AT} stderr F {_json(message=line, timestamp=AT)}"
    ),
    "CloudWatch": lambda line: f"2024-03-12T10:11:12.131Z\t{line}",
    "GitLab": lambda line: f"2024-03-12T10:11:12.131313Z 01E {line}",
    "journalctl": lambda line: f"Mar 12 10:11:12 node17 python[4711]: {line}",
    "journalctl -o short-iso": lambda line: f"2024-03-12T10:11:12+0000 node17 python[4711]: {line}",
    "srun -l": lambda line: f"3: {line}",
    "mpirun --tag-output": lambda line: f"[1,3]<stderr>:{line}",
    "mpirun --timestamp-output": lambda line: f"Tue Mar 12 10:11:12 2024[1,3]<stderr>:{line}",
    "torchrun --tee": lambda line: f"[default3]:{line}",
    "Ray": lambda line: f"(RayTrainWorker pid=7, ip=10.0.0.3) {line}",
    "pdsh": lambda line: f"worker-0: {line}",
    "ts %.s": lambda line: f"1710238272.131313 {line}",
}
"What a collector makes of a line."
