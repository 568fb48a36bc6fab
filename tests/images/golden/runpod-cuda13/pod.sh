#!/usr/bin/env bash
# Rendered by launcher 0.1.0.
# launcher-pod          start sshd if $PUBLIC_KEY is set, then wait: RunPod restarts a pod whose command returns
# launcher-pod --sshd   start sshd and return, for `setup:` of a cluster profile
set -eu

if [[ -n ${PUBLIC_KEY:-} ]]; then
  mkdir -p ~/.ssh /run/sshd
  chmod 700 ~/.ssh
  printf '%s\n' "$PUBLIC_KEY" >~/.ssh/authorized_keys
  chmod 600 ~/.ssh/authorized_keys
  # Create host keys here: keys in the image would be known to everybody.
  ssh-keygen -A >/dev/null
  # A login shell does not get the image's environment: set PATH, so that it finds `launcher` and `python`.
  /usr/sbin/sshd -o PasswordAuthentication=no -o PermitRootLogin=prohibit-password -o "SetEnv=PATH=$PATH"
  echo 'launcher: sshd is listening' >&2
else
  echo 'launcher: no PUBLIC_KEY in the environment, so no sshd' >&2
fi
if [[ ${1:-} != --sshd ]]; then exec sleep infinity; fi
