#!/usr/bin/env bash
# Usage: check-node.sh FILES. Prints `NODE ok` or `NODE bad: why`. Rendered by launcher 0.1.0.
set -u

node=${SLURMD_NODENAME:-$(hostname -s)}
bad() {
  printf '%s bad: %s\n' "$node" "$*"
  exit 0
}

probe=$1.probe-$node
{ : >"$probe" && rm "$probe"; } 2>/dev/null || bad "cannot write into "'/shared/runs/command-20261121-085401'
if command -v nvidia-smi >/dev/null; then
  gpus=$(timeout 60 nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  ((gpus >= 4)) || bad "nvidia-smi shows $gpus GPUs, the job needs "4
fi
said=$('/shared/envs/train/bin/python' -c 'import launcher.supervise, pydantic' 2>&1) || bad "the interpreter does not import launcher: ${said##*$'\n'}"
printf '%s ok\n' "$node"
