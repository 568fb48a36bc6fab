#!/usr/bin/env bash
# A builder of container images, what makes a base image, and a registry, from Debian's packages; arguments name more packages.
# Says why where it cannot: the tests are skipped then.
set -eu -o pipefail
absent=()
for command in buildah mmdebstrap docker-registry "$@"; do
  command -v "$command" >/dev/null || absent+=("$command")
done
if ((${#absent[@]} == 0)); then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "${absent[*]}: not installed, and installing needs root on Debian" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=120 update
apt-get -qq -o DPkg::Lock::Timeout=120 install --yes --no-install-recommends "${absent[@]}" >/dev/null ||
  echo "${absent[*]} cannot be installed" >&2
