#!/usr/bin/env bash
# Usage: on-node.sh FILES [RENDEZVOUS_HOST PORT_BASE]. Rendered by launcher 0.1.0.
set -u

# FILES.stop is the batch script's request to stop and why, FILES.exit the exit code of the first node's supervisor.
files=$1
options=()

'python3' -m launcher.supervise '/shared/runs/task-20261121-085401' --stop-file "$files.stop" ${options[@]+"${options[@]}"} &
supervisor=$!

# Slurm sends a signal to every process of the step, the supervisor included: here it must only not end the wait.
woken=''
trap 'woken=yes' TERM INT HUP USR2
while :; do
  woken=''
  wait "$supervisor"
  rc=$?
  [[ -n $woken ]] || break
done
if [[ ${SLURM_NODEID:-0} == 0 ]]; then printf '%s\n' "$rc" >"$files.exit"; fi
exit "$rc"
