"""Outputs that have misled a judge: each stands before or after a failure that is the true cause."""

from __future__ import annotations

import pytest
from benchmarks.verdicts import judged

from launcher.diagnosis.cause import Candidate, cause_of, clue_of_exception, clues_of_text
from launcher.diagnosis.clue import CLASS_OF
from launcher.diagnosis.collector import MAX_TEXT, Collector

HEAD = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    step()\n'
KEY = f"{HEAD}KeyError: 'labels'"
OOM = f"{HEAD}RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"


NCCL_FAILED = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)


def bars(*shares: int) -> str:
    drawn = (f"{'█' * (one // 10)}{' ' * (10 - one // 10)}| {one}/100" for one in shares)
    return "\n".join(
        f"{one}%|{bar} [00:0{one // 10}<00:22, 3.98it/s, loss=2.{one}]"
        for one, bar in zip(shares, drawn, strict=True)
    )


@pytest.mark.parametrize(
    "before",
    [
        "except torch.cuda.OutOfMemoryError:",
        "    except MemoryError:",
        "bs 64: CUDA out of memory.\nbs 32: ok",
        "allocating 12.0 GiB of pinned host memory",
        "Tip: insufficient shared memory can be raised with --shm-size",
        "malloc arena trim failed at tick 3",
        "java.lang.OutOfMemoryError handler installed",
        "spill_over memory limit: 0.7",
        "Watching for OOMKilled pods",
        "1342177280 bytes of device memory",
        "This script handles CUDA out of memory.",
        "--auto-batch  start high and halve on CUDA out of memory",
        "* CUDA out of memory: use --fp16",
        "oom_patterns: ['CUDA out of memory']",
        "match_rtol: 0.001",
        "Sequence group 145 is preempted by PreemptionMode.RECOMPUTE",
        "Spot instance termination handler installed",
        "cache: 12 entries Evicted",
        "Registered handlers for SIGINT and SIGTERM",
        "SRAM Uncorrectable ECC : 0",
        "NVLink error counters: 0",
        "dataset: /data/imagenet.squashfs",
        "Loss scale reached 65536",
        "LoRA rank 16 mismatch",
        "disk full: no",
        "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer",
        "mce: [Hardware Error]: corrected error, no action required",
        "hardware errors: 0",
        "GPU reset is not supported on this device",
        "amdgpu: GPU recovery disabled.",
        "failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "No GPU found, using the CPU",
        "No GPUs detected: falling back to CPU",
        "  DiskPressure     False   Mon, 01 Jan 2024 10:00:00   KubeletHasNoDiskPressure   kubelet has no disk pressure",
        "Port 6006 is in use, trying port 6007",
        "Address already in use: using 7861 instead",
        "loss scale 0.5",
        "loss scale: 0.03125",
        "loss is nan, skipping batch",
        "max time limit: 4:00:00",
        "time_limit: 3600",
        "TIMEOUT=3600",
        "NCCL_TIMEOUT 1800",
        "ProcessGroupNCCL initialization options: size: 2, global rank: 0, TIMEOUT(ms): 600000, USE_HIGH_PRIORITY_STREAM: 0",
        "HeartbeatMonitor started",
        "Heartbeat monitor is enabled",
        "Spot instance price: 1.20",
        "Cache block 17 was evicted",
        "request 12 was preempted by the scheduler, 3 blocks recomputed",
        "Preempting sequence group 3",
        "using different seeds across workers",
        "shards differ across ranks by design: sharding the dataset",
        "nvidia-container-cli version 1.14.3",
        "license: apache-2.0",
        "Not enough space on 0 to put model.layers.7 (space available 812, module size 912).",
        "XPU native library not loaded; using triton fallback.",
        "clip_grad: norm_type must be a positive number or inf, got 2",
        "license server: 27000@host",
        "Please cite this work and read the LICENSE file",
        "Press Ctrl+C to stop",
        "Ctrl-C handler installed",
        "signal handlers: SIGINT, SIGTERM",
        "watchdog: enabled, timeout 600 s",
        "NCCL timeout: 1800 s",
        "retries: 3 times if the worker was OOM-killed",
        "job timeout: 4 h",
        "interrupted runs can be resumed with --resume",
        "cancelled: 0, failed: 0",
        "Insufficient memory to use tactic 3, skipping tactic",
        "[TRT] [W] UNSUPPORTED_STATESkipping tactic 2 due to insufficient memory on requested size of 132096 detected",
        "GPU memory is not enough for batch 64? then lower it",
        "If the GPU runs out of memory, lower the batch size",
        "free disk space: 12 GiB",
        "the job has 4 hours of requested time",
        "max_restarts reached: no",
        "retry_on: ['No space left on device', 'OOMKilled']",
        "0 hosts unreachable",
        "exit code 0",
        "XID filter: off",
        "GPU 0 XID errors: 0",
        "no Xid errors found",
        "ECC errors: 0",
        "uncorrectable ECC errors: 0",
        "rank 0: 12 samples, rank 1: 13 samples",
        "checkpoint has 12 params",
        "Running on 2 GPUs that must be of the same type on all nodes",
        "Java heap space: 4g",
        "memory_limit: 64GB",
        "memory: 12% of 64 GiB",
        "preemption: enabled",
        "grad_norm is not finite at step 3, step skipped",
        "outputs: {'nan_count': 0}",
        "accept: text/html",
        f"{OOM}\n{bars(10, 20, 30)}",
        f"{OOM}\n{{'loss': 2.3, 'epoch': 1.1}}\n{{'loss': 2.2, 'epoch': 1.2}}",
        f"{OOM}\n iteration       10/     100 | lm loss: 2.3\n iteration       20/     100 | lm loss: 2.2",
    ],
)
def test_what_comes_before_an_exception_is_not_its_cause(before: str) -> None:
    assert judged(f"{before}\n{KEY}") == ("user-error", "likely")


@pytest.mark.parametrize(
    "after",
    [
        "Run with --resume to continue from the last checkpoint",
        "wandb: Network error, entering retry loop",
        "Skipping final evaluation",
        "No checkpoint could be recovered, exiting",
        "Writing model shards:  10%|█ | 1/10 [00:01<00:09, 1.0it/s]\nWriting model shards:  20%|██ | 2/10 [00:02<00:08, 1.0it/s]",
        "Epoch 3 finished with errors",
        "step 40 took 3.2 s",
        "slurmstepd: error: *** STEP 4857.0 ON n1 CANCELLED AT 2024-01-01T00:00:00 ***",
    ],
)
def test_what_comes_after_memory_ran_out_changes_nothing(after: str) -> None:
    assert judged(f"{OOM}\n{after}") == ("gpu-oom", "likely")


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("RuntimeError: CUDA out of memory. Please reduce the batch size and rerun.", "gpu-oom"),
        ("ValueError: No executable batch size found, reached zero.", "gpu-oom"),
        ("CUDA out of memory occurred when warming up sampler with 256 dummy requests", "gpu-oom"),
        (f"{'x' * 70000} CUDA out of memory. Tried to allocate 2 GiB", "gpu-oom"),
        ("WARNING - step failed: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-oom"),
        ("[rank3]: CUDA out of memory. Tried to allocate 2 GiB\n[rank0]: step 1 loss 2\n[rank0]: step 2 loss 1", "gpu-oom"),
        ("Watchdog caught collective operation timeout\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2024-01-01 ***", "nccl-timeout"),
        ("MeanAbsoluteError: 0.312\nWatchdog caught collective operation timeout: WorkNCCL(", "nccl-timeout"),
        (f"{HEAD}FileNotFoundError: [Errno 2] No such file or directory: 'x'", "user-error"),
        (f"{HEAD}ValueError: cannot skip 100 batches; continue with --force", "user-error"),
        (f"{HEAD}ValueError: Invalid option: foo", "user-error"),
        (f"{HEAD}AssertionError: No inf checks were recorded for this optimizer.", "user-error"),  # GradScaler
        (f"{HEAD}RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.", "user-error"),
        (f"{HEAD}OSError: [Errno 5] Input/output error: '/data/a.jpg'", "node-failed"),
        (f"{HEAD}OSError: [Errno 5] Input/output error", "node-failed"),
        (f"{HEAD}    print(loss)\nOSError: [Errno 5] Input/output error", "user-error"),  # into a closed terminal
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "user-error"),
        ("sbatch: error: Batch job submission failed: Unspecified error", "user-error"),
        (f"{HEAD}RuntimeError: Backend nccl does not support monitoredBarrier, only GLOO supports monitored barrier.", "user-error"),
        (f"{HEAD}wandb.errors.UsageError: Unable to resolve W&B project me/llm.", "user-error"),
        ("n1:98:126 [3] init.cc:9 NCCL WARN Mismatched NCCL version detected : rank 0 version 22605 rank 1 version 22703", "image-error"),
        ("n1:98:126 [3] init.cc:9 NCCL WARN CUDA Driver version found is 470. Minimum requirement is 525", "node-failed"),
        ("n1:98:126 [3] misc/nvmlwrap.cc:9 NCCL WARN nvmlDeviceGetHandleByIndex(3) failed: Unknown Error", "node-failed"),
        ("n1:98:126 [3] init.cc:9 NCCL WARN Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1", "user-error"),
        ("n1:98:126 [3] alloc.h:9 NCCL WARN Failed to malloc 4194304 bytes", "host-oom"),
        ("n1:98:126 [3] net_ib.cc:9 NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: GID table change(18)", "nccl-timeout"),
        (f"{NCCL_FAILED}Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 1 'invalid argument'.\nThis is usually caused by a system or configuration error in the Fabric Manager or NVSwitches.", "node-failed"),
        ("E xla/coordination_service.cc:1170] /task:0 has been set to ERROR in coordination service: UNAVAILABLE: Task /task:0 heartbeat timeout. The remote task has failed, got preempted, or crashed.", "nccl-timeout"),
        ("FATAL:   container creation failed: mount error: can't mount image /proc/self/fd/9", "image-error"),
        ("FATAL:   could not open image /data/x.sif: failed to retrieve path", "image-error"),
        ('message: "The replica workerpool0-0 exited with a non-zero status of 128. Termination log message: failed to create containerd task: failed"', "image-error"),
        ("  message: 'OOM when allocating tensor with shape[8,8]'", "gpu-oom"),
        (f"{HEAD}tensorflow.python.framework.errors_impl.ResourceExhaustedError: log/m/model-1200.data-00000-of-00001.tempstate17", "disk-full"),
        (f"{HEAD}tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with shape[8,8]", "gpu-oom"),
        ("[rank4]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 4] Timeout at NCCL work: 70426, last enqueued NCCL work: 70426", "nccl-timeout"),
        ("Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html. Consider provisioning more memory on this node", "host-oom"),
        (f"{HEAD}RuntimeError: disagreement between rank0 and rank3: rank0: [1, 2], rank3: [1, 3]", "desync"),
        ("[14:49:15] /opt/dgl/src/rpc/network/tcp_socket.cc:76: Failed bind on 10.1.2.3:34567 , error: Success", "rendezvous-failed"),
        (f"{HEAD}OSError: 25165824 requested and 4194304 written", "disk-full"),  # numpy's tofile
        ("luajit: torch/File.lua:210: write error: wrote 39776036 blocks instead of 41251350 at THDiskFile.c:340", "disk-full"),
        (f"{HEAD}RuntimeError: grad_scale is too small, exiting: 5.96e-08", "numerical"),
        ("pdsh@node0: node1: ssh exited with exit code 255", "rendezvous-failed"),
        ("[Error] [carb.graphics-vulkan.plugin] VkResult: ERROR_OUT_OF_DEVICE_MEMORY", "gpu-oom"),
        ("ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory", "gpu-oom"),
        ("job info: This job was terminated because it used more memory than it was allocated.", "host-oom"),
        ("Your notebook tried to allocate more memory than is available. It has restarted.", "host-oom"),
        ("fatal error: out of memory allocating heap arena map", "host-oom"),
        ("Error response from daemon: failed to resolve reference \"docker.io/x:1\": not found", "image-error"),
        ("Your session crashed after using all available RAM.", "host-oom"),
        ("The job running on agent Azure Pipelines 2 ran longer than the maximum time of 60 minutes. The operation was canceled.", "time-limit"),
        ("The error from device(chipId:5, dieId:0), serial number is 17, hccl fftsplus task timeout occurred during task execution, stream_id:7", "nccl-timeout"),
        ("Error while calling cudaMalloc(&workspace, workspace_size_in_bytes) in file dlib/dnn/cudnn_dlibapi.cpp:888. code: 2, reason: out of memory", "gpu-oom"),
        ("Exception in main training loop: out of memory to allocate 747110400 bytes (total 5722942464 bytes)", "gpu-oom"),
        ("Exception in main training loop: Out of memory allocating 25,600,000 bytes (allocated so far: 3,635,267,072 bytes).", "gpu-oom"),
    ],
)  # fmt: skip
def test_these_are_what_they_say(text: str, failure: str) -> None:
    assert judged(text) == (failure, "likely")


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        ("out of memory", "gpu-oom"),
        ("initialization error", "node-failed"),
        ("unknown error", "node-failed"),
        ("unspecified launch failure", "node-failed"),
        ("uncorrectable ECC error encountered", "node-failed"),
        ("API call is not supported in the installed CUDA driver", "node-failed"),
        ("system has unsupported display driver / cuda driver combination", "node-failed"),
        ("system not yet initialized", "node-failed"),
        ("device-side assert triggered", "user-error"),
        ("invalid device function", "user-error"),
        ("invalid resource handle", "user-error"),
        ("peer access is not supported between these two devices", "user-error"),
    ],
)
def test_an_error_of_cuda_has_one_class_whoever_reports_it(message: str, failure: str) -> None:
    """The messages are those of cudaGetErrorString."""
    watchdog = (
        "[rank1]:[E325 10:11:12.131415926 ProcessGroupNCCL.cpp:2093] [PG ID 0 PG GUID 0(default_pg) Rank 1]"
    )
    reports = (
        f"{HEAD}RuntimeError: CUDA error: {message}",
        f"{watchdog} Process group watchdog thread terminated with exception: CUDA error: {message}",
        f"n1:983:1261 [3] include/alloc.h:125 NCCL WARN Cuda failure 1 '{message}'\n{NCCL_FAILED}",
        f"{NCCL_FAILED}Cuda failure '{message}'",
        f"cuda runtime error (1) : {message} at /pytorch/aten/src/THC/THCGeneral.cpp:50",
    )
    assert [judged(report) for report in reports] == [(failure, "likely")] * len(reports)


@pytest.mark.parametrize(
    ("reason", "failure"),
    [
        ("Cuda failure 214 'uncorrectable ECC error encountered'", "node-failed"),
        ("Cuda failure 2 'out of memory'", "gpu-oom"),
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000", "user-error"),
        ("Message truncated : received 1024 bytes instead of 256", "desync"),
        ("socketPollConnect: connect to 10.0.0.4<41111> returned Connection refused", "nccl-timeout"),
        ("", "nccl-timeout"),
    ],
)
def test_a_recorded_exception_of_nccl_is_its_last_error(reason: str, failure: str) -> None:
    assert CLASS_OF[clue_of_exception(f"{NCCL_FAILED}{reason}").kind] == failure


@pytest.mark.parametrize(
    ("raised", "failure"),
    [
        ([OSError(28, "No space left on device", "/ckpt/x")], "disk-full"),
        ([KeyError("a"), OSError(5, "Input/output error")], "node-failed"),
        ([KeyError("a")], "user-error"),
    ],
)
def test_a_recorded_exception_of_a_sharded_checkpoint_is_that_of_its_ranks(
    raised: list[Exception], failure: str
) -> None:
    api = pytest.importorskip("torch.distributed.checkpoint.api")
    wrapped = {}
    for rank, error in enumerate(raised):
        try:
            raise error
        except Exception as caught:
            wrapped[rank] = api._wrap_exception(caught)
    exception = api.CheckpointException("write", wrapped)
    assert CLASS_OF[clue_of_exception(f"CheckpointException: {exception}").kind] == failure


@pytest.mark.parametrize(
    "message", ["driver shutting down", "context is destroyed", "operation not permitted"]
)
def test_cuda_that_shuts_down_explains_nothing(message: str) -> None:
    assert judged(f"{HEAD}RuntimeError: CUDA error: {message}") == ("unknown", "guess")
    terminated = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: "
    assert judged(terminated + message)[0] == "unknown"


def test_what_cuda_does_not_permit_while_it_captures_a_graph_is_the_program_s_fault() -> None:
    error = "CUDA error: operation not permitted when stream is capturing"
    assert judged(f"{HEAD}RuntimeError: {error}") == ("user-error", "likely")


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_an_xid_that_a_program_can_cause_does_not_blame_the_node(number: int) -> None:
    xid = f"NVRM: Xid (PCI:0000:06:00): {number}, pid=12, name=python, Ch 00000008"
    fault = f"{HEAD}torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert judged(xid) == ("node-failed", "guess")
    assert judged(f"{xid}\n{fault}") == ("user-error", "likely")
    assert judged(f"{xid}\nNVRM: Xid (PCI:0000:06:00): 79, pid=12\n{fault}") == ("node-failed", "likely")


def test_a_controller_of_slurm_that_does_not_answer_is_not_the_job_s_fault() -> None:
    refused = (
        "srun: error: Unable to allocate resources: Unable to contact slurm controller (connect failure)"
    )
    assert judged(refused) == ("node-failed", "certain")


def test_what_another_rank_aborts_with_is_read_inside_a_traceback() -> None:
    aborts = "terminate called after throwing an instance of 'c10::Error'"
    what = "  what():  CUDA error: an illegal memory access was encountered"
    lost = "torch.distributed.DistBackendError: remote process exited"
    first, second = HEAD.splitlines()[:2], HEAD.splitlines()[2:]
    assert judged("\n".join([aborts, *first, what, *second, lost])) == ("user-error", "likely")


def test_a_cut_traceback_of_a_worker_does_not_take_the_exception_of_the_agent() -> None:
    caught = f"{HEAD}KeyError: Caught KeyError in DataLoader worker process 0."
    original = 'Original Traceback (most recent call last):\n  File "worker.py", line 287, in _worker_loop\n    fetch()'
    agent = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 139 got signal: 15"
    assert judged(f"{caught}\n{original}\n{agent}") == ("user-error", "likely")


@pytest.mark.parametrize(
    "line",
    [
        "Device memory: 24 GiB, out of 24 GiB",
        "A job that uses more memory than requested is killed, a job is killed when it uses more memory than requested.",
        "The 7B model used more memory than the 3B model.",
        "Jobs running longer than the maximum time of 24 h are stopped.",
        "hccl buffer size: 200 MB, timeout: 120 s",
        "allocator: cudaMallocAsync (falls back to the native one, with a cache of 12 GiB, when it is out of memory)",
        "pool: 25,600,000 bytes allocated so far, out of memory of 16 GiB",
    ],
)
def test_a_program_that_is_well_prints_this(line: str) -> None:
    assert judged(line) == ("unknown", "guess")


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        ("CANCELLED AT 2026-01-01T00:00:00", "cancelled"),
        ("CANCELLED AT 2026-01-01T00:00:00 DUE TO TASK FAILURE", "unknown"),
        ("FAILED (non-zero exit code or other failure mode)", "unknown"),
        ("UNCORRECTABLE MEMORY ERROR AT 2026-01-01T00:00:00", "node-failed"),
    ],
)
def test_a_reason_that_slurm_gives_is_not_a_person_s(end: str, failure: str) -> None:
    killed = "srun: error: n2: task 0: Segmentation fault (core dumped)"
    assert judged(f"{killed}\n[2026-01-01T00:00:00.342] error: *** STEP 7.0 ON n2 {end} ***")[0] == failure


@pytest.mark.parametrize(
    "text",
    [
        "[2024-01-01 10:00:00,000] [ERROR] [launch.py:322:sigkill_handler] ['python'] exits with return code = -9",
        "Error: Process completed with exit code 1.",
        "ERROR: Job failed: exit code 1",
        "slurmstepd: error: task_p_post_term: rmdir(/dev/cpuset/slurm5) failed Device or resource busy",
    ],
)
def test_how_a_program_ended_is_not_why(text: str) -> None:
    assert judged(text) == ("unknown", "guess")


def test_a_file_system_that_evicts_its_client_is_no_preemption() -> None:
    evicted = "LustreError: 167-0: work-MDT0000-mdc: This client was evicted by work-MDT0000; in progress ..."
    assert judged(evicted) == ("node-failed", "certain")


def test_an_eviction_for_the_pod_s_own_disk_is_no_preemption() -> None:
    evicted = (
        "  Warning  Evicted  109s  kubelet  Pod ephemeral local storage usage exceeds the total limit of 5Gi."
    )
    assert judged(evicted) == ("disk-full", "certain")


@pytest.mark.parametrize("end", ["connect() timed out.", "Connection reset by peer"])
def test_ranks_that_do_not_reach_the_store_have_not_met(end: str) -> None:
    frame = '  File "/opt/torch/distributed/rendezvous.py", line 120, in _tcp_rendezvous_handler\n'
    assert judged(f"{HEAD}{frame}RuntimeError: {end}") == ("rendezvous-failed", "likely")
    assert judged(f"{HEAD}{frame}RuntimeError: No rendezvous handler for tpc://")[0] == "user-error"
    assert judged(f"{HEAD}RuntimeError: {end}")[0] != "rendezvous-failed"


def test_no_space_for_a_semaphore_is_a_full_dev_shm() -> None:
    made = f'{HEAD}  File "/py/multiprocessing/{{}}.py", line 57, in __init__\n    self._make()\n{{}}'
    full = "OSError: [Errno 28] No space left on device"
    assert judged(made.format("synchronize", full)) == ("host-oom", "likely")
    assert judged(made.format("shared_memory", full)) == ("host-oom", "likely")
    stamped = "\n".join(
        f"2024-03-12T10:11:12.131Z {line}" for line in made.format("queues", full).split("\n")
    )
    assert judged(stamped) == ("host-oom", "likely")
    boxed = "│ /py/multiprocessing/{}.py:57 in __init__ │"
    rich = f"╭─── Traceback (most recent call last) ───╮\n│ /src/t.py:3 in <module> │\n{boxed}\n╰───╯\n{full}"
    assert judged(rich.format("synchronize")) == ("host-oom", "likely")
    for other in (
        rich.format("util"),
        f'{HEAD}  File "", line 3, in <module>\n{full}',  # compile(code, "", "exec")
        made.format("util", full),
        f"{made.format('synchronize', KEY)}\n{HEAD}{full}",
        f"{HEAD}{full}",
    ):
        assert judged(other)[0] == "disk-full", other


TRACED = 'Traceback (most recent call last):\n  File "t.py", line {}, in {}\n    step()\n'
STEPS = "\n".join(f"step {number} loss {3 - number / 100:.3f}" for number in range(1, 40))
MEMORY = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
ENDED = TRACED.format(3, "<module>")
CAUGHT = TRACED.format(3, "train")


@pytest.mark.parametrize(
    "log",
    [
        f"{ENDED}{MEMORY}\n{STEPS}",
        f"step 1 loss 3.1\nstep 2 lo{ENDED}{MEMORY}\nss 3.0\n{STEPS}",
        f"{TRACED.format(9, '_run_module_as_main')}{MEMORY}\n{STEPS}",
        f"{ENDED}{MEMORY}\n{STEPS}\n{ENDED}RuntimeError: Connection closed by peer [10.0.0.7]:1",
    ],
)
def test_what_stdout_held_back_is_no_progress(log: str) -> None:
    """Python writes its stdout to a file in blocks: what is left stands after the traceback that ended it."""
    assert judged(log) == ("gpu-oom", "likely")


@pytest.mark.parametrize(
    "log",
    [
        f"{CAUGHT}{MEMORY}\n{STEPS}",
        f"{ENDED}{MEMORY}\n{bars(10, 20, 30)}",
        f"{ENDED}{MEMORY}\n2024-03-12 10:11:12 INFO step 1 loss 3\n2024-03-12 10:11:13 INFO step 2 loss 2",
        f"batch 64: {MEMORY}\n{STEPS}",
        f"{ENDED}{MEMORY}\nEpoch 0:  10%|█| 10/99 [00:01, 3.9it/s, loss=2]\nEpoch 0:  11%|█| 11/99 [00:01, 3.9it/s, loss=2]",
        f"Epoch 0: 10/99 [00:01, 3.9it/s, loss=2]{MEMORY}\nstep failed: {MEMORY}\nEpoch 0: 11/99 [00:01, 3.9it/s, loss=2]",
    ],
    ids=["caught by a function", "bar", "logger", "printed", "bar of an epoch", "again before it went on"],
)
def test_progress_that_nothing_delays_is_survival(log: str) -> None:
    assert judged(log) == ("unknown", "guess")


@pytest.mark.parametrize(
    "before",
    [
        f"{CAUGHT}{MEMORY}",
        f"caught: {MEMORY}",
        MEMORY,
        f"2024-03-12 10:11:12 WARNING step failed: {MEMORY}",
        f"{ENDED}{MEMORY}\n{STEPS}",
    ],
    ids=["traceback", "message", "type and message", "logger", "steps after it"],
)
def test_memory_that_a_program_outlived_is_not_the_cause_of_its_own_fault(before: str) -> None:
    assert judged(f"{before}\nlowering the rest\n{ENDED}KeyError: 'labels'") == ("user-error", "likely")


@pytest.mark.parametrize(
    "after",
    [
        "UnboundLocalError: local variable 'loss' referenced before assignment",
        "AttributeError: 'NoneType' object has no attribute 'data'",
        "TypeError: unsupported operand type(s) for +=: 'NoneType' and 'float'",
    ],
)
def test_a_value_that_is_missing_directly_after_memory_ran_out_is_missing_because_of_it(after: str) -> None:
    for said in (f"caught: {MEMORY}", f"{MEMORY}\n| WARNING: ran out of memory, skipping batch"):
        assert judged(f"{said}\n{ENDED}{after}")[0] == "gpu-oom"
        assert judged(f"{said}\n{STEPS}\n{ENDED}{after}") == ("user-error", "likely"), "it went on"
    assert judged(f"caught: {MEMORY}\n1\n2\n3\n{ENDED}{after}") == ("user-error", "likely"), "later"
    deep = f"caught: {MEMORY}\n{ENDED}{CAUGHT.split(chr(10), 1)[1] * 4}{after}"
    bare = "\n".join(line.strip() for line in deep.split("\n"))
    assert judged(deep)[0] == judged(bare)[0] == "gpu-oom", "a collector may take the indentation"
    assert judged(f"{ENDED}{after}") == ("user-error", "likely")


@pytest.mark.parametrize(
    ("after", "confidence"),
    [("", "likely"), ("\nskipping this batch", "guess"), ("\nGPU OOM, skipping this batch", "guess")],
)
def test_words_that_the_program_goes_on_leave_a_guess_also_if_they_tell_of_memory(
    after: str, confidence: str
) -> None:
    assert judged(f"{MEMORY}{after}") == ("gpu-oom", confidence)
    traced = f"{CAUGHT}{MEMORY}{after}"
    assert judged(f"step 3 failed: {MEMORY}\n{traced}") == ("gpu-oom", confidence if after else "likely")


def test_steps_after_the_time_limit_are_the_last_ones() -> None:
    limit = "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2024-04-02T19:13:08 DUE TO TIME LIMIT ***"
    assert judged(f"{bars(10)}{limit}\n{bars(20, 30)}") == ("time-limit", "certain")


def test_who_cancels_a_job_that_has_failed_did_not_end_it() -> None:
    cancelled = "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2024-10-09T23:25:32 ***"
    failed, ended = "srun: error: n1: task 3: Exited with exit code 1", "srun: error: n1: task 3: Terminated"
    port = "The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."
    assert judged(f"{port}\n{failed}\n{cancelled}\n{ended}") == ("rendezvous-failed", "likely")
    assert judged(f"{failed}\n{cancelled}") == ("cancelled", "guess")
    assert judged(f"{port}\n{cancelled}\n{failed}") == ("cancelled", "certain"), "a consequence of it"
    assert judged(f"{cancelled}\n{ended}") == ("cancelled", "certain")


def test_a_traceback_of_a_library_that_goes_on_is_no_cause() -> None:
    traced = f"{ENDED}AttributeError: 'NoneType' object has no attribute 'split'\nDevice set to use cuda:0"
    assert judged(f"Could not load bitsandbytes native library: no CUDA\n{traced}")[1] == "guess"
    assert judged(f"the tokenizer could not be loaded\n{traced}") == ("user-error", "likely")


def judged_of_rank(text: str, stream: str = "err") -> str:
    collector = Collector()
    for number, line in enumerate(text.splitlines(), 1):
        collector.feed(stream, line.encode() + b"\n", number)
    cause = cause_of(Candidate(clue, rank=0) for clue in collector.clues())
    assert cause is not None
    return cause.failure


@pytest.mark.parametrize("said", ["agent 3 was preempted by agent 5", "Preempting task 4"])
def test_in_a_ranks_own_output_no_scheduler_tells_of_its_end(said: str) -> None:
    log = f"{said}\n{ENDED}KeyError: 'labels'"
    assert judged_of_rank(log) == "user-error"
    assert judged_of_rank(log, stream="") == "preempted", "in a log of all it may be the scheduler's"


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        ("no space left on device for cache, caching disabled", "disk-full"),
        ("loss is nan for 3 samples, they were dropped", "numerical"),
        ("desync between ranks of players corrected", "desync"),
        ("Xid 79 seen earlier on this node", "node-failed"),
        ("time limit reached for game 3, truncating the episode", "time-limit"),
        ("episode 12 ran out of time", "time-limit"),
        ("task 7 timed out, its reward is 0", "time-limit"),
    ],
)
def test_whatever_a_program_said_its_own_fault_ended_it(said: str, failure: str) -> None:
    assert judged_of_rank(said) == failure
    for fault in ("KeyError: 'labels'", "TypeError: unhashable type: 'list'"):
        assert judged_of_rank(f"{said}\n{ENDED}{fault}") == "user-error"
    assert judged_of_rank(f"{said}\n{ENDED}RuntimeError: stopped") == failure


def test_what_is_printed_after_an_own_fault_was_held_back_until_then() -> None:
    """A library's buffer of its own is written when the process ends, after Python's traceback."""

    def judged(*said: tuple[str, str]) -> str:
        collector = Collector()
        for stream, text in said:
            for number, line in enumerate(text.splitlines(), 1):
                collector.feed(stream, line.encode() + b"\n", number)
        cause = cause_of(Candidate(clue, rank=0) for clue in collector.clues())
        assert cause is not None
        return cause.failure

    fault, late = ("err", f"{ENDED}KeyError: 'labels'"), ("out", "cache: CUDA out of memory")
    assert judged(late) == "gpu-oom"
    assert judged(fault, late) == "user-error"
    assert judged(fault, ("out", STEPS), late) == "gpu-oom", "another process had ended by the KeyError"
    assert judged(fault, ("err", f"{ENDED}{MEMORY}")) == "gpu-oom", "its own traceback"


def test_a_long_command_that_failed_keeps_its_exit_code_and_what_it_said() -> None:
    failed = f"subprocess.CalledProcessError: Command '{'x ' * 900}' returned non-zero exit status 3."
    (clue,) = clues_of_text(f"vocab.json is not there\n{ENDED}{failed}\n".encode().splitlines(True))
    assert clue.text.endswith("returned non-zero exit status 3.") and len(clue.text) == MAX_TEXT
    assert clue.before == ("vocab.json is not there",)


def test_a_loss_scale_of_zero_is_the_cause_of_a_division_by_it() -> None:
    scales = [
        f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}\n"
        for scale in (32768.0, 1.0, 5e-324, 0.0)
    ]
    end = f"{ENDED}ZeroDivisionError: float division by zero"
    assert judged_of_rank("".join(scales) + end) == "numerical"
    assert judged_of_rank("".join(scales[:-1]) + end) == "user-error", "the program's own division"


@pytest.mark.parametrize("end", ["ValueError: the training diverged", "AssertionError"])
def test_a_check_of_the_program_may_end_it_by_an_exception(end: str) -> None:
    assert judged_of_rank(f"Loss is nan, stopping training\n{ENDED}{end}") == "numerical"


@pytest.mark.parametrize(
    "after",
    [
        "During handling of the above exception, another exception occurred:\n\n"
        + ENDED
        + "KeyError: 'labels'",
        f"{ENDED}RuntimeError: training failed",
        f"{ENDED}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "giving up",
    ],
    ids=["chained", "another type may tell of it", "torchrun", "no exception"],
)
def test_memory_stays_the_cause_of_what_may_follow_from_it(after: str) -> None:
    assert judged(f"{CAUGHT}{MEMORY}\n\n{after}") == ("gpu-oom", "likely")


@pytest.mark.parametrize(
    "line",
    [
        "[LightGBM] [Fatal] [CUDA] out of memory /tmp/src/cuda_utils.hpp 38",
        "ggml_vulkan: Device memory allocation of size 1073741824 failed.",
        "ERROR TDRV:dmem_alloc_internal Failed to alloc DEVICE memory: 1073741824",
        "hipMalloc failed: out of memory",
        "not enough VRAM to load the model",
        "CUDA OOM at step 512",
        "`XPU out of memory` error",
    ],
)
def test_any_words_about_a_device_s_memory_are_the_best_guess_and_decisive_in_an_exception(line: str) -> None:
    assert judged(line) == ("gpu-oom", "guess")
    assert judged(f"{ENDED}RuntimeError: {line}") == ("gpu-oom", "likely")
    assert clue_of_exception(f"RuntimeError: {line}").strength == "words", "it is no record of memory"
    assert judged(f"{line}\n{KEY}") == ("user-error", "likely")


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("ValueError: unknown policy 'CUDA out of memory'", "user-error"),
        ("KeyError: 'out of memory'", "user-error"),
        ('ValueError: no handler for "HIP out of memory."', "user-error"),
        (
            "RuntimeError: worker 3 failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB'",
            "gpu-oom",
        ),
        ("RuntimeError: [1] RuntimeError('CUDA out of memory')", "gpu-oom"),
        ("RuntimeError: NCCL Error 1: Cuda failure 2 'out of memory'", "gpu-oom"),
    ],
)
def test_words_in_quotes_are_a_value_unless_they_report(text: str, failure: str) -> None:
    """The same in a line of output and in the error file that torchelastic writes."""
    assert judged(f"{ENDED}{text}") == (failure, "likely")
    assert CLASS_OF[clue_of_exception(text).kind] == failure


CPU_ONLY = (
    "2024-11-14 19:38:14.382678: E external/xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to "
    "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
)


def test_a_machine_without_a_gpu_is_no_failed_node_where_something_else_failed() -> None:
    assert judged(f"{CPU_ONLY}\n{KEY}") == ("user-error", "likely")
    assert judged(CPU_ONLY)[1] == "guess"


@pytest.mark.parametrize(
    "line",
    [
        "License checkout failed.",
        "FlexNet Licensing error:-15,10032",
        "Error: could not check out a license for Simulink",
        "The license of this solver has expired",
        "You must accept the license of this repository on its page before you can download it",
        "Access to model google/gemma-2 is restricted. You must have access to it and be authenticated.",
    ],
)
def test_a_license_that_is_not_there_is_the_user_s_to_get(line: str) -> None:
    assert judged(line)[0] == "user-error" and judged(line)[1] == "likely"


@pytest.mark.parametrize(
    "line",
    [
        "ERROR:composer.cli.launcher:Rank 1 crashed with exit code 1.",
        "ERROR: The replica workerpool0-0 exited with a non-zero status of 1.",
        "ERROR: Unexpected segmentation fault encountered in worker.",
    ],
)
def test_how_another_process_ended_says_nothing_about_why(line: str) -> None:
    assert judged(line) == ("unknown", "guess")
    assert judged(f"{line}\n{KEY}") == judged(f"{KEY}\n{line}") == ("user-error", "likely")


@pytest.mark.parametrize("level", ["ERROR", "[error]", "[server] [error]", "[11,526ms] [Error] [omni.app]"])
def test_a_logger_s_error_is_the_best_guess_and_no_more(level: str) -> None:
    told = f"2024-03-12 10:11:12 {level} the reward server went home"
    assert judged(told) == ("user-error", "guess")
    assert judged(f"{told}\n{OOM}") == ("gpu-oom", "likely")


@pytest.mark.parametrize(
    "level", ["INFO", "[info]", "[Warning]", "[db] [warning]", "[error_rate]", "[errors]"]
)
def test_what_a_logger_prints_below_an_error_is_none(level: str) -> None:
    assert judged(f"2024-03-12 10:11:12 {level} the reward server went home") == ("unknown", "guess")


def test_a_traceback_behind_the_prefix_of_coloredlogs_is_read() -> None:
    lines = f"{HEAD}SolverStopped: no step fits".split("\n")
    told = "\n".join(f"2021-06-02 15:51:03 n1 root[14429] ERROR {line}" for line in lines)
    assert judged(told) == ("user-error", "likely")
    assert judged("2021-06-02 15:51:03 n1 root[14429] INFO the reward server went home") == (
        "unknown",
        "guess",
    )


@pytest.mark.parametrize(
    "call",
    [
        "cudaMallocHost failed: cudaErrorMemoryAllocation: out of memory",
        "cuMemHostAlloc failed: out of memory",
    ],
)
def test_pinned_memory_is_the_host_s_whatever_the_name_of_the_error(call: str) -> None:
    assert judged(f"2026-09-25 00:13:34 FATAL startup failed | {call}") == ("host-oom", "likely")
    assert judged("cudaMalloc failed: cudaErrorMemoryAllocation: out of memory") == ("gpu-oom", "likely")


@pytest.mark.parametrize(
    "said",
    [
        "CPU out of memory. Tried to allocate 3.00 GiB",
        "model requires more system memory (5.6 GiB) than is available (3.1 GiB)",
        "insufficient host memory for the object store",
        "memory limit exceeded",
    ],
)
def test_any_words_about_the_memory_of_a_machine_are_never_a_gpu_s(said: str) -> None:
    assert judged(said) == ("host-oom", "guess")
    assert judged(f"{ENDED}RuntimeError: {said}") == ("host-oom", "likely")


@pytest.mark.parametrize(
    "line",
    [
        "host memory: 64 GB, exhausted: never",
        "memory limit exceeded: no",
        "memory usage limit exceeded 0 times",
        "GPU memory usage exceeded 0.9 of the pool",
        "GPU memory limit exceeded 0 times",
        "system memory: 64 GB, more is required for a larger model",
    ],
)
def test_a_count_of_a_machine_s_memory_is_no_failure(line: str) -> None:
    assert judged(line) == ("unknown", "guess")


@pytest.mark.parametrize(
    "lines",
    [
        ("    self.workers = start_workers(", "    ^^^^^^^^^^^^^^"),
        ('  File "/app/core.py", line 70, in run', "    return start(config)"),
    ],
)
def test_the_lines_of_a_traceback_without_its_head_are_no_error_of_the_program(
    lines: tuple[str, str],
) -> None:
    prefix = "(EngineCore_0 pid=33) ERROR 11-18 14:16:34 [core.py:708]"
    told = "\n".join(f"{prefix} {line}" for line in lines)
    assert judged(told) == ("unknown", "guess")
    assert judged(f"{told}\n{prefix} the engine stopped") == ("user-error", "guess")


@pytest.mark.parametrize(
    "line",
    [
        "panic: runtime error: index out of range [3] with length 3",
        "thread 'main' panicked at src/main.rs:3:5: called `Option::unwrap()` on a `None` value",
        "python: malloc.c:2379: sysmalloc: Assertion `(old_top == initial_top (av))' failed.",
        "CMake Error at CMakeLists.txt:3 (find_package):",
        'Lmod has detected the following error: The following module(s) are unknown: "cuda/99"',
        "Error in library(torch) : there is no package called 'torch'",
        'Exception in thread "main" java.lang.NullPointerException',
        "forrtl: severe (24): end-of-file during read, unit 5",
    ],
)
def test_how_other_languages_report_a_fault_is_the_best_guess(line: str) -> None:
    assert judged(line) == ("user-error", "guess")
    assert judged(f"{line}\n{OOM}") == judged(f"{OOM}\n{line}") == ("gpu-oom", "likely")


def test_an_error_behind_its_place_in_the_source_is_the_best_guess() -> None:
    for told in ("k.cu(12): error: identifier", "/src/PxgCudaUtils.h (54) : internal error : memcpy failed"):
        assert judged(f"{told}\nSegmentation fault (core dumped)") == ("user-error", "guess"), told
    assert judged("/src/PxgCudaUtils.h (54) : warning : slow") == ("unknown", "guess")


def test_a_number_may_decide_though_the_rest_of_the_line_was_seen() -> None:
    lines = [f"process exited with status {code}" for code in (3, 5, 124)]
    assert judged("\n".join(lines))[0] == "time-limit"


@pytest.mark.parametrize(
    ("log", "failure"),
    [
        (
            "terminate called after throwing an instance of 'std::invalid_argument'\n  what():  stoul",
            "user-error",
        ),
        ("terminate called after throwing an instance of 'sycl::_V1::invalid_object_error'", "user-error"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host-oom"),
        ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  x", "unknown"),
        ("caught std::invalid_argument, using the default", "unknown"),
    ],
)
def test_a_cpp_exception_for_a_wrong_value_is_the_program_s(log: str, failure: str) -> None:
    assert judged(log)[0] == failure


@pytest.mark.parametrize(
    ("wrapper", "original"),
    [
        ("KeyError: Caught KeyError in DataLoader worker process 0.", "KeyError: 'label'"),
        (
            "torch.OutOfMemoryError: Caught OutOfMemoryError in replica 1 on device 1.",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
    ],
)
@pytest.mark.parametrize("stream", ["", "err"])
def test_the_exception_of_a_worker_is_decisive_not_that_which_raises_it_again(
    wrapper: str, original: str, stream: str
) -> None:
    inner = f"Original {HEAD.replace('<module>', '_worker_loop')}{original}\n"
    for text, said in ((f"{HEAD}{wrapper}\n{inner}", original), (f"{HEAD}{wrapper}\n", wrapper)):
        collector = Collector()
        collector.feed(stream, text.encode(), 1)
        (clue,) = collector.clues()
        assert clue.text == said and clue.uncaught and not clue.survived
