#!/usr/bin/env bash
# Usage: on-node.sh REQUEST_FILE [RENDEZVOUS_HOST PORT_BASE]. Rendered by launcher 0.1.0.
set -u

request=$1
options=()

'python3' -m launcher.supervise '/shared/my runs/task-20261121-085401' ${options[@]+"${options[@]}"} &
supervisor=$!

# Slurm sends a signal to every process of the step, the supervisor included: here it must only not end the wait.
woken=''
trap 'woken=yes' TERM INT HUP USR2

# The batch script announces the time limit through a file; this signal is for the supervisor alone.
(
  trap - TERM INT HUP USR2
  until [[ -e $request ]]; do sleep 1; done
  kill -s USR2 "$supervisor"
) &
watcher=$!

while :; do
  woken=''
  wait "$supervisor"
  rc=$?
  [[ -n $woken ]] || break
done
kill "$watcher" 2>/dev/null
exit "$rc"
