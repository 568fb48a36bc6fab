#!/bin/sh
# Rendered by launcher 0.1.0. Docker's default /dev/shm of 64 MiB ends DataLoader workers by a bus error.
set -eu
least=1024
have=$(df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 { print $2 }')
if [ "${have:-0}" -lt "$least" ]; then
  printf 'launcher: /dev/shm has %s MiB, DataLoader workers want %s or more: start with --shm-size=8g or --ipc=host\n' \
    "${have:-0}" "$least" >&2
fi
exec "$@"
