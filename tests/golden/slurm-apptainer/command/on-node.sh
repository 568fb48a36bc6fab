#!/usr/bin/env bash
# Usage: on-node.sh FILES BATCH_PID [RENDEZVOUS_HOST PORT_BASE]. Rendered by launcher 0.1.0.
set -u

# FILES.stop is the batch script's request to stop, with the cause. FILES.exit is the exit code of the first node's
# supervisor.
_files=$1
_options=(--nodes 2 --node-rank "${SLURM_NODEID:?srun did not say which node this is}" --rendezvous "$3" --port-base "$4")

'python3' -m launcher.supervise '/shared/runs/command-20261121-085401' --stop-file "$_files.stop" ${_options[@]+"${_options[@]}"} &
_supervisor=$!

# Slurm sends signals to every process of the step, also to the supervisor, so this script only goes on waiting. At a
# preemption with a grace time, or after `scancel --signal`, the batch script on the first node gets no signal: send it
# one, so that it asks Slurm for the cause and the time that is left.
_woken=''
# shellcheck disable=SC2329 # called by the trap
tell_batch_script() {
  if [[ ${SLURM_NODEID:-0} == 0 ]] && grep -q slurm_script "/proc/$1/cmdline" 2>/dev/null; then kill -USR1 "$1"; fi
}
trap '_woken=yes' INT HUP
trap '_woken=yes; tell_batch_script "$2"' TERM USR2
while :; do
  _woken=''
  wait "$_supervisor"
  _rc=$?
  [[ -n $_woken ]] || break
done
if [[ ${SLURM_NODEID:-0} == 0 ]]; then printf '%s\n' "$_rc" >"$_files.exit"; fi
exit "$_rc"
