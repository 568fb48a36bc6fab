#!/usr/bin/env bash
# Lints every shell script and Dockerfile of the project, rendered golden files included.
set -eu -o pipefail
cd "$(dirname "$0")/.."
mapfile -t scripts < <(
  git ls-files -co --exclude-standard -- '*.sh' '*.sbatch' .ci/run
)
mapfile -t dockerfiles < <(git ls-files -co --exclude-standard -- '*Dockerfile')
for script in "${scripts[@]}"; do bash -n "$script"; done
shellcheck --shell=bash "${scripts[@]}"
echo "shellcheck: ${#scripts[@]} scripts"
if [ "${#dockerfiles[@]}" -gt 0 ]; then hadolint "${dockerfiles[@]}"; fi
echo "hadolint: ${#dockerfiles[@]} Dockerfiles"
