#!/usr/bin/env bash
# Usage: check-node.sh FILES. Prints `NODE ok` or `NODE bad: why`. Rendered by launcher 0.1.0.
set -u

_node=${SLURMD_NODENAME:-$(hostname -s)}
bad() {
  printf '%s bad: %s\n' "$_node" "$*"
  exit 0
}

_probe=$1.probe-$_node
{ : >"$_probe" && rm "$_probe"; } 2>/dev/null || bad "cannot write into "'/shared/runs/task-20261121-085401'
if command -v nvidia-smi >/dev/null; then
  # If the driver hangs, even SIGKILL may not end nvidia-smi: wait only for its answer.
  read -r -t 60 _gpus < <(exec 2>/dev/null; nvidia-smi -L | grep -c '^GPU') || bad "nvidia-smi gives no answer within 60 s: the driver of its GPUs hangs"
  ((_gpus >= 4)) || bad "nvidia-smi shows $_gpus GPUs, the job needs "4
fi
[[ -e '/shared/images/launcher.sif' ]] || bad "there is no "'/shared/images/launcher.sif'
[[ -e '/shared' ]] || bad "there is no "'/shared'
printf '%s ok\n' "$_node"
