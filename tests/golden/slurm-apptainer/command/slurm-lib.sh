#!/usr/bin/env bash
# Functions of job.sbatch, which sources this file and sets the variables that begin with an underscore. The file is
# the same for every job. Rendered by launcher 0.1.0.
# shellcheck disable=SC2154 # job.sbatch sets them

_job=$SLURM_JOB_ID
_id=$_job
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then _id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
_handle=$_handle_prefix$_id
_excluded=$_run_dir/slurm-excluded

# -- Records in the run directory

say() {
  printf '[launcher] %s\n' "$*" >&2
}
now() {
  date -u +%Y-%m-%dT%H:%M:%S.%6NZ
}
# json TEXT: print the text as a JSON string.
json() {
  local _text=${1//\\/\\\\}
  _text=${_text//\"/\\\"}
  printf '"%s"' "${_text//[[:cntrl:]]/ }"
}
# event NAME [MEMBERS [HANDLE]]: append a line to events.jsonl in one write.
event() {
  printf '{"time": "%s", "event": "%s", "handle": %s%s}\n' "$(now)" "$1" "$(json "${3:-$_handle}")" "${2:+, $2}" \
    >>"$_run_dir/events.jsonl"
}
# state NAME MEMBERS: replace state.json atomically.
state() {
  printf '{\n  "state": "%s",\n  "time": "%s",\n  %s\n}\n' "$1" "$(now)" "$2" >"$_run_dir/.state.json.$_job" &&
    mv "$_run_dir/.state.json.$_job" "$_run_dir/state.json"
}
# verdict STATE CLASS CODE REASON: record how the run ended, if no supervisor did, and exit.
verdict() {
  local _members
  _members='"failure": "'"$2"'", "reason": '"$(json "$4")"
  say "$4"
  event finished '"state": "'"$1"'", '"$_members"
  state "$1" "$_members"
  exit "$3"
}
# fail CLASS CODE REASON: record that the run failed, and exit.
fail() {
  leave_if_ended
  verdict failed "$@"
}
# Whether the supervisor has recorded how the run ended. If the run was resumed since, state.json belongs to the next
# job, and the last event of this job counts. A supervisor that was killed between writing the two files leaves the
# state `running` and no later event.
judged() {
  local _runs=0
  if grep -qE '"state": "(succeeded|failed|interrupted|cancelled)"' "$_run_dir/state.json" 2>/dev/null; then return 0; fi
  if grep -qF '"state": "running"' "$_run_dir/state.json" 2>/dev/null; then _runs=1; fi
  awk -v here="$(json "$_handle")" -v runs="$_runs" '/"event": "job"/ && index($0, here) { ended = 0 }
    ended { later = 1 }
    /"event": "finished"/ { ended = 1; later = 0 }
    END { exit !(ended && (later || !runs)) }' "$_run_dir/events.jsonl"
}
# judge EXIT_CODE: find the cause in the output of this job and of its nodes, if no supervisor gave a verdict.
judge() {
  local _said _refused _file
  _said=$(tail -q -n 50 "$_run_dir/slurm-$_job.out" "$_files"-node-*.out 2>/dev/null)
  case $_said in
    *oom-kill* | *oom_kill* | *'Out Of Memory'* | *'memory limit'*)
      fail host-oom 11 "the job asked for too little host memory: the supervisor of a node was ended for it"
      ;;
    *'DUE TO NODE'* | *'Node failure'*) fail node-failed 14 "a node failed (job $_id)" ;;
  esac
  leave_dead_nodes
  _refused=$(grep -m 1 '^srun: ' <<<"$_said" || true)
  if [[ $_refused == *'step aborted'* ]]; then # before any of its tasks had ended
    _refused=$(grep -m 1 -F ' CANCELLED AT ' <<<"$_said" || echo "$_refused")
    if [[ $_refused == *' CANCELLED AT '* && $_refused != *' DUE TO '* ]]; then
      leave_if_ended
      verdict cancelled cancelled 18 "the job's step was cancelled (scancel), which kills it without a warning: $_refused"
    fi
  fi
  # on-node.sh on the first node writes its supervisor's exit code. Without it, srun or on-node.sh was killed.
  if (($1 == 137)); then
    leave_if_ended
    _said="srun or its task on a node"
    if [[ -s $_files.exit ]]; then _said="the supervisor of node ${_hosts[0]}"; fi
    leave node-failed 14 "$_retries_same" same "$_said was killed (SIGKILL)"
  fi
  for _file in "$_files"-node-*.out; do
    # Skip the message of a killed supervisor about the time that its ranks have: it is not the cause.
    _said=$(sed -n '/: the ranks have [0-9]* s to /d; s/^\[launcher\] //p' "$_file" 2>/dev/null | tail -n 1)
    if [[ -n $_said ]]; then fail unknown "$1" "$_said (exit code $1); see $_file"; fi
  done
  fail unknown "$1" "the supervisors ended without a word (exit code $1)${_refused:+: $_refused}; see $_run_dir/slurm-$_job*.out"
}
die() {
  fail unknown 78 "$*"
}

# -- The signals USR2 and TERM, and their causes

# USR2 announces the time limit or a preemption. Slurm sends it only to this shell (--signal=B:), because it would kill
# torchrun. TERM goes to every process of the job, or only to its steps; then on-node.sh sends USR1 to this shell.
# A file tells the supervisors the cause and the time that is left. job.sbatch collects signals in `_signals` from its
# first line on, and `finish` handles them.
_asked=''
_handled=0
# seconds TIME: convert Slurm's [DAYS-]HOURS:MINUTES:SECONDS.
seconds() {
  awk -F '[-:]' '{ print NF == 4 ? (($1 * 24 + $2) * 60 + $3) * 60 + $4 : ($1 * 60 + $2) * 60 + $3 }' <<<"$1"
}
# Store Slurm's record of this job in `_info`. Skip its first line: the job's name may contain any text.
_info=''
look() {
  _info=" $(scontrol show job "$_job" 2>/dev/null | tail -n +2 | tr '\n' ' ')"
}
# member NAME: print a field of the record that `look` stored.
member() {
  local _found=${_info#* "$1"=}
  if [[ $_found != "$_info" ]]; then printf '%s' "${_found%% *}"; fi
}
# Whether slurmstepd or srun has reported a failed node in the output of this start.
node_failed() {
  awk -v job="[launcher] job $_id, start $_restart," 'index($0, job) == 1 { found = 0 }
    / DUE TO NODE FAILURE/ || /^srun: error: Node failure on / { found = 1 }
    END { exit !found }' "$_run_dir/slurm-$_job.out" 2>/dev/null
}
# Whether srun is ending the step because the supervisor of one node has failed. srun kills the others after KillWait.
step_ends() {
  awk -v job="[launcher] job $_id, start $_restart," 'index($0, job) == 1 || /^\[launcher\] the step ended / { found = 0 }
    /^srun: .*Terminating (StepId=|job step )/ { found = 1 }
    END { exit !found }' "$_run_dir/slurm-$_job.out" 2>/dev/null
}
# why SIGNAL: print the cause of a signal, according to the record that `look` stored. A job that is preempted has
# PreemptTime; one that was put back into the queue has a higher restart count.
why() {
  local _preempt _left _limit
  _preempt=$(member PreemptTime)
  _limit=$(member TimeLimit)
  _left=999999999
  if [[ $_limit == *:* ]]; then _left=$(($(seconds "$_limit") - $(seconds "$(member RunTime)"))); fi
  if node_failed; then
    echo node-failed
  elif [[ $(member Restarts) -gt $_restart ]]; then
    echo preempted
  elif [[ -n $_preempt && $_preempt != None ]]; then
    echo preempted
  elif [[ $1 == USR2 ]]; then
    # Slurm may send USR2 up to a minute early. Much earlier than that, it announces a preemption.
    if [[ -n $_limit ]] && ((_left > _signal_seconds + 90)); then echo preempted; else echo time-limit; fi
  elif ((_left <= 0)); then
    echo time-limit
  elif [[ $(member JobState) == COMPLETING || $(member JobState) == CANCELLED ]]; then
    echo cancelled
  elif step_ends; then
    echo node-failed
  else
    echo preempted
  fi
}
# left REASON: print the seconds until Slurm kills the job (its end time plus KillWait), according to the record that
# `look` stored. Print nothing if Slurm will not end the job, as after a signal that a user sent. Only the controller's
# clock counts, because a node's may be wrong.
left() {
  local _left=0 _wait _end _start _preempt
  if [[ $(member JobState) == RUNNING ]] && ! step_ends; then
    _preempt=$(member PreemptTime)
    if [[ $1 == preempted && ( -z $_preempt || $_preempt == None ) ]]; then return; fi
    _start=$(date -d "$(member StartTime)" +%s 2>/dev/null)
    _end=$(date -d "$(member EndTime)" +%s 2>/dev/null)
    if [[ -n $_start && -n $_end ]]; then # the controller's present time is StartTime + RunTime
      _left=$((_end - _start - $(seconds "$(member RunTime)")))
    else # a job without a time limit has no end time, but its partition may have a grace time
      _left=$(scontrol show partition "$(member Partition)" 2>/dev/null | grep -o 'GraceTime=[0-9]*' | cut -d = -f 2)
    fi
  fi
  _wait=$(scontrol show config 2>/dev/null | awk '$1 == "KillWait" { print $3 }')
  if [[ -n $_wait ]]; then echo $(((_left > 0 ? _left : 0) + _wait)); fi
}
# ask SIGNAL: ask the supervisors for a checkpoint.
ask() {
  local _reason _seconds
  look
  _reason=$(why "$1")
  # Another signal interrupted scontrol: handle that one.
  if [[ -z $_reason || $_info == ' ' ]] && ((_handled < ${#_signals[@]})); then return; fi
  if [[ -z $_reason ]]; then _reason=preempted; fi
  if [[ -z $_asked || $1 == TERM && $_reason == cancelled ]]; then
    _asked=$_reason
    say "$1: $_reason: asking for a checkpoint"
  fi
  _seconds=$(left "$_asked")
  printf '%s\n' "$_asked${_seconds:+ +$_seconds}" >"$_files.stop.new" && mv "$_files.stop.new" "$_files.stop"
}

# -- Requeue the job, or submit a new job for the same run

# Whether state.json says that the run was interrupted and may go on (its retry budget is not spent).
wants_to_go_on() {
  grep -q '"requeue": true' "$_run_dir/state.json" 2>/dev/null
}
reason_of_stop() {
  case $(<"$_run_dir/state.json") in
    *'"failure": "time-limit"'*) echo time-limit ;;
    *'"failure": "preempted"'*) echo preempted ;;
    *) echo node-failed ;; # a node failed the doctor's checks
  esac
}
# Whether a user has cancelled the run with launcher or scancel, according to the record that `look` stored. The
# supervisor may not know it: the request may have come too late, or a full disk or a slow controller may have delayed it.
is_cancelled() {
  [[ -e $_run_dir/cancel || $_asked == cancelled || $(why TERM) == cancelled ]]
}
# go_on REASON: requeue the job, or submit a new one.
go_on() {
  local _refused _reason=$1 _failed=()
  look
  if is_cancelled; then
    stay_away
    verdict cancelled cancelled 18 'cancelled by the user: the run does not go back into the queue'
  fi
  # Slurm may have requeued the job itself, for example after a node failure. Do not ask it twice.
  if [[ $(member Restarts) -gt $_restart ]]; then
    mapfile -t _failed < <(down "$_files.hosts")
    if ((${#_failed[@]})); then
      _reason='node-failed'
      exclude "${_failed[@]}"
    fi
  elif ! _refused=$(scontrol requeue "$_id" 2>&1); then
    say "Slurm does not requeue job $_id: $_refused"
    link "$_reason" || give_up "Slurm does not put job $_id back into the queue, and refused another: ${_said:-no sbatch here}"
    return
  fi
  event requeued '"reason": "'"$_reason"'", "nodes": '"$(json "${_failed[*]-}")"
  state submitted '"reason": "back in the queue: '"$_reason"'"'
  say "job $_id is back in the queue: $_reason"
}
# Cancel the job if Slurm has requeued it although the run was cancelled.
stay_away() {
  [[ -e $_run_dir/cancel ]] || return 0
  look
  if [[ $(member Restarts) -gt $_restart ]]; then scancel "$_id"; fi
}
# give_up WHY: record that the run does not go on. `launcher status` shows WHY after the reason of the stop.
give_up() {
  say "the run stays where it is: 'launcher resume' goes on from its last checkpoint"
  why=$(json "; $1") awk '/^  "reason": ".*",?$/ { end = /,$/ ? "," : ""; sub(/",?$/, ""); $0 = $0 substr(ENVIRON["why"], 2) end }
    { sub(/"requeue": true/, "\"requeue\": false"); print }' "$_run_dir/state.json" >"$_run_dir/.state.json.$_job" &&
    mv "$_run_dir/.state.json.$_job" "$_run_dir/state.json"
}
# link REASON [SBATCH OPTION...]: submit a new job for the same run. If sbatch refuses it, return 1 with the message in
# `_said`. Slurm's variables of this job must not reach the new one; SBATCH_ variables were considered at submission.
link() {
  local _reason=$1 _child
  _said=''
  shift
  if ! command -v sbatch >/dev/null; then
    say 'there is no sbatch on this node to submit a linked job with'
    return 1
  fi
  if [[ -n ${SLURM_JOB_ACCOUNT:-} ]]; then set -- --account="$SLURM_JOB_ACCOUNT" "$@"; fi
  _said=$(
    for _name in $(compgen -e); do
      case $_name in
        SLURM_CONF) ;;
        SLURM_* | SLURMD_* | SRUN_* | SBATCH_*) unset "$_name" ;;
      esac
    done
    sbatch --parsable "$@" "$_scripts/job.sbatch" "$_job-$_restart" 2>&1
  ) && _child=$(grep -oE '^[0-9]+' <<<"$_said" | tail -n 1) || _child=$(squeue --noheader --user="$(id -un)" --format='%F|%o' | awk -F '|' -v run="/$_run_id/" -v me="$_job" 'index($2, run) && $1 != me { print $1; exit }')
  if [[ -z $_child ]]; then
    _said=${_said//$'\n'/; }
    say "sbatch refused a linked job: $_said"
    return 1
  fi
  event requeued '"reason": "'"$_reason"'", "linked": true' "$_handle_prefix$_child"
  state submitted '"reason": "goes on in job '"$_child"': '"$_reason"'"'
  say "the run goes on in job $_child: $_reason"
}

# -- Nodes that this run must not use again

# exclude NODE...: `launcher resume` clears the list, because the nodes may have been repaired.
exclude() {
  printf '%s\n' "$@" >>"$_excluded"
}
unfit() {
  { cat "$_excluded"; if [[ -n $_exclude ]]; then printf '%s\n' "$_exclude"; fi; } | sort -u | paste -sd , -
}
# starts_lost REASON|REASON: print how often the run was requeued for these reasons since it was last submitted.
starts_lost() {
  awk -v reasons="\"reason\": \"($1)\"" '/"event": "(submitted|resubmitted)"/ { n = 0 }
    /"event": "requeued"/ && $0 ~ reasons { n++ }
    END { print n + 0 }' "$_run_dir/events.jsonl"
}
# Print how many starts were lost to bad nodes. Their budget is retries.same.
lost_starts() {
  starts_lost 'node-failed|unhealthy-node'
}
# Record why the earlier start ended, if Slurm restarted the job by itself after a node failure or a preemption. The
# run's records do not say it.
remember_failed_nodes() {
  ((_restart > 0)) || return 0
  local _last _reason=preempted _failed=()
  _last=$(grep -E '"event": "(job|requeued|submitted|resubmitted)"' "$_run_dir/events.jsonl" | tail -n 1)
  [[ $_last == *'"event": "job"'* ]] || return 0
  mapfile -t _failed < <(down "$_run_dir/slurm-$_job-$((_restart - 1)).hosts")
  if ((${#_failed[@]})); then
    _reason='node-failed'
    exclude "${_failed[@]}"
    say "failed since the previous start: ${_failed[*]}"
  fi
  event requeued '"reason": "'"$_reason"'", "by": "slurm", "nodes": '"$(json "${_failed[*]-}")"
  if [[ $_reason == node-failed ]] && (($(lost_starts) > _retries_same)); then
    fail node-failed 14 "node ${_failed[*]} failed, and the budget retries.same is spent"
  fi
}
# down FILE: print the nodes in the file that are down, or that were started again after the file was written.
down() {
  local _list
  _list=$(paste -sd , "$1" 2>/dev/null)
  [[ -n $_list ]] || return 0
  scontrol --oneliner show node "$_list" 2>/dev/null | awk -v since="$(date -r "$1" +%FT%T)" '{
    node = state = started = ""
    for (i = 1; i <= NF; i++) {
      if ($i ~ /^NodeName=/) node = substr($i, 10)
      else if ($i ~ /^State=/) state = substr($i, 7)
      else if ($i ~ /^SlurmdStartTime=2/) started = substr($i, 17)
    }
    if (state ~ /DOWN|FAIL|UNKNOWN|NOT_RESPONDING|[*]/ || started > since) print node
  }'
}
# Leave if the job has got a node that failed before. If no other job can be submitted, go on with it.
leave_lost_nodes() {
  [[ -s $_excluded ]] && grep -qFx -f "$_excluded" "$_files.hosts" || return 0
  go_on_without node-failed
}
# go_on_without REASON [NODE...]: submit a job that excludes these nodes, and exit. Return if the budget is spent or
# sbatch refuses the job.
go_on_without() {
  local _reason=$1
  shift
  [[ -n $_requeue ]] || return 0
  if (($#)); then exclude "$@"; fi
  if (($(lost_starts) < _retries_same)) && link "$_reason" --exclude="$(unfit)"; then exit 14; fi
}

# -- Slurm ends the job while no supervisor runs

# If Slurm is ending the job, record that as the cause, and exit: what else has failed is a consequence.
leave_if_ended() {
  local _reason
  set +e # `setup:` runs with -e
  look
  if ((_handled == ${#_signals[@]})) && [[ $(member JobState) =~ ^(RUNNING|SUSPENDED|RESIZING|SIGNALING|)$ ]] &&
    [[ ! $(member Restarts) -gt $_restart ]]; then return 0; fi
  trap '' USR2 TERM
  if ((${#_signals[@]})); then _reason=$(why "${_signals[-1]}"); else _reason=$(why TERM); fi
  case $_reason in
    cancelled) verdict cancelled cancelled 18 "job $_id was cancelled while no supervisor of the run was active" ;;
    time-limit) leave time-limit 16 "$_retries_time_limits" time_limits ;;
    node-failed) leave node-failed 14 "$_retries_same" same ;;
    *) leave preempted 15 "$_retries_preemptions" preemptions ;;
  esac
}
# Leave nodes on which srun could not start the step although Slurm regards them as up. srun then ends the step on all
# nodes.
leave_dead_nodes() {
  local _dead
  mapfile -t _dead < <(awk -v job="[launcher] job $_id, start $_restart," 'index($0, job) == 1 { n = 0 }
    match($0, /Task launch for .* failed on node [^:]*:/) { split(substr($0, RSTART, RLENGTH), words, / failed on node |:/); found[n++] = words[2] }
    END { for (i = 0; i < n; i++) print found[i] }' "$_run_dir/slurm-$_job.out" 2>/dev/null | sort -u)
  ((${#_dead[@]})) || return 0
  leave_if_ended
  go_on_without node-failed "${_dead[@]}"
  fail node-failed 14 "srun could start nothing on ${_dead[*]}"
}
# Leave the nodes that failed the doctor's checks; state.json has their numbers. Return 0 if the run must go on in this
# job with them, because no other job could be submitted, and 1 if there are none.
leave_unfit() {
  local _node _numbers=() _left=()
  read -ra _numbers < <(sed -n 's/.*"leaves": "\([0-9 ]*\)".*/\1/p' "$_run_dir/state.json")
  for _node in ${_numbers[@]+"${_numbers[@]}"}; do _left+=("${_hosts[_node]}"); done
  look
  if ((${#_left[@]} == 0)) || is_cancelled; then return 1; fi
  say "unfit: ${_left[*]}"
  go_on_without node-failed "${_left[@]}"
  look
  [[ $(member JobState) == RUNNING && ! $(member Restarts) -gt $_restart ]] || return 1
  event requeued '"reason": "node-failed"'
  event job '"start": '"$_restart"', "nodes": '"$(json "${SLURM_JOB_NODELIST:-}")"
  state submitted '"reason": "goes on with unfit nodes, since no job without them could be submitted"'
  say 'the run goes on in this job'
  # When the step ends on one node, srun sends TERM to the others, and on-node.sh reports it. That is no preemption.
  if [[ " ${_signals[*]-} " != *' USR2 '* && $(why TERM) == preempted && ! $(member PreemptTime) =~ [0-9] ]]; then
    rm -f "$_files.stop"
    _asked=''
  fi
  rm -f "$_files.exit"
  _stays=$((_stays + 1))
}
# ended_for_slurm HANDLE: whether this job has ended according to Slurm. Its processes may still run on a lost node.
ended_for_slurm() {
  [[ $1 == slurm:* && $(scontrol show job "${1##*:}" 2>&1) =~ Invalid\ job\ id|JobState=(NODE_FAIL|FAILED|CANCELLED|COMPLETED|TIMEOUT|PREEMPTED|OUT_OF_MEMORY) ]]
}
# Ask the supervisor of an earlier start, on a node that Slurm has given up, to write a checkpoint and end. Then the next
# step of this job tries again.
ask_lost_supervisor() {
  local _hosts_file
  _asked_lost=${_asked_lost:-$SECONDS}
  if ((SECONDS - _asked_lost > _signal_seconds + 60)); then
    fail node-failed 14 "a supervisor of an earlier start has the run, on a node that Slurm has given up, and does not end: end it there"
  fi
  say 'an earlier start has the run, on a node that Slurm has given up: asking it for a checkpoint'
  for _hosts_file in "$_run_dir"/slurm-*.hosts; do
    if [[ $_hosts_file != "$_files.hosts" ]]; then echo node-failed >"${_hosts_file%.hosts}.stop"; fi
  done
  sleep 5
  leave_if_succeeded # it may have succeeded meanwhile
  rm -f "$_files.exit"
  _stays=$((_stays + 1))
}
leave_if_succeeded() {
  if grep -qF '"state": "succeeded"' "$_run_dir/state.json" 2>/dev/null; then
    say 'the run has succeeded: nothing is left to do'
    exit 0
  fi
}
leave_if_asked() {
  if ((_handled < ${#_signals[@]})); then leave_if_ended; fi
}
# leave REASON CODE LIMIT BUDGET [WHY]: requeue the run if its budget retries.BUDGET of LIMIT allows it; exit with CODE.
leave() {
  local _why=${5:-no supervisor of the run was active}
  if [[ -z $_requeue ]]; then
    verdict failed "$1" "$2" "job $_id: $1; $_why"
  fi
  if [[ $(member Restarts) -gt $_restart || $(starts_lost "$1") -lt $3 ]]; then
    state interrupted '"failure": "'"$1"'", "reason": '"$(json "$_why (job $_id)")"', "requeue": true'
    go_on "$1"
    exit "$2"
  fi
  verdict failed "$1" "$2" "job $_id: $1, $_why, and the budget retries.$4 of $3 is spent"
}

# -- Checks of the nodes before anything starts there

# blame_profile NODE...: fail if all nodes so far, at least two, have the same fault: then the profile is wrong, and other
# nodes would have it, too. `_of`, from check_nodes, maps each fault to its nodes.
blame_profile() {
  local _why=("${!_of[@]}") _met _node
  ((${#_why[@]} == 1 && $# == _nodes)) && [[ ${_why[0]} =~ ^(there is no |cannot write |the interpreter |the doctor: ) ]] || return 0
  for _node in "$@"; do printf '%s\t%s\n' "$_node" "${_why[0]}"; done >>"$_run_dir/slurm-unfit"
  mapfile -t _met < <(why=${_why[0]} awk -F '\t' '$2 == ENVIRON["why"] { print $1 }' "$_run_dir/slurm-unfit" | sort -u)
  if ((${#_met[@]} > 1)); then
    fail user-error 17 "${_why[0]}: on every node so far (${_met[*]}), so look at the cluster profile"
  fi
}
# Check all nodes. If some are unfit, this job ends, and the run goes on in another job without them.
check_nodes() {
  local _bad=() _silent=0 _words='' _node _found _why _list
  local -A _of=()
  if ((_nodes > 1)); then
    timeout -k 10 "$_check_seconds" srun --nodes="$_nodes" --ntasks-per-node=1 --mpi=none --kill-on-bad-exit=0 --wait=0 \
      --export=ALL --input=none bash "$_scripts/check-node.sh" "$_files" >"$_files.nodes"
  else
    timeout -k 10 "$_check_seconds" bash "$_scripts/check-node.sh" "$_files" </dev/null >"$_files.nodes"
  fi
  leave_if_asked
  for _node in "${_hosts[@]}"; do
    _found=$(grep -m 1 -E "^$_node (ok|bad: )" "$_files.nodes")
    if [[ $_found != "$_node ok" ]]; then
      _bad+=("$_node")
      _why=${_found#"$_node bad: "}
      if [[ -z $_found ]]; then _silent=$((_silent + 1)); fi
      _of[${_why:-no answer}]+=,$_node
    fi
  done
  if ((_nodes > 1 && _silent * 2 > _nodes)); then
    leave_dead_nodes
    say "the check of the nodes failed, because $_silent of $_nodes gave no answer: continuing without it"
    return 0
  fi
  for _why in "${!_of[@]}"; do
    _list=$(scontrol show hostlist "${_of[$_why]#,}") || _list=${_of[$_why]#,}
    _words+="${_words:+; }node $_list: $_why"
  done
  leave_lost_nodes
  if ((${#_bad[@]} == 0)); then return 0; fi
  leave_if_ended
  say "unfit: $_words"
  blame_profile "${_bad[@]}"
  go_on_without unhealthy-node "${_bad[@]}"
  fail node-failed 14 "$_words"
}

# -- Rendezvous of the nodes

# address_of HOST: print an address at which other nodes can reach the host.
address_of() {
  getent ahosts "$1" | awk '$1 !~ /^(127\.|::1|fe80:)/ { print $1; exit }'
}
# own_address ADDRESS: print this node's address on the route to ADDRESS. The node's own name may resolve to 127.0.1.1
# or to a Docker bridge.
own_address() {
  local _own='' _socket _inode
  if command -v ip >/dev/null; then
    _own=$(ip -o route get "$1" 2>/dev/null | awk '{ for (i = 1; i < NF; i++) if ($i == "src") { print $(i + 1); exit } }')
  fi
  # Connecting a UDP socket only looks up the routing table; nothing is sent.
  if [[ -z $_own && $1 != *:* ]] && exec {_socket}<>"/dev/udp/$1/9"; then
    _inode=$(readlink "/proc/self/fd/$_socket")
    _own=$(awk -v inode="${_inode//[!0-9]/}" '$10 == inode { print $2; exit }' /proc/net/udp)
    if [[ -n $_own ]]; then _own=$((16#${_own:6:2})).$((16#${_own:4:2})).$((16#${_own:2:2})).$((16#${_own:0:2})); fi
    exec {_socket}>&-
  fi 2>/dev/null
  if [[ $_own != 127.* && $_own != ::1 ]]; then printf '%s' "$_own"; fi
}
# listened_on PORT: whether a process on this node listens on the port.
listened_on() {
  awk -v port="$(printf ':%04X' "$1")" '$4 == "0A" && substr($2, length($2) - 4) == port { found = 1 } END { exit !found }' \
    /proc/net/tcp /proc/net/tcp6 2>/dev/null
}
# Set `_place` to this node's address on the route to the second node, and the port of the first attempt.
choose_rendezvous() {
  local _next _address='' _port
  ((_nodes > 1)) || return 0
  _next=$(address_of "${_hosts[1]}")
  if [[ -n $_next ]]; then _address=$(own_address "$_next"); fi
  if [[ -z $_address ]]; then _address=$(address_of "${_hosts[0]}"); fi
  [[ -n $_address ]] || die "host ${_hosts[0]} has no address that another node can reach (only loopback, or none at all)"
  # Ports above the ephemeral range (32768-60999) that differ for each job and each of its starts. The supervisor counts
  # on from this port for each attempt.
  _port=$((61000 + (_job * 31 + _restart * 17 + _stays) % 4536))
  while listened_on "$_port"; do
    _port=$((61000 + (_port - 61000 + 1) % 4536))
  done
  _place=("$_address" "$_port")
}

# -- `setup:` of the cluster profile

# Source the file that defines the function `module`. On many sites only login shells have it.
find_module_command() {
  local _file
  for _file in ${MODULESHOME:+"$MODULESHOME/init/bash"} ${LMOD_PKG:+"$LMOD_PKG/init/bash"} \
    /etc/profile.d/*modules.sh /etc/profile.d/*lmod.sh /usr/share/{modules,Modules,lmod/lmod}/init/bash; do
    if type module >/dev/null 2>&1; then return 0; fi
    # shellcheck source=/dev/null
    if [[ -r $_file ]]; then source "$_file" || true; fi
  done
}
# setup_failed EXIT_CODE PRINTED COMMAND...: call COMMAND with a message that names the failed line of `setup:`.
# `_setup_at` is the number of the script's line before the first of them.
setup_failed() {
  trap - ERR EXIT
  # The line of the script itself, even if the error was in a function or in a sourced file.
  local _line=${BASH_LINENO[${#BASH_LINENO[@]} - 2]} _text='' _words
  if ((_line <= _setup_at)); then _line=${_setup_line:-0}; fi
  if ((_line > _setup_at)); then _text=$(sed -n "$_line{s/^ *//;p}" "${BASH_SOURCE[${#BASH_SOURCE[@]} - 1]}" 2>/dev/null) || true; fi
  _words="line $((_line - _setup_at)) of setup in the cluster profile failed with exit code $1: $_text"
  if ((_line <= _setup_at)); then _words="setup of the cluster profile failed with exit code $1"; fi
  if [[ -n $2 ]]; then _words+=" (it printed: $2)"; fi
  if [[ $_text =~ (^|[^[:alnum:]_-])(module|ml)[[:space:]] ]] && ! type module >/dev/null 2>&1; then
    _words+='; no file in the usual places defines module: add a line before this one that sources the file which does'
  fi
  "${@:3}" "$_words"
}
# -- The job from start to end

# later_job SUBMISSION: print the job of a later submission of the run, if there is one.
later_job() {
  [[ $1 =~ ^[0-9]+$ ]] || return 0 # linked to a job that had the run
  awk -v number="$1" -v prefix="\"handle\": \"$_handle_prefix" '/"event": "submitting"/ { n++; next }
    n > number && /"event": "(resubmitted|requeued|job)"/ && (at = index($0, prefix)) {
      job = substr($0, at + length(prefix)); sub(/".*/, "", job)
    }
    END { print job }' "$_run_dir/events.jsonl"
}
# begin [SUBMISSION]: claim the run, record the nodes, and stop if the run was cancelled or has ended.
begin() {
  local _owner
  say "job $_id, start $_restart, nodes ${SLURM_JOB_NODELIST:-unknown}"
  # If sbatch's answer was lost, one submission may have become two jobs: the first one that starts gets the run. If the
  # run was resumed before Slurm had this job, the job of the later submission has the run.
  if (($#)); then
    (set -o noclobber && printf '%s\n' "$_id" >"$_run_dir/slurm-submission-$1") 2>/dev/null
    _owner=$(<"$_run_dir/slurm-submission-$1")
    if [[ -z $_owner || $_owner == "$_id" ]]; then _owner=$(later_job "$1"); fi
    if [[ -n $_owner && $_owner != "$_id" ]]; then
      say "job $_owner has the run: nothing is left to do here"
      event twin '"job": '"$(json "$_id")" "$_handle_prefix$_owner"
      exit 0
    fi
  fi
  # A restart can come after the end of the run: `scontrol requeue` of a whole array restarts its ended jobs, and Slurm
  # restarts a job whose node it has lost.
  if ((_restart > 0)); then leave_if_succeeded; fi
  mapfile -t _hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
  ((${#_hosts[@]} == _nodes)) || die "Slurm names ${#_hosts[@]} hosts ('${SLURM_JOB_NODELIST:-}'), the job needs $_nodes"
  printf '%s\n' "${_hosts[@]}" >"$_files.hosts"
  if [[ -n $_requeue ]]; then remember_failed_nodes; fi
  # The request came after the last supervisor had ended, or just before this start.
  if [[ -e $_run_dir/cancel ]]; then verdict cancelled cancelled 18 'cancelled by the user before the run had begun in this job'; fi
  # Since Slurm 22.05 srun does not inherit --cpus-per-task: all ranks would share one core.
  if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
  event job '"start": '"$_restart"', "nodes": '"$(json "${SLURM_JOB_NODELIST:-}")"
}
# before_setup [with-modules]: from here on errors end the job, and the output belongs to `setup:`.
before_setup() {
  _setup_from=$(stat -c %s "$_run_dir/slurm-$_job.out" 2>/dev/null) || _setup_from=0
  set -e +u
  if (($#)); then find_module_command; fi
}
after_setup() {
  set +e -u
  # Keep an EXIT trap that `setup:` has set itself.
  if [[ $(trap -p EXIT) == *setup_failed* ]]; then trap - EXIT; fi
  export LAUNCHER_SETUP_DONE=1
}
# Print the end of the output of `setup:`, without the values of the job's secrets. `_secrets` has their variables and
# files.
printed_by_setup() {
  local _said _one _value _secret
  _said=$(tail -c "+$((_setup_from + 1))" "$_run_dir/slurm-$_job.out" 2>/dev/null | tr -d '\0' | grep . | tail -n 5)
  for _one in ${_secrets[@]+"${_secrets[@]}"}; do
    if [[ $_one == */* ]]; then _value=$(cat "$_one" 2>/dev/null); else _value=${!_one-}; fi
    while read -r _secret; do
      if ((${#_secret} >= 8)); then _said=${_said//"$_secret"/***}; fi
    done <<<"$_value"
    if [[ -n $_value ]]; then _said=${_said//"$_value"/***}; fi
  done
  _said=${_said//$'\n'/; }
  printf '%s' "$_said" | tail -c 600
}
# into_container [NAME...]: make these variables have the same values inside the container.
into_container() {
  # Otherwise packages in ~/.local would take precedence over the image's.
  export PYTHONNOUSERSITE=1
  # Variables that an Apptainer image sets override those of the host, except APPTAINERENV_ variables.
  local _name
  for _name in "$@"; do
    if [[ -v $_name ]]; then export "APPTAINERENV_$_name=${!_name}"; fi
  done
}
# finish STEP: wait for the process STEP, pass on Slurm's stop requests, and end the job as the run ended. Return if the
# run goes on in this job.
finish() {
  local _rc _owner
  # A trapped signal interrupts `wait`, which returns 128+n: wait again.
  while :; do
    while ((_handled < ${#_signals[@]})); do ask "${_signals[_handled++]}"; done
    wait "$1"
    _rc=$?
    ((_handled < ${#_signals[@]})) || break
  done
  # Signals that Slurm sends when it requeues the job must not interrupt the rest.
  trap '' USR2 TERM
  # If the step fails on one node, srun ends the others and returns 143. The exit code of the first node's supervisor
  # counts, because it judges the run.
  if [[ -s $_files.exit ]]; then _rc=$(<"$_files.exit"); fi
  say "the step ended with exit code $_rc"
  # Exit code 88: another job has the run. Leave its records alone, and record its handle.
  if ((_rc == 88)); then
    _owner=$(grep -o '"handle": "[^"]*"' "$_run_dir/events.jsonl" | grep -vF "\"$_handle\"" | tail -n 1 | cut -d '"' -f 4)
    if [[ -n $_owner ]] && ! ended_for_slurm "$_owner"; then
      event twin '"job": '"$(json "$_id")" "$_owner"
      exit "$_rc"
    fi
    ask_lost_supervisor
    await_signals
    return
  fi
  if ! judged; then judge "$_rc"; fi
  # Requeue the job if the supervisor was asked to stop and the run may go on.
  if [[ -n $_requeue ]]; then
    if wants_to_go_on; then
      if leave_unfit; then
        await_signals
        return
      fi
      go_on "$(reason_of_stop)"
    else
      stay_away
    fi
  fi
  exit "$_rc"
}
