#!/usr/bin/env bash
# A browser for the tests, from Debian's packages, where there is none. Says why where it cannot; the test is
# skipped then.
set -eu -o pipefail
for browser in chromium chromium-browser google-chrome; do
  if command -v "$browser" >/dev/null; then exit 0; fi
done
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "no browser is installed, and installing Chromium needs root on Debian" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --yes --no-install-recommends chromium >/dev/null || echo "Chromium cannot be installed" >&2
