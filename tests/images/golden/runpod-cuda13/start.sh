#!/bin/sh
# Rendered by launcher 0.1.0. With Docker's default /dev/shm of 64 MiB, DataLoader
# workers end with a bus error.
set -eu
_least=1024
_have=$(df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 { print $2 }')
if [ "${_have:-0}" -lt "$_least" ]; then
  printf 'launcher: /dev/shm has %s MiB, DataLoader workers want %s or more: start with --shm-size=8g or --ipc=host\n' \
    "${_have:-0}" "$_least" >&2
fi
exec "$@"
