#!/usr/bin/env bash
# Slurm and a login node for the tests, from the packages of Debian or Ubuntu. Says why where it cannot; that fails nobody's build:
# the tests are skipped then.
set -eu -o pipefail
PATH=$PATH:/usr/sbin:/sbin

absent=no
for command in munged slurmctld slurmd sbatch slurmdbd mariadbd mariadb-install-db my_print_defaults ip sshd ssh rsync; do
  command -v "$command" >/dev/null || absent=$command
done
if [[ $absent == no ]]; then exit 0; fi
as_root=()
if [[ $(id -u) != 0 ]]; then
  if ! sudo -n true 2>/dev/null; then
    echo "Slurm is not installed (no $absent), and installing it needs root" >&2
    exit 0
  fi
  as_root=(sudo -n)
fi
if ! command -v apt-get >/dev/null; then
  echo "Slurm is not installed (no $absent), and this is neither Debian nor Ubuntu" >&2
  exit 0
fi
# MariaDB takes the place of MySQL: on a build machine only.
keep=(--no-remove)
if [[ -n ${GITHUB_ACTIONS:-} ]]; then keep=(); fi
apt_get() {
  ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@"
}
apt_get update
apt_get install --yes --no-install-recommends ${keep[@]+"${keep[@]}"} munge slurmctld slurmd slurm-client slurmdbd \
  mariadb-server-core mariadb-client-core iproute2 openssh-server openssh-client rsync >/dev/null
