#!/usr/bin/env bash
# The README's installation with the newest versions that its ranges allow, as CPU wheels, and the README's first
# verbs on it: plan, run, why. `make test` has pinned versions; users have these. Where no index has a CPU wheel of the
# newest torch, torch is the pinned one and everything else the newest, unless WITH_CUDA=1 takes gigabytes of CUDA.
# `versions.sh oldest`: torch is the oldest that pyproject.toml allows. Without a CPU wheel of it, it comes with CUDA.
set -eu -o pipefail
cd "$(dirname "$0")/.."
case ${1-} in
  newest) torch=torch ;;
  oldest) torch="torch==$(grep -o 'torch>=[0-9.]*' pyproject.toml | cut -d = -f 2).*" ;;
  *) echo 'usage: versions.sh newest | oldest' >&2 && exit 2 ;;
esac
venv=$PWD/.venv-$1
# The newest torch that this index, or the folders of pip's `find-links`, have without CUDA.
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
began=$SECONDS

rm -rf "$venv"
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
if ! PIP_CONFIG_FILE=/dev/null "${pip[@]}" --retries 1 --timeout 10 --no-deps --index-url "$torch_index" "$torch" 2>/dev/null ||
  ! grep -q '^cuda.* = None' "$venv"/lib/python*/site-packages/torch/version.py; then
  if [[ $torch == torch && -z ${WITH_CUDA-} ]]; then torch=$(grep -o '^torch==[0-9.]*' constraints.txt); fi
  echo "$torch_index has no such CPU wheel of torch here (another one: TORCH_INDEX): $torch is tried"
  "${pip[@]}" "$torch"
fi
# torch for CUDA brings triton, which says more than torch for CPUs alone.
"${pip[@]}" ".[train]" triton
"$venv/bin/python" -m pip list --disable-pip-version-check 2>/dev/null |
  grep -E '^(torch|triton|numpy|pydantic|typer|rich|bitsandbytes) '
echo "installed in $((SECONDS - began)) s"

work=$(mktemp -d)
trap 'rm -rf "$venv" "$work"' EXIT
launcher=$venv/bin/launcher
cd "$work"
export XDG_STATE_HOME=$work/state XDG_CACHE_HOME=$work/cache LAUNCHER_RUNS=$work/runs OMP_NUM_THREADS=1

# told NAME WORDS COMMAND ...: it succeeds, says WORDS, and prints nothing to stderr but lines such as
# `launcher: comparing recipes`, which a slow machine gets.
told() {
  local name=$1 words=$2
  shift 2
  if ! "$@" >"$name.out" 2>"$name.err" || ! grep -q "$words" "$name.out" ||
    grep -qv '^launcher: [a-z]*ing ' "$name.err"; then
    echo "$*: expected '$words' and nothing on stderr; it printed" >&2
    cat "$name.out" "$name.err" >&2
    exit 1
  fi
  echo "$name: $((SECONDS - began)) s"
}
told init 'wrote job.yaml' "$launcher" job init
told plan '^fits *yes' "$launcher" plan job.yaml -c slurm-h100
told again '^fits *yes' "$launcher" plan job.yaml -c slurm-h100
told render 'SBATCH' "$launcher" render job.yaml -c slurm-h100
told run 'succeeded' "$launcher" run job.yaml -c local --set steps=20
told recompute 'succeeded' "$launcher" run job.yaml -c local --set steps=5 --set recipe.activations=selective
told fsdp 'succeeded' "$launcher" run job.yaml -c local --set steps=5 --set recipe.sharding=fsdp
told why 'succeeded' "$launcher" why
if grep -rl nanobind runs; then
  echo 'the lines above name files of the run in which nanobind complains' >&2
  exit 1
fi
