#!/usr/bin/env bash
# Rendered by launcher 0.1.0.
# launcher-pod          sshd where $PUBLIC_KEY is set, then wait for ever: a pod whose command returns is started again
# launcher-pod --sshd   sshd alone, then return: a line for `setup:` of a cluster profile
set -eu

if [[ -n ${PUBLIC_KEY:-} ]]; then
  mkdir -p ~/.ssh /run/sshd
  chmod 700 ~/.ssh
  printf '%s\n' "$PUBLIC_KEY" >~/.ssh/authorized_keys
  chmod 600 ~/.ssh/authorized_keys
  # Made here: keys in the image would be everybody's.
  ssh-keygen -A >/dev/null
  # A login gets no environment of the image, where `launcher` and `python` are found by PATH.
  /usr/sbin/sshd -o PasswordAuthentication=no -o PermitRootLogin=prohibit-password -o "SetEnv=PATH=$PATH"
  echo 'launcher: sshd is listening' >&2
else
  echo 'launcher: no PUBLIC_KEY in the environment, so no sshd' >&2
fi
if [[ ${1:-} != --sshd ]]; then exec sleep infinity; fi
