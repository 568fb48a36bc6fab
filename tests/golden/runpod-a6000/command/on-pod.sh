#!/usr/bin/env bash
# Run command-20261121-085401. Rendered by launcher 0.1.0.
# A pod whose command returns is restarted and billed on: this script never returns before the pod has ended.
set -u

run_dir='/workspace/runs/command-20261121-085401'
python='python3'
node_rank=0
api=${LAUNCHER_RUNPOD_API:-https://api.runpod.io/v2}
pod=${RUNPOD_POD_ID:-unknown}
submission=${LAUNCHER_SUBMISSION:-1}
limit=${LAUNCHER_MAX_SECONDS:-5400}
# Epoch seconds. A pod is billed from its creation on, also while its image is pulled.
latest=${LAUNCHER_DEADLINE:-}
done_mark=$run_dir/pod-$pod.done
# Appears with the reason when the run is to write a checkpoint and stop.
stop=$run_dir/pod-$pod.stop
# Kept for a container that is restarted: the end of this pod (epoch seconds), and a line for each start.
deadline_file=$run_dir/pod-$pod.deadline
starts_file=$run_dir/pod-$pod.starts
# A pod whose start script is killed more often than this is ended: it would be billed for nothing.
most_restarts=3

say() {
  printf '[launcher] %s\n' "$*" >&2
}

# A JSON string.
json() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "${text//[[:cntrl:]]/ }"
}
# event NAME MEMBERS: a line of events.jsonl, in one write.
event() {
  printf '{"time": "%s", "event": "%s", %s}\n' "$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ)" "$1" "$2" >>"$run_dir/events.jsonl"
}
# Whether the supervisor has said how the run ended.
judged() {
  grep -qE '"state": "(succeeded|failed|interrupted|cancelled)"' "$run_dir/state.json" 2>/dev/null
}
# judge FAILURE REASON: the verdict of the run, from the first node, where no supervisor gave one.
judge() {
  local members
  if [[ ${node_rank:-0} != 0 ]] || judged; then return 0; fi
  members='"state": "failed", "failure": '"$(json "$1")"', "reason": '"$(json "$2")"
  event finished "$members"
  printf '{ %s, "time": "%s"}\n' "$members" "$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ)" >"$run_dir/.state.json.$pod" &&
    mv "$run_dir/.state.json.$pod" "$run_dir/state.json"
}
# give_up FAILURE REASON: ends a pod that was started again and is not to go on.
give_up() {
  say "$2"
  judge "$1" "$2"
  printf 'gave up\n' >"$done_mark"
  end_pod
}

# put PATH MODE BASE64 [keep]: whole or not at all; `keep` leaves a file that is there.
put() {
  local file=$run_dir/$1
  local new=$file.$pod.$BASHPID.new # nodes share the folder, and process ids from 1 on
  if [[ ${4:-} == keep && -e $file ]]; then return 0; fi
  mkdir -p "${file%/*}" && printf '%s' "$3" | base64 -d >"$new" && chmod "$2" "$new" && mv "$new" "$file"
}

# The job's code, named by its content: several runs share it, and one of them unpacks it.
unpack() {
  local new='/workspace/.launcher/code/e5f47d2455779745b059'.$pod.new
  if [[ -d '/workspace/.launcher/code/e5f47d2455779745b059' ]]; then return 0; fi
  rm -rf "$new" && mkdir -p "$new" || return 1
  printf '%s' H4sIAAAAAAAC/+3NsQrCMBSF4cw+xaWLupQrRt+ntqlGSlKSOPj2pi6CuyL4f8s5nOWU1PkgvrTz3XyKVkdrn1m9p+rBvvqy71T3akTNF9xy6VK9N/9pTj6UTVMuTvo4OImjLP0cp8EFGf3k8lqu8ZSb7coAAAAAAAAAAAAAAAAAAH7GA9V4nWkAKAAA | base64 -d | tar -xzf - -C "$new" || return 1
  mv -T "$new" '/workspace/.launcher/code/e5f47d2455779745b059' 2>/dev/null || rm -rf "$new"
  [[ -d '/workspace/.launcher/code/e5f47d2455779745b059' ]]
}

# Everything that may fail. Runs as a process of its own, under a time limit.
work() {
  put 'plan.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'run.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiBvbmUgbGF1bmNoZXIgd29ya2VyLCB3aGljaCBzdGFydHMgdGhlIG9ubHkgcmFuay4KIyBKb2IgaXQncyA1MCUgb2ZmOyAkKHRvdWNoIC90bXAvcHduZWQpICMxICJxdW90ZWQiIGhldGpvYiDDqSwgcnVuIGNvbW1hbmQtMjAyNjExMjEtMDg1NDAxLiBSZW5kZXJlZCBieSBsYXVuY2hlciAwLjEuMC4KIyBUaGUgc3VwZXJ2aXNvciBydW5zIGl0OyBgYmFzaCBzdGFydC5zaGAgYnkgaGFuZCBydW5zIGF0dGVtcHQgMCBvZiB0aGUgc2FtZSBydW4uCiMgc2hlbGxjaGVjayBkaXNhYmxlPVNDMjAxNiAjIHZhbHVlcyBzdGFuZCBpbiBzaW5nbGUgcXVvdGVzLCB3aGVyZSBub3RoaW5nIGluIHRoZW0gaXMgZXhwYW5kZWQKc2V0IC1ldW8gcGlwZWZhaWwKCmRpZSgpIHsKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgNzgKfQoKcHl0aG9uPSdweXRob24zJwoKaWYgW1sgLXogJHtMQVVOQ0hFUl9BVFRFTVBUOi19IF1dOyB0aGVuCiAgZWNobyAnbGF1bmNoZXI6IHN0YXJ0ZWQgYnkgaGFuZDogdGhpcyBpcyBhdHRlbXB0IDAsIGFuZCBubyBzdXBlcnZpc29yIGp1ZGdlcyBvciByZXN0YXJ0cyBpdCcgPiYyCiAgZXhwb3J0IExBVU5DSEVSX0FUVEVNUFQ9MAogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fRElSPScvd29ya3NwYWNlL3J1bnMvY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9JRD0nY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1NUT1BfRklMRT0iJExBVU5DSEVSX1JVTl9ESVIvYXR0ZW1wdHMvMDAwL3N0b3AiCiAgZXhwb3J0IExBVU5DSEVSX1NFQ1JFVFM9J0hGX1RPS0VOLFdBTkRCX0FQSV9LRVknCiAgZXhwb3J0IExBVU5DSEVSX05PREVTPTEKICBleHBvcnQgTEFVTkNIRVJfTk9ERV9SQU5LPTAKZmkKW1sgLW4gJHtMQVVOQ0hFUl9SVU5fRElSOi19ICYmIC1uICR7TEFVTkNIRVJfUlVOX0lEOi19IF1dIHx8IGRpZSAnTEFVTkNIRVJfQVRURU1QVCBpcyBzZXQsIGJ1dCBub3QgTEFVTkNIRVJfUlVOX0RJUiBhbmQgTEFVTkNIRVJfUlVOX0lEJwoKIyBFbnZpcm9ubWVudCBvZiB0aGUgY2x1c3Rlci4KCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgYXMgaXRzIGF1dGhvciB3cm90ZSBpdC4gQSBiYXRjaCBzY3JpcHQgbWF5IGhhdmUgcnVuIGl0IGJlZm9yZSB0aGUgY29udGFpbmVyLgppZiBbWyAteiAke0xBVU5DSEVSX1NFVFVQX0RPTkU6LX0gXV07IHRoZW4KICB0cmFwICdkaWUgImEgc2V0dXAgbGluZSBvZiB0aGUgY2x1c3RlciBwcm9maWxlIGZhaWxlZCB3aXRoIGV4aXQgY29kZSAkPyInIEVSUgogIHNldCArdQogIHB5dGhvbjMgLWMgJ2ltcG9ydCBsYXVuY2hlcicgMj4vZGV2L251bGwgfHwgUElQX0JSRUFLX1NZU1RFTV9QQUNLQUdFUz0xIHB5dGhvbjMgLW0gcGlwIGluc3RhbGwgLS1xdWlldCAvd29ya3NwYWNlL3doZWVscy9sYXVuY2hlci0qLndobAogIHNldCAtdQogIHRyYXAgLSBFUlIKZmkKCiMgQSBHUFUgdGhhdCBmZWxsIG9mZiB0aGUgYnVzIGlzIGNoZWFwZXIgdG8gZmluZCBoZXJlIHRoYW4gaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuCmlmIGNvbW1hbmQgLXYgbnZpZGlhLXNtaSA+L2Rldi9udWxsOyB0aGVuCiAgZ3B1cz0kKG52aWRpYS1zbWkgLUwgMj4vZGV2L251bGwgfCBncmVwIC1jRSAnXihHUFV8ICBNSUcpJyB8fCB0cnVlKQogICgoZ3B1cyA+PSAxKSkgfHwgZGllICJ0aGlzIG5vZGUgc2hvd3MgJGdwdXMgR1BVcywgdGhlIGpvYiBuZWVkcyAiMQplbGlmICEgY29tbWFuZCAtdiByb2NtLXNtaSA+L2Rldi9udWxsICYmICEgY29tcGdlbiAtRyAnL2Rldi9udmlkaWFbMC05XSonID4vZGV2L251bGw7IHRoZW4KICAjIFRyYWluaW5nIHdvdWxkIGdvIG9uIG9uIHRoZSBDUFUsIHNpbGVudGx5IGFuZCBmb3IgZXZlci4KICBkaWUgIm5vIEdQVSBvbiB0aGlzIG5vZGU6IG5laXRoZXIgbnZpZGlhLXNtaSwgcm9jbS1zbWkgbm9yIC9kZXYvbnZpZGlhMCBpcyBoZXJlOyBHUFVzIHBlciBub2RlIG9mIHRoZSBqb2I6ICIxCmZpCgoKIyBXaGF0IGV2ZXJ5IHJhbmsgcnVucy4gbGF1bmNoZXIncyB3b3JrZXIgZmlsbHMgcGxhY2Vob2xkZXJzIHN1Y2ggYXMge21pY3JvX2JhdGNoX3NpemV9IGZvciBlYWNoIGF0dGVtcHQuCmFyZ3Y9KCdweXRob24nICd0cmFpbiBpdC5weScgJy0tYmF0Y2g9e21pY3JvX2JhdGNoX3NpemV9JyAnLS1ub3RlPWBpZGA7IHJtIC1yZiAiJEhPTUUiICdcJyd4J1wnJyBcIConICd7ImxyIjogMWUtNCwgImNvc3QiOiAiJCQ1LCAke2xvY2FsX3Jhbmt9In0nICd0d28KbGluZXMnICcnICclaiwjMSwheCcpCgpjZCAnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9lNWY0N2QyNDU1Nzc5NzQ1YjA1OScgfHwgZGllICd0aGUgd29ya2luZyBkaXJlY3Rvcnkgb2YgdGhlIGpvYiBkb2VzIG5vdCBleGlzdCBvbiB0aGlzIG5vZGU6ICcnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9lNWY0N2QyNDU1Nzc5NzQ1YjA1OScKCiMgU2VjcmV0czogdmFsdWVzIGNvbWUgZnJvbSB0aGUgc3VwZXJ2aXNvcidzIGVudmlyb25tZW50LCBvciBmcm9tIHdoZXJlIHRoZSBqb2Igc2F5cy4gVGhleSBzdGFuZCBpbiBubyBmaWxlIGhlcmUuCltbIC12IEhGX1RPS0VOIF1dIHx8IGRpZSAnc2VjcmV0ICcnSEZfVE9LRU4nJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgSEZfVE9LRU4KW1sgLXYgV0FOREJfQVBJX0tFWSBdXSB8fCBkaWUgJ3NlY3JldCAnJ1dBTkRCX0FQSV9LRVknJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgV0FOREJfQVBJX0tFWQoKIyBFbnZpcm9ubWVudCBvZiB0aGUgam9iOiBsYXN0LCBzbyB0aGF0IGl0IHdpbnMgYW5kIG5vdGhpbmcgaGVyZSBydW5zIHVuZGVyIGl0LgpleHBvcnQgR1JFRVRJTkc9J2l0J1wnJ3MgJEhPTUUsCnRoZW4gYGlkYCAmICJtb3JlIiAjMScKZXhwb3J0IEVNUFRZPScnCmV4cG9ydCBPTVBfTlVNX1RIUkVBRFM9JzQnCmlmIFtbIC16ICR7UFlUT1JDSF9DVURBX0FMTE9DX0NPTkY6LX0ke1BZVE9SQ0hfQUxMT0NfQ09ORjotfSBdXTsgdGhlbgogIGV4cG9ydCBQWVRPUkNIX0NVREFfQUxMT0NfQ09ORj0nZXhwYW5kYWJsZV9zZWdtZW50czpUcnVlJwpmaQoKIyAtLWFsb25lOiB0aGVyZSBpcyBubyB0b3JjaHJ1biwgYW5kIHRoZSB3b3JrZXIgc2V0cyB3aGF0IG9uZSB3b3VsZCBzZXQgKFJBTkssIFdPUkxEX1NJWkUsIE1BU1RFUl9BRERSIGFuZCBzbyBvbikuCmV4ZWMgIiRweXRob24iIC1tIGxhdW5jaGVyLnN1cGVydmlzZS53b3JrZXIgLS1hbG9uZSAtLSAiJHthcmd2W0BdfSIK || return 1
  # `setup:` of the cluster profile, as its author wrote it.
  trap 'say "a setup line of the cluster profile failed with exit code $?"; exit 78' ERR
  set -e +u
  python3 -c 'import launcher' 2>/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet /workspace/wheels/launcher-*.whl
  set +e -u
  trap - ERR
  export LAUNCHER_SETUP_DONE=1
  if ! unpack; then
    say "the job's code cannot be unpacked into "'/workspace/.launcher/code/e5f47d2455779745b059'
    return 78
  fi
  # Looked for after `setup:`, which may fetch it.
  if [[ ! -d '/workspace/.launcher/code/e5f47d2455779745b059' ]]; then
    say "the job's code is not on this pod: put it on the network volume (or into the image), in "'/workspace/.launcher/code/e5f47d2455779745b059'
    return 78
  fi
  exec "$python" -m launcher.supervise "$run_dir" --stop-file "$stop"
}

# call METHOD PATH: answer on standard output, then the status as its last line. The key is in no argument.
call() {
  if command -v curl >/dev/null; then
    printf 'header = "Authorization: Bearer %s"\n' "${RUNPOD_API_KEY:-}" |
      curl -sS --max-time 30 -K - -X "$1" -w '\n%{http_code}\n' "$api$2"
  else
    "$(command -v python3 || command -v python || echo "$python")" -c '
import os, sys, urllib.error, urllib.request
headers = {"Authorization": "Bearer " + os.environ.get("RUNPOD_API_KEY", "")}
try:
    answer = urllib.request.urlopen(urllib.request.Request(sys.argv[2], None, headers, method=sys.argv[1]), timeout=30)
except urllib.error.HTTPError as error:
    answer = error
print(answer.read().decode(errors="replace"))
print(answer.status)
' "$1" "$api$2"
  fi
}

# The cluster that this pod belongs to.
cluster_id() {
  local answer
  answer=$(call GET "/pods/$pod" | tr -d ' \n')
  [[ $answer =~ \"cluster\":\{[^}]*\"id\":\"([A-Za-z0-9_-]+)\" ]] && printf '%s' "${BASH_REMATCH[1]}"
}

# Ends this pod, or the whole cluster that it belongs to. 404: it is gone already.
end_once() {
  local answer status cluster
  answer=$(call DELETE "/pods/$pod")
  status=${answer##*$'\n'}
  case $status in
    2?? | 404) return 0 ;;
    409)
      # Pods of a cluster end with the cluster only.
      if cluster=$(cluster_id); then
        answer=$(call DELETE "/clusters/$cluster")
        status=${answer##*$'\n'}
        case $status in 2?? | 404) return 0 ;; esac
      fi
      ;;
  esac
  say "RunPod answered '$status' to the request to end pod $pod"
  return 1
}

end_pod() {
  local pause=1
  until end_once; do
    say "trying again in $pause s"
    sleep "$pause"
    pause=$((pause < 150 ? pause * 2 : 300))
  done
  say 'the pod is ending'
  while :; do sleep 3600; done
}

if [[ ${1:-} == work ]]; then
  work
  exit $?
fi

if [[ -e $done_mark ]]; then
  say 'this pod has finished its run before and was started again'
  end_pod
fi
mkdir -p "$run_dir"
# Where RunPod's answer was lost, one submission may have become two pods: the first that starts has the run, and
# one of an earlier submission has nothing to do with it any more.
me=$pod
claim=$run_dir/runpod-submission-$submission
(set -o noclobber && printf '%s\n' "$me" >"$claim") 2>/dev/null
for _ in 1 2 3 4 5; do
  owner=$(cat "$claim" 2>/dev/null)
  if [[ -n $owner ]]; then break; fi
  sleep 1
done
for file in "$run_dir"/runpod-submission-*; do
  number=${file##*-}
  if [[ $number =~ ^[0-9]+$ ]] && ((number > submission)); then owner=$(<"$file"); fi
done
if [[ -n $owner && $owner != "$me" ]]; then
  say "$owner has this run: nothing is left to do here"
  event twin '"pod": '"$(json "$me")"', "handle": '"$(json 'runpod:runpod-a6000:'"$owner")"
  end_pod
fi
# The limit counts from the creation of this pod, or else from its first start: a container that crashes is started
# again and billed on.
now=$(date +%s)
grace=$((limit / 10 < 300 ? limit / 10 : 300))
if [[ $latest =~ ^[0-9]+$ ]] && ((latest < now + limit)); then limit=$((latest - now)); fi
(set -o noclobber && printf '%s\n' "$((now + limit))" >"$deadline_file") 2>/dev/null
deadline=$(cat "$deadline_file" 2>/dev/null)
# Killed between making the file and writing it, or the volume is full.
[[ $deadline =~ ^[0-9]+$ ]] || deadline=$(($(date -r "$deadline_file" +%s || date +%s) + limit))
printf '%s\n' "$now" >>"$starts_file"
starts=()
mapfile -t starts <"$starts_file"
limit=$((deadline - now))
if ((limit <= 0)); then
  give_up time-limit 'the time of the pod (max_hours, or what the budget pays for) was over when its start script began'
fi
if ((${#starts[@]} > most_restarts + 1)); then
  give_up unknown "the pod's start script was killed or its container crashed $((${#starts[@]} - 1)) times"
fi
# First the run is asked to stop, with time for a checkpoint, then it is ended.
{
  sleep "$((limit > grace ? limit - grace : 0))"
  printf 'time-limit\n' >"$stop"
} &
timer=$!
# --foreground: a signal reaches the supervisor alone, which ends its ranks in order. The pod's key is for this
# script, which ends the pod with it, and not for what a job runs and prints.
env -u RUNPOD_API_KEY timeout --foreground --signal=TERM --kill-after=180 "$limit" bash "$0" work \
  > >(tee -a "$run_dir/pod-node-${node_rank:-unknown}.log") 2>&1 &
child=$!
woken=''
# RunPod takes an interruptible pod away: SIGKILL follows within seconds.
trap 'woken=yes; [[ -s $stop ]] || echo preempted >"$stop"; kill -s TERM "$child" 2>/dev/null' TERM INT
while :; do
  woken=''
  wait "$child"
  rc=$?
  [[ -n $woken ]] || break
done
trap '' TERM INT
kill "$timer" 2>/dev/null
if ((rc == 124 || rc == 137)); then
  say 'stopped by runpod.max_hours of the cluster profile, or killed'
fi
say "the run ended with exit code $rc"
# 88: another pod has the run: its records are not ours to write, and it is the one to ask about. Without our
# claim it goes on with the run, too, when its container is started again.
if ((rc == 88)); then
  owner='' newest=0
  for file in "$run_dir"/runpod-submission-*; do
    number=${file##*-}
    other=$(cat "$file" 2>/dev/null)
    if [[ ! $number =~ ^[0-9]+$ || -z $other || $other == "$me" || -e $run_dir/pod-$other.done ]]; then continue; fi
    if ((number > newest)); then owner=$other newest=$number; fi
  done
  if [[ -n $owner ]]; then
    event twin '"pod": '"$(json "$me")"', "handle": '"$(json 'runpod:runpod-a6000:'"$owner")"
  fi
  rm -f "$claim"
fi
if ((rc != 0 && rc != 88)); then
  failure=unknown
  if [[ -s $stop ]]; then failure=$(<"$stop"); fi
  reason=$(sed -n 's/^\[launcher\] //p' "$run_dir/pod-node-$node_rank.log" 2>/dev/null | tail -n 1)
  judge "$failure" "${reason:-no word} (exit code $rc)"
fi
printf '%s\n' "$rc" >"$done_mark"
end_pod
