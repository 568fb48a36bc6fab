#!/usr/bin/env bash
# Starts the ranks of one attempt on this host: one launcher worker per rank.
# Job tiny-gpt, run task-20261121-085401. Rendered by launcher 0.1.0.
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
  export LAUNCHER_RUN_DIR='/workspace/runs/task-20261121-085401'
  export LAUNCHER_RUN_ID='task-20261121-085401'
  export LAUNCHER_STOP_FILE="$LAUNCHER_RUN_DIR/attempts/000/stop"
  export LAUNCHER_SECRETS='HF_TOKEN,WANDB_API_KEY'
  export LAUNCHER_NODES=1
  export LAUNCHER_NODE_RANK=0
fi
[[ -n ${LAUNCHER_RUN_DIR:-} && -n ${LAUNCHER_RUN_ID:-} ]] || die 'LAUNCHER_ATTEMPT is set, but not LAUNCHER_RUN_DIR and LAUNCHER_RUN_ID'

# Environment of the cluster.

# Source the file that defines the function `module`. On many sites only login shells have it.
find_module_command() {
  local _file
  for _file in ${MODULESHOME:+"$MODULESHOME/init/bash"} ${LMOD_PKG:+"$LMOD_PKG/init/bash"} \
    /etc/profile.d/*modules.sh /etc/profile.d/*lmod.sh /usr/share/{modules,Modules,lmod/lmod}/init/bash; do
    if type module >/dev/null 2>&1; then return 0; fi
    # shellcheck source=/dev/null
    if [[ -r $_file ]]; then source "$_file" || true; fi
  done
}
# setup_failed EXIT_CODE PRINTED COMMAND...: call COMMAND with a message that names the failed line of `setup:`.
# `_setup_at` is the number of the script's line before the first of them.
setup_failed() {
  trap - ERR EXIT
  # The line of the script itself, even if the error was in a function or in a sourced file.
  local _line=${BASH_LINENO[${#BASH_LINENO[@]} - 2]} _text='' _words
  if ((_line <= _setup_at)); then _line=${_setup_line:-0}; fi
  if ((_line > _setup_at)); then _text=$(sed -n "$_line{s/^ *//;p}" "${BASH_SOURCE[${#BASH_SOURCE[@]} - 1]}" 2>/dev/null) || true; fi
  _words="line $((_line - _setup_at)) of setup in the cluster profile failed with exit code $1: $_text"
  if ((_line <= _setup_at)); then _words="setup of the cluster profile failed with exit code $1"; fi
  if [[ -n $2 ]]; then _words+=" (it printed: $2)"; fi
  if [[ $_text =~ (^|[^[:alnum:]_-])(module|ml)[[:space:]] ]] && ! type module >/dev/null 2>&1; then
    _words+='; no file in the usual places defines module: add a line before this one that sources the file which does'
  fi
  "${@:3}" "$_words"
}

# `setup:` of the cluster profile, unchanged. A batch script may have run it before it started the container.
if [[ -z ${LAUNCHER_SETUP_DONE:-} ]]; then
  set +u
  _setup_at=$LINENO; trap '((LINENO > _setup_at)) && _setup_line=$LINENO' DEBUG; trap 'setup_failed $? "" die' ERR EXIT
  python3 -c 'import launcher' 2>/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet /workspace/wheels/gpu_launcher-*.whl
  trap - ERR EXIT DEBUG
  set -u
fi

# Find lost GPUs here, not in the first collective. If the driver hangs, even SIGKILL may not end nvidia-smi: wait only
# for its answer. Without persistence mode, the driver must first start.
_patience=60
if [[ -n ${LAUNCHER_ONLY_CHECK:-} ]]; then _patience=20; fi # the supervisor waits for at most 30 s
if command -v nvidia-smi >/dev/null; then
  read -r -t "$_patience" _gpus < <(exec 2>/dev/null; nvidia-smi -L | grep -cE '^(GPU|  MIG)') ||
    unfit "nvidia-smi gives no answer within $_patience s on $(hostname): the driver of its GPUs hangs. Look at dmesg (Xid), and restart the node or leave it out"
  ((_gpus >= 1)) || unfit "this node shows $_gpus GPUs, the job needs "1
elif ! command -v rocm-smi >/dev/null && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  # Otherwise the job would silently train on the CPU.
  unfit "no GPU on this node: neither nvidia-smi, rocm-smi nor /dev/nvidia0 is here; GPUs per node of the job: "1
fi

# Raise the limits of open files (DataLoader workers and NCCL need many) and of locked memory as far as allowed.
_soft=$(ulimit -S -n) _hard=$(ulimit -H -n)
if [[ $_hard == unlimited ]] || ((_hard > 1048576)); then _hard=1048576; fi
if [[ $_soft != unlimited ]] && ((_soft < _hard)); then ulimit -S -n "$_hard" || true; fi
ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || true


# The command of every rank. launcher's worker fills in placeholders such as {micro_batch_size} for each attempt.
_argv=('python3' '-m' 'launcher.train')

cd '/workspace/.launcher/code/fc55ece26d3fb9b0958d' || unfit 'the working directory of the job does not exist on this node: ''/workspace/.launcher/code/fc55ece26d3fb9b0958d'

# Secrets: the supervisor passes the values; otherwise they are read from the source that the job names. This file does
# not contain them.
if [[ ! -v LAUNCHER_ENV_HF_TOKEN ]]; then
  if [[ -v HF_TOKEN ]]; then LAUNCHER_ENV_HF_TOKEN=$HF_TOKEN; fi
fi
[[ -v LAUNCHER_ENV_HF_TOKEN ]] || die 'secret ''HF_TOKEN'' has no value on this node'
export LAUNCHER_ENV_HF_TOKEN
if [[ ! -v LAUNCHER_ENV_WANDB_API_KEY ]]; then
  if [[ -v WANDB_API_KEY ]]; then LAUNCHER_ENV_WANDB_API_KEY=$WANDB_API_KEY; fi
fi
[[ -v LAUNCHER_ENV_WANDB_API_KEY ]] || die 'secret ''WANDB_API_KEY'' has no value on this node'
export LAUNCHER_ENV_WANDB_API_KEY

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
exec "$_python" -m launcher.supervise.local_ranks 1 -- "${_argv[@]}"
