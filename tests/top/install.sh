#!/usr/bin/env bash
# tmux for the test of `launcher top`, from Debian's packages, where there is none. Says why where it cannot;
# the test is skipped then.
set -eu -o pipefail
if command -v tmux >/dev/null; then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "tmux is not installed, and installing it needs root on Debian" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --yes --no-install-recommends tmux >/dev/null || echo "tmux cannot be installed" >&2
