#!/usr/bin/env bash
# Starts the ranks of one attempt on this node: torchrun, which starts one launcher worker per rank.
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

_python='python3'

if [[ -z ${LAUNCHER_ATTEMPT:-} ]]; then
  echo 'launcher: started by hand: this is attempt 0, and no supervisor judges or restarts it' >&2
  unset "${!LAUNCHER_ENV_@}"
  export LAUNCHER_ATTEMPT=0
  export LAUNCHER_RUN_DIR='/shared/runs/command-20261121-085401'
  export LAUNCHER_RUN_ID='command-20261121-085401'
  export LAUNCHER_STOP_FILE="$LAUNCHER_RUN_DIR/attempts/000/stop"
  export LAUNCHER_SECRETS='HF_TOKEN,WANDB_API_KEY'
  export LAUNCHER_NODES=2
  [[ -n ${LAUNCHER_NODE_RANK:-} && -n ${LAUNCHER_RENDEZVOUS_HOST:-} && -n ${LAUNCHER_RENDEZVOUS_PORT:-} ]] ||
    die 'on several nodes set LAUNCHER_NODE_RANK (0, 1, ..), LAUNCHER_RENDEZVOUS_HOST (address of node 0 as the others reach it) and LAUNCHER_RENDEZVOUS_PORT (the same everywhere, 61000-65535)'
fi
[[ -n ${LAUNCHER_RUN_DIR:-} && -n ${LAUNCHER_RUN_ID:-} ]] || die 'LAUNCHER_ATTEMPT is set, but not LAUNCHER_RUN_DIR and LAUNCHER_RUN_ID'

# Environment of the cluster.
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
if [[ $(ulimit -l) != unlimited ]] && compgen -G '/dev/infiniband/uverbs*' >/dev/null; then
  echo "launcher: locked memory is limited to $(ulimit -l) KiB here (ulimit -l), and InfiniBand needs more: set LimitMEMLOCK=infinity for slurmd, or raise memlock in limits.conf" >&2
fi

# Several nodes: never fall back to localhost, where each node would wait for itself.
_host=${LAUNCHER_RENDEZVOUS_HOST:-} _port=${LAUNCHER_RENDEZVOUS_PORT:-} _node_rank=${LAUNCHER_NODE_RANK:-}
[[ -n $_host && -n $_port && -n $_node_rank ]] ||
  die "no rendezvous: LAUNCHER_RENDEZVOUS_HOST is '$_host', LAUNCHER_RENDEZVOUS_PORT '$_port', LAUNCHER_NODE_RANK '$_node_rank'"
# The address and interface through which this node reaches the first one. Host names may not resolve, or resolve to
# 127.0.1.1.
_found=$("$_python" -c 'from launcher.supervise.interface import main; main()' "$_host" "$_port") || die "cannot reach the first node at '$_host'"
read -r _local_addr _gloo _nccl <<<"$_found"
[[ $_local_addr != 127.* && $_local_addr != ::1 ]] || die "the first node's address '$_host' is a loopback address here: other nodes cannot reach it"
# By default gloo announces the address of the host's own name, and NCCL that of its first interface.
if [[ -z ${GLOO_SOCKET_IFNAME:-} && $_gloo != - ]]; then export GLOO_SOCKET_IFNAME=$_gloo; fi
if [[ -z ${NCCL_SOCKET_IFNAME:-} && $_nccl != - ]]; then export NCCL_SOCKET_IFNAME=$_nccl; fi
_is_host=false
if [[ $_node_rank == 0 ]]; then _is_host=true; fi
if [[ $_host == *:* ]]; then _host="[$_host]"; fi
_rendezvous=(--nnodes 2 --rdzv-endpoint "$_host:$_port" --local-addr "$_local_addr")
if [[ -n ${LAUNCHER_APART:-} ]]; then
  # Hosts without a shared folder have only the files of their own ranks, so ranks must follow the node numbers. The
  # c10d rendezvous would sort by address.
  _rendezvous+=(--rdzv-backend static --node-rank "$_node_rank")
else
  # Without is_host, torchrun would compare host names, and wait forever if they do not match.
  _rendezvous+=(--rdzv-backend c10d --rdzv-conf "is_host=$_is_host")
fi

# The command of every rank. launcher's worker fills in placeholders such as {micro_batch_size} for each attempt.
_argv=('python' 'train it.py' '--batch={micro_batch_size}' '--note=`id`; rm -rf "$HOME" '\''x'\'' \ *' '{"lr": 1e-4, "cost": "$$5, ${local_rank}"}' 'two
lines' '' '%j,#1,!x')
_worker=(-m launcher.supervise.worker -- "${_argv[@]}")
# torchrun expands $$ and ${local_rank} in arguments. Doubling every $ prevents that.
_two='$$'
_worker=("${_worker[@]//[$]/$_two}")
# torchrun's error files go into the run directory, because a temporary folder is lost with the node.
_log_dir=$LAUNCHER_RUN_DIR/attempts/$(printf '%03d' "$LAUNCHER_ATTEMPT")/torchrun/node-${LAUNCHER_NODE_RANK:-0}
mkdir -p "$_log_dir" || true
_torchrun=(
  --nproc-per-node 8 --max-restarts 0 --log-dir "$_log_dir"
  --rdzv-id "$LAUNCHER_RUN_ID-$LAUNCHER_ATTEMPT"
  "${_rendezvous[@]}"
)

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

# Like `python -m torch.distributed.run`, but without garbage collection during the import of torch, a sixth of its time.
_run_torchrun='import gc; gc.disable(); from torch.distributed.run import main; gc.enable(); main()'
exec "$_python" -c "$_run_torchrun" "${_torchrun[@]}" --no-python "$_python" "${_worker[@]}"
