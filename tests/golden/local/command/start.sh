#!/usr/bin/env bash
# Starts the ranks of one attempt on this node: one launcher worker, which starts the only rank.
# Job it's 50% off; $(touch /tmp/pwned) #1 "quoted" hetjob é, run command-20261121-085401. Rendered by launcher 0.1.0.
# The supervisor runs it; `bash start.sh` by hand runs attempt 0 of the same run.
# shellcheck disable=SC2016 # values stand in single quotes, where nothing in them is expanded
set -euo pipefail

die() {
  printf 'launcher: %s\n' "$*" >&2
  exit 78
}

python='/opt/venv/bin/python'

if [[ -z ${LAUNCHER_ATTEMPT:-} ]]; then
  echo 'launcher: started by hand: this is attempt 0, and no supervisor judges or restarts it' >&2
  export LAUNCHER_ATTEMPT=0
  export LAUNCHER_RUN_DIR='/shared/my runs/command-20261121-085401'
  export LAUNCHER_RUN_ID='command-20261121-085401'
  export LAUNCHER_STOP_FILE="$LAUNCHER_RUN_DIR/attempts/000/stop"
  export LAUNCHER_SECRETS='HF_TOKEN,WANDB_API_KEY'
  export LAUNCHER_NODES=1
  export LAUNCHER_NODE_RANK=0
fi
[[ -n ${LAUNCHER_RUN_DIR:-} && -n ${LAUNCHER_RUN_ID:-} ]] || die 'LAUNCHER_ATTEMPT is set, but not LAUNCHER_RUN_DIR and LAUNCHER_RUN_ID'

# Environment of the cluster.


# What every rank runs. launcher's worker fills placeholders such as {micro_batch_size} for each attempt.
argv=('python' 'train it.py' '--batch={micro_batch_size}' '--note=`id`; rm -rf "$HOME" '\''x'\'' \ *' '{"lr": 1e-4, "cost": "$$5, ${local_rank}"}' 'two
lines' '' '%j,#1,!x')

cd '/shared/code of user' || die 'the working directory of the job does not exist on this node: ''/shared/code of user'

# Secrets: values come from the supervisor's environment, or from where the job says. They stand in no file here.
if [[ ! -v HF_TOKEN && -v MY_HF_TOKEN ]]; then HF_TOKEN=$MY_HF_TOKEN; fi
[[ -v HF_TOKEN ]] || die 'secret ''HF_TOKEN'' has no value on this node'
export HF_TOKEN
[[ -v WANDB_API_KEY ]] || die 'secret ''WANDB_API_KEY'' has no value on this node'
export WANDB_API_KEY

# Environment of the job: last, so that it wins and nothing here runs under it.
export GREETING='it'\''s $HOME,
then `id` & "more" #1'
export EMPTY=''
export OMP_NUM_THREADS='4'

# --alone: there is no torchrun, and the worker sets what one would set (RANK, WORLD_SIZE, MASTER_ADDR and so on).
exec "$python" -m launcher.supervise.worker --alone -- "${argv[@]}"
