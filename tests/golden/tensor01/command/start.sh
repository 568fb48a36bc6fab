#!/usr/bin/env bash
# Starts the ranks of one attempt on this host: one launcher worker per rank.
# Job it's 50% off; $(touch /tmp/pwned) #1 "quoted" hetjob é, run command-20261121-085401. Rendered by launcher 0.1.0.
# The supervisor runs it; `bash start.sh` by hand runs attempt 0 of the same run.
# shellcheck disable=SC2016 # values are in single quotes, so that nothing in them is expanded
set -euo pipefail

die() {
  printf 'launcher: %s\n' "$*" >&2
  exit 78
}
# unfit WHY: end with a fault of this node. Between two attempts, a special exit code tells the supervisor.
unfit() {
  [[ -n ${LAUNCHER_ONLY_CHECK:-} ]] || die "$*"
  printf 'launcher: %s\n' "$*" >&2
  exit 3
}

_python='/opt/venv/bin/python'

if [[ -z ${LAUNCHER_ATTEMPT:-} ]]; then
  echo 'launcher: started by hand: this is attempt 0, and no supervisor judges or restarts it' >&2
  unset "${!LAUNCHER_ENV_@}"
  export LAUNCHER_ATTEMPT=0
  export LAUNCHER_RUN_DIR='/data/runs/command-20261121-085401'
  export LAUNCHER_RUN_ID='command-20261121-085401'
  export LAUNCHER_STOP_FILE="$LAUNCHER_RUN_DIR/attempts/000/stop"
  export LAUNCHER_SECRETS='HF_TOKEN,WANDB_API_KEY'
  export LAUNCHER_NODES=1
  export LAUNCHER_NODE_RANK=0
fi
[[ -n ${LAUNCHER_RUN_DIR:-} && -n ${LAUNCHER_RUN_ID:-} ]] || die 'LAUNCHER_ATTEMPT is set, but not LAUNCHER_RUN_DIR and LAUNCHER_RUN_ID'

# Environment of the cluster.
export NCCL_SHM_DISABLE='1'
export NCCL_DEBUG='WARN'

# Find lost GPUs here, not in the first collective. If the driver hangs, even SIGKILL may not end nvidia-smi: wait only
# for its answer. Without persistence mode, the driver must first start.
_patience=60
if [[ -n ${LAUNCHER_ONLY_CHECK:-} ]]; then _patience=20; fi # the supervisor waits for at most 30 s
if command -v nvidia-smi >/dev/null; then
  read -r -t "$_patience" _gpus < <(exec 2>/dev/null; nvidia-smi -L | grep -cE '^(GPU|  MIG)') ||
    unfit "nvidia-smi gives no answer within $_patience s on $(hostname): the driver of its GPUs hangs. Look at dmesg (Xid), and restart the node or leave it out"
  ((_gpus >= 8)) || unfit "this node shows $_gpus GPUs, the job needs "8
elif ! command -v rocm-smi >/dev/null && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  # Otherwise the job would silently train on the CPU.
  unfit "no GPU on this node: neither nvidia-smi, rocm-smi nor /dev/nvidia0 is here; GPUs per node of the job: "8
fi

# Raise the limits of open files (DataLoader workers and NCCL need many) and of locked memory as far as allowed.
_soft=$(ulimit -S -n) _hard=$(ulimit -H -n)
if [[ $_hard == unlimited ]] || ((_hard > 1048576)); then _hard=1048576; fi
if [[ $_soft != unlimited ]] && ((_soft < _hard)); then ulimit -S -n "$_hard" || true; fi
ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || true


# The command of every rank. launcher's worker fills in placeholders such as {micro_batch_size} for each attempt.
_argv=('python' 'train it.py' '--batch={micro_batch_size}' '--note=`id`; rm -rf "$HOME" '\''x'\'' \ *' '{"lr": 1e-4, "cost": "$$5, ${local_rank}"}' 'two
lines' '' '%j,#1,!x')

cd '/shared/code of user' || unfit 'the working directory of the job does not exist on this node: ''/shared/code of user'

# Secrets: the supervisor passes the values; otherwise they are read from the source that the job names. This file does
# not contain them.
if [[ ! -v LAUNCHER_ENV_HF_TOKEN ]]; then
  if [[ -v MY_HF_TOKEN ]]; then LAUNCHER_ENV_HF_TOKEN=$MY_HF_TOKEN; fi
fi
[[ -v LAUNCHER_ENV_HF_TOKEN ]] || die 'secret ''HF_TOKEN'' has no value on this node'
export LAUNCHER_ENV_HF_TOKEN
if [[ ! -v LAUNCHER_ENV_WANDB_API_KEY ]]; then
  if [[ -v WANDB_API_KEY ]]; then LAUNCHER_ENV_WANDB_API_KEY=$WANDB_API_KEY; fi
fi
[[ -v LAUNCHER_ENV_WANDB_API_KEY ]] || die 'secret ''WANDB_API_KEY'' has no value on this node'
export LAUNCHER_ENV_WANDB_API_KEY

# Environment of the job. The worker removes the prefix LAUNCHER_ENV_, so that the values reach only the rank.
export LAUNCHER_ENV_GREETING='it'\''s $HOME,
then `id` & "more" #1'
export LAUNCHER_ENV_EMPTY=''
export LAUNCHER_ENV_OMP_NUM_THREADS='4'

if [[ -z ${PYTORCH_CUDA_ALLOC_CONF:-}${PYTORCH_ALLOC_CONF:-} ]]; then
  export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
fi

# Check this node in the environment of the ranks, if the profile has `checks: doctor`, or if the supervisor asks for it
# after an attempt that may have failed because of the cluster.
_checks=
if [[ -n $_checks${LAUNCHER_ONLY_CHECK:-} ]]; then
  _said=$("$_python" -m launcher.doctor) && _rc=0 || _rc=$?
  if ((_rc == 3)); then
    unfit "node ${LAUNCHER_NODE_RANK:-0} ($(hostname)) fails the doctor's checks: $_said"
  elif ((_rc)); then
    echo "launcher: the doctor's checks ended with exit code $_rc: continuing without them" >&2
  fi
fi
if [[ -n ${LAUNCHER_ONLY_CHECK:-} ]]; then exit 0; fi

# One host, without torchrun: each rank gets the variables that torchrun would set, such as RANK and WORLD_SIZE.
exec "$_python" -m launcher.supervise.local_ranks 8 -- "${_argv[@]}"
