"""What the reference says before its tables, and an example of each field as a YAML file has it."""

from __future__ import annotations

INTRODUCTIONS = {
    "job": """
<!-- python -m tests.docs.update_reference writes this page from launcher/spec/job.py -->
# Job fields

A job file has these fields; [Writing a job](../jobs.md) is the guide. `launcher schema job` prints them as
JSON Schema, for completion in your editor.

| type | how to write it |
|---|---|
| size | `48GiB` (2^30 bytes), `48GB` (10^9 bytes), or a number of bytes |
| duration | `90m`, `24h`, `1d12h`, `2-12:00:00`, or a number of seconds |

A dash as default means that the description or the linked section says what happens.
""",
    "cluster": """
<!-- python -m tests.docs.update_reference writes this page from launcher/spec/cluster.py -->
# Profile fields

A cluster profile has these fields; [Cluster profiles](../clusters.md) is the guide. `launcher schema cluster`
prints them as JSON Schema. Sizes are written as in [job files](job.md); a rate is `400Gb/s` (bits) or
`50GB/s` (bytes); a host is `user@host` or a `Host` of your ssh config.
""",
    "recipe": """
<!-- python -m tests.docs.update_reference writes this page from launcher/spec/recipe.py -->
# Recipe fields

A recipe is the set of options with which a job trains its model, such as precision, optimizer, sharding and
micro-batch. It decides how much memory the job needs and how fast it is.

`global batch = micro_batch_size x grad_accum x data-parallel ranks`, always.

In a job, `recipe: auto` leaves all fields to the planner. Each field that you set stays fixed:

```yaml
recipe: {precision: bf16-mixed, sharding: fsdp}
```

[Recipes](../recipes.md) says what the values do. "required" below means that a complete recipe always
has a value, not that you must give one.
""",
}

EXAMPLES: dict[str, dict[str, str]] = {
    "Job": {
        "name": "my-run",
        "task": "my_task:Waves",
        "args": "{width: 16}",
        "adapter": "{kind: qlora, rank: 16}",
        "command": "python train.py --batch-size {micro_batch_size}",
        "workdir": "../project",
        "batch": "{global: 64}",
        "steps": "1000",
        "epochs": "3",
        "resources": "{nodes: 2, time: 24h}",
        "recipe": "{precision: bf16-mixed}",
        "train": "{lr: 1.0e-4}",
        "model": "{batch_norm: true}",
        "plan": "{params: 8.5e9}",
        "env": "{OMP_NUM_THREADS: 8}",
        "secrets": "[WANDB_API_KEY]",
        "send": "[certs/test.pem]",
        "image": "catalog:cuda13",
        "requeue": "false",
        "retries": "{same: 5}",
        "stall_timeout": "10m",
        "stop_timeout": "5m",
        "failures": "[{pattern: '^license denied', class: user-error}]",
        "tags": "[ablation]",
    },
    "Batch": {"global": "64"},
    "Adapter": {
        "kind": "qlora",
        "rank": "16",
        "alpha": "32",
        "dropout": "0.05",
        "targets": "[q_proj, v_proj]",
    },
    "Resources": {
        "nodes": "2",
        "gpus_per_node": "4",
        "ranks_per_node": "2",
        "cpus_per_node": "32",
        "memory_per_node": "64GiB",
        "time": "24h",
    },
    "Training": {
        "lr": "3.0e-4",
        "weight_decay": "0.01",
        "warmup_steps": "200",
        "clip_norm": "0.5",
        "seed": "1",
        "eval_every": "50",
        "checkpoint_every": "500",
        "keep_checkpoints": "3",
        "keep_best": "true",
        "workers": "4",
        "find_unused_parameters": "true",
        "collective_timeout": "30m",
        "trackers": "[tensorboard, wandb]",
        "memory_alert": "90%",
        "probe": "always",
        "record_memory": "true",
        "async_checkpoints": "true",
        "nvme_dir": "/local/scratch",
    },
    "Model": {"batch_norm": "true", "couples_samples": "true"},
    "Declared": {
        "model": "hf:model",
        "length": "4096",
        "params": "8.5e9",
        "vary": "{max_frames: [100, 75, 50]}",
    },
    "Secret": {"name": "HF_TOKEN", "env": "MY_TOKEN", "file": "~/.hf_token", "runpod": "wandb"},
    "Retries": {
        "lower": "0",
        "lower_micro_batch": "false",
        "same": "5",
        "preemptions": "50",
        "time_limits": "100",
    },
    "FailurePattern": {"pattern": "'reward model server is gone'", "class": "nccl-timeout"},
    "Cluster": {
        "name": "my-slurm",
        "description": "8 nodes with 4x A100",
        "scheduler": "slurm",
        "login": "you@della.example.edu",
        "max_nodes": "8",
        "node": "{cpus: 128}",
        "network": "{inter_node: 400Gb/s}",
        "container": "{runtime: pyxis}",
        "paths": "{runs: /scratch/you/runs}",
        "env": "{NCCL_DEBUG: WARN}",
        "setup": "['module load cuda']",
        "checks": "doctor",
        "slurm": "{partition: gpu}",
        "runpod": "{cpu_id: cpu3c, vcpu: 2}",
        "ssh": "{hosts: [tensor01, tensor02]}",
        "usd_per_gpu_hour": "1.89",
        "failures": "[{pattern: 'scratch is gone', class: node-failed}]",
    },
    "Node": {
        "gpu": "{type: NVIDIA A100-SXM4-80GB, count: 4, memory: 79.2GiB}",
        "cpus": "128",
        "memory": "1000GiB",
        "numa_binding": "node",
        "cpu_bind": "[0-15, 16-31]",
    },
    "Gpu": {"type": "NVIDIA RTX A6000", "count": "8", "memory": "47.4GiB", "overhead": "1.3GiB"},
    "Network": {"interface": "ib0", "env": "{NCCL_IB_HCA: mlx5}", "inter_node": "400Gb/s"},
    "Container": {
        "runtime": "apptainer",
        "image": "/shared/images/train.sif",
        "base": "pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime",
        "mounts": "{/shared: /shared}",
        "shm": "16GiB",
        "mount_home": "false",
    },
    "Paths": {"runs": "/shared/team/runs", "access": "group", "python": "/shared/envs/train/bin/python"},
    "Slurm": {
        "partition": "gpu,scavenge",
        "account": "my-project",
        "qos": "high",
        "constraint": "a100",
        "reservation": "workshop",
        "gpu_request": "gres",
        "gres_type": "a100",
        "gres": "[nvme:1]",
        "clusters": "west",
        "exclusive": "true",
        "signal_seconds": "300",
        "extra": "{mail-type: END}",
        "srun_options": "[--cpu-bind=none]",
        "comment": "false",
    },
    "RunPod": {
        "gpu_id": "NVIDIA RTX A6000",
        "other_gpus": "{NVIDIA A40: 44.4GiB}",
        "cpu_id": "cpu3c",
        "vcpu": "2",
        "clouds": "[SECURE]",
        "data_centers": "[EU-RO-1]",
        "disk_gb": "20",
        "volume_id": "abc123",
        "volume_path": "/workspace",
        "registry_id": "xyz789",
        "cuda_versions": "['13.0']",
        "ports": "[8888/http]",
        "max_hours": "12",
        "max_price": "1.50",
        "budget": "40",
        "unplanned": "true",
        "bid_per_gpu": "0.20",
        "server_limit": "false",
    },
    "Ssh": {"hosts": "[tensor01, you@tensor02]"},
    "Recipe": {
        "precision": "bf16-mixed",
        "optimizer": "adamw-8bit",
        "embedding_states": "8-bit",
        "sharding": "fsdp",
        "tensor": "2",
        "pipeline": "2",
        "virtual_stages": "2",
        "schedule": "gpipe",
        "stages": "[28, 29]",
        "offload": "cpu-optimizer",
        "optimizer_step": "backward",
        "activations": "checkpoint",
        "checkpoint_ratio": "0.5",
        "activation_budget": "0.5",
        "micro_batch_size": "4",
        "grad_accum": "8",
        "grad_sync": "last",
        "loss_chunks": "8",
        "compile": "true",
        "grad_scaler": "true",
        "expandable_segments": "false",
    },
}
