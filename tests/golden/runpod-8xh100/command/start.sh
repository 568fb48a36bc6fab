#!/usr/bin/env bash
# Starts the ranks of one attempt on this node: torchrun, which starts one launcher worker per rank.
# Job it's 50% off; $(touch /tmp/pwned) #1 "quoted" hetjob é, run command-20261121-085401. Rendered by launcher 0.1.0.
# The supervisor runs it; `bash start.sh` by hand runs attempt 0 of the same run.
# shellcheck disable=SC2016 # values stand in single quotes, where nothing in them is expanded
set -euo pipefail

die() {
  printf 'launcher: %s\n' "$*" >&2
  exit 78
}

python='python3'

if [[ -z ${LAUNCHER_ATTEMPT:-} ]]; then
  echo 'launcher: started by hand: this is attempt 0, and no supervisor judges or restarts it' >&2
  export LAUNCHER_ATTEMPT=0
  export LAUNCHER_RUN_DIR='/workspace/runs/command-20261121-085401'
  export LAUNCHER_RUN_ID='command-20261121-085401'
  export LAUNCHER_STOP_FILE="$LAUNCHER_RUN_DIR/attempts/000/stop"
  export LAUNCHER_SECRETS='HF_TOKEN,WANDB_API_KEY'
  export LAUNCHER_NODES=2
  [[ -n ${LAUNCHER_NODE_RANK:-} && -n ${LAUNCHER_RENDEZVOUS_HOST:-} && -n ${LAUNCHER_RENDEZVOUS_PORT:-} ]] ||
    die 'on several nodes set LAUNCHER_NODE_RANK (0, 1, ..), LAUNCHER_RENDEZVOUS_HOST (address of node 0 as the others reach it) and LAUNCHER_RENDEZVOUS_PORT (the same everywhere, 61000-65535)'
fi
[[ -n ${LAUNCHER_RUN_DIR:-} && -n ${LAUNCHER_RUN_ID:-} ]] || die 'LAUNCHER_ATTEMPT is set, but not LAUNCHER_RUN_DIR and LAUNCHER_RUN_ID'

# Environment of the cluster.
export NCCL_SOCKET_IFNAME='ens1'
export GLOO_SOCKET_IFNAME='ens1'
export NCCL_DEBUG='WARN'

# `setup:` of the cluster profile, as its author wrote it. A batch script may have run it before the container.
if [[ -z ${LAUNCHER_SETUP_DONE:-} ]]; then
  trap 'die "a setup line of the cluster profile failed with exit code $?"' ERR
  set +u
  python3 -c 'import launcher' 2>/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet /workspace/wheels/launcher-*.whl
  set -u
  trap - ERR
fi

# A GPU that fell off the bus is cheaper to find here than in the first collective.
if command -v nvidia-smi >/dev/null; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -cE '^(GPU|  MIG)' || true)
  ((gpus >= 8)) || die "this node shows $gpus GPUs, the job needs "8
elif ! command -v rocm-smi >/dev/null && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  # Training would go on on the CPU, silently and for ever.
  die "no GPU on this node: neither nvidia-smi, rocm-smi nor /dev/nvidia0 is here; GPUs per node of the job: "8
fi

# Several nodes: never fall back to localhost, where each node would wait for itself.
host=${LAUNCHER_RENDEZVOUS_HOST:-} port=${LAUNCHER_RENDEZVOUS_PORT:-} node_rank=${LAUNCHER_NODE_RANK:-}
[[ -n $host && -n $port && -n $node_rank ]] ||
  die "no rendezvous: LAUNCHER_RENDEZVOUS_HOST is '$host', LAUNCHER_RENDEZVOUS_PORT '$port', LAUNCHER_NODE_RANK '$node_rank'"
# The address by which this node reaches the first one: names may not resolve, or resolve to 127.0.1.1.
# Connecting a UDP socket asks the routing table and sends nothing.
local_addr=$("$python" -c '
import socket, sys
family, kind, _, _, address = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), type=socket.SOCK_DGRAM)[0]
with socket.socket(family, kind) as probe:
    probe.connect(address)
    print(probe.getsockname()[0])
' "$host" "$port") || die "cannot reach the first node at '$host'"
[[ $local_addr != 127.* && $local_addr != ::1 ]] || die "the first node's address '$host' is a loopback address here: other nodes cannot reach it"
is_host=false
if [[ $node_rank == 0 ]]; then is_host=true; fi
if [[ $host == *:* ]]; then host="[$host]"; fi
rendezvous=(--nnodes 2 --rdzv-endpoint "$host:$port" --local-addr "$local_addr")
if [[ -n ${LAUNCHER_APART:-} ]]; then
  # Hosts that share no folder have the files of their own ranks: ranks follow the nodes. c10d sorts addresses.
  rendezvous+=(--rdzv-backend static --node-rank "$node_rank")
else
  # Said outright: torchrun would compare host names to find out, and wait for ever when they do not match.
  rendezvous+=(--rdzv-backend c10d --rdzv-conf "is_host=$is_host")
fi

# What every rank runs. launcher's worker fills placeholders such as {micro_batch_size} for each attempt.
argv=('python' 'train it.py' '--batch={micro_batch_size}' '--note=`id`; rm -rf "$HOME" '\''x'\'' \ *' '{"lr": 1e-4, "cost": "$$5, ${local_rank}"}' 'two
lines' '' '%j,#1,!x')
worker=(-m launcher.supervise.worker -- "${argv[@]}")
# torchrun takes $$ and ${local_rank} in arguments for its own: with every $ doubled they arrive as written.
two='$$'
worker=("${worker[@]//[$]/$two}")
# Error files of torchrun: on the run directory, not in a temporary folder that is lost with the node.
log_dir=$LAUNCHER_RUN_DIR/attempts/$(printf '%03d' "$LAUNCHER_ATTEMPT")/torchrun/node-${LAUNCHER_NODE_RANK:-0}
mkdir -p "$log_dir" || true
torchrun=(
  --nproc-per-node 8 --max-restarts 0 --log-dir "$log_dir"
  --rdzv-id "$LAUNCHER_RUN_ID-$LAUNCHER_ATTEMPT"
  "${rendezvous[@]}"
)

cd '/workspace/.launcher/code/e5f47d2455779745b059' || die 'the working directory of the job does not exist on this node: ''/workspace/.launcher/code/e5f47d2455779745b059'

# Secrets: values come from the supervisor's environment, or from where the job says. They stand in no file here.
[[ -v HF_TOKEN ]] || die 'secret ''HF_TOKEN'' has no value on this node'
export HF_TOKEN
[[ -v WANDB_API_KEY ]] || die 'secret ''WANDB_API_KEY'' has no value on this node'
export WANDB_API_KEY

# Environment of the job: last, so that it wins and nothing here runs under it.
export GREETING='it'\''s $HOME,
then `id` & "more" #1'
export EMPTY=''
export OMP_NUM_THREADS='4'
if [[ -z ${PYTORCH_CUDA_ALLOC_CONF:-}${PYTORCH_ALLOC_CONF:-} ]]; then
  export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
fi

# As `python -m torch.distributed.run`, but that nobody looks for garbage while torch is imported: a sixth of the time.
run_torchrun='import gc; gc.disable(); from torch.distributed.run import main; gc.enable(); main()'
exec "$python" -c "$run_torchrun" "${torchrun[@]}" --no-python "$python" "${worker[@]}"
