#!/usr/bin/env bash
# isolate.sh ROOT DISK [SOURCE TARGET]... -- COMMAND...
# Runs COMMAND with a root file system of its own, in namespaces that the caller made. It sees this machine's
# folders, except that DISK is /pod, /tmp is its own, /proc shows its own processes, and each SOURCE is at TARGET.
# The new root is a tmpfs, so nothing is created on this machine.
set -eu
root=$1
disk=$2
shift 2
mkdir -p "$root" "$disk/tmp"
mount -t tmpfs pod "$root"
for entry in /*; do
  case $entry in /tmp | /proc | /pod) continue ;; esac
  if [[ -L $entry ]]; then
    cp -P "$entry" "$root$entry"
  elif [[ -d $entry ]]; then
    mkdir "$root$entry"
    mount --rbind "$entry" "$root$entry"
  else
    : >"$root$entry"
    mount --bind "$entry" "$root$entry"
  fi
done
mkdir "$root/pod" "$root/tmp" "$root/proc"
mount --bind "$disk" "$root/pod"
mount --bind "$disk/tmp" "$root/tmp"
mount -t proc proc "$root/proc"
# All pods have this machine's address, and torchrun takes two nodes of a cluster with one address and one process id
# for the same node: the second waits for it for ever.
if [[ -n ${NODE_RANK:-} ]]; then echo $((NODE_RANK * 1000)) >"$root/proc/sys/kernel/ns_last_pid" || true; fi
while [[ $1 != -- ]]; do
  top=${2#/}
  if [[ ! -d $root$2 && $2 != /tmp/* && -e /${top%%/*} ]]; then
    echo "volume path $2: a pod would make this folder on this machine; choose a path below a folder that is not here, such as /workspace" >&2
    exit 1
  fi
  mkdir -p "$root$2"
  mount --rbind "$1" "$root$2"
  shift 2
done
shift
exec chroot "$root" /bin/sh -c 'cd /pod && exec "$@"' sh "$@"
