#!/usr/bin/env bash
# Run task-20261121-085401. Rendered by launcher 0.1.0.
# A pod whose command returns is restarted and billed on: this script never returns before the pod has ended.
set -u

run_dir='/workspace/runs/task-20261121-085401'
python='python3'
node_rank=0
api=${LAUNCHER_RUNPOD_API:-https://api.runpod.io/v2}
pod=${RUNPOD_POD_ID:-unknown}
submission=${LAUNCHER_SUBMISSION:-1}
limit=${LAUNCHER_MAX_SECONDS:-86400}
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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIHRpbnktZ3B0LCBydW4gdGFzay0yMDI2MTEyMS0wODU0MDEuIFJlbmRlcmVkIGJ5IGxhdW5jaGVyIDAuMS4wLgojIFRoZSBzdXBlcnZpc29yIHJ1bnMgaXQ7IGBiYXNoIHN0YXJ0LnNoYCBieSBoYW5kIHJ1bnMgYXR0ZW1wdCAwIG9mIHRoZSBzYW1lIHJ1bi4KIyBzaGVsbGNoZWNrIGRpc2FibGU9U0MyMDE2ICMgdmFsdWVzIHN0YW5kIGluIHNpbmdsZSBxdW90ZXMsIHdoZXJlIG5vdGhpbmcgaW4gdGhlbSBpcyBleHBhbmRlZApzZXQgLWV1byBwaXBlZmFpbAoKZGllKCkgewogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCA3OAp9CgpweXRob249J3B5dGhvbjMnCgppZiBbWyAteiAke0xBVU5DSEVSX0FUVEVNUFQ6LX0gXV07IHRoZW4KICBlY2hvICdsYXVuY2hlcjogc3RhcnRlZCBieSBoYW5kOiB0aGlzIGlzIGF0dGVtcHQgMCwgYW5kIG5vIHN1cGVydmlzb3IganVkZ2VzIG9yIHJlc3RhcnRzIGl0JyA+JjIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MAogIGV4cG9ydCBMQVVOQ0hFUl9SRU5ERVpWT1VTX1BPUlQ9JHtMQVVOQ0hFUl9SRU5ERVpWT1VTX1BPUlQ6LSQoKDYxMDAwICsgUkFORE9NICUgNDUzNikpfQpmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgpleHBvcnQgTkNDTF9ERUJVRz0nV0FSTicKCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgYXMgaXRzIGF1dGhvciB3cm90ZSBpdC4gQSBiYXRjaCBzY3JpcHQgbWF5IGhhdmUgcnVuIGl0IGJlZm9yZSB0aGUgY29udGFpbmVyLgppZiBbWyAteiAke0xBVU5DSEVSX1NFVFVQX0RPTkU6LX0gXV07IHRoZW4KICB0cmFwICdkaWUgImEgc2V0dXAgbGluZSBvZiB0aGUgY2x1c3RlciBwcm9maWxlIGZhaWxlZCB3aXRoIGV4aXQgY29kZSAkPyInIEVSUgogIHNldCArdQogIHB5dGhvbjMgLWMgJ2ltcG9ydCBsYXVuY2hlcicgMj4vZGV2L251bGwgfHwgUElQX0JSRUFLX1NZU1RFTV9QQUNLQUdFUz0xIHB5dGhvbjMgLW0gcGlwIGluc3RhbGwgLS1xdWlldCAvd29ya3NwYWNlL3doZWVscy9sYXVuY2hlci0qLndobAogIHNldCAtdQogIHRyYXAgLSBFUlIKZmkKCiMgQSBHUFUgdGhhdCBmZWxsIG9mZiB0aGUgYnVzIGlzIGNoZWFwZXIgdG8gZmluZCBoZXJlIHRoYW4gaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuCmlmIGNvbW1hbmQgLXYgbnZpZGlhLXNtaSA+L2Rldi9udWxsOyB0aGVuCiAgZ3B1cz0kKG52aWRpYS1zbWkgLUwgMj4vZGV2L251bGwgfCBncmVwIC1jRSAnXihHUFV8ICBNSUcpJyB8fCB0cnVlKQogICgoZ3B1cyA+PSA4KSkgfHwgZGllICJ0aGlzIG5vZGUgc2hvd3MgJGdwdXMgR1BVcywgdGhlIGpvYiBuZWVkcyAiOAplbGlmICEgY29tbWFuZCAtdiByb2NtLXNtaSA+L2Rldi9udWxsICYmICEgY29tcGdlbiAtRyAnL2Rldi9udmlkaWFbMC05XSonID4vZGV2L251bGw7IHRoZW4KICAjIFRyYWluaW5nIHdvdWxkIGdvIG9uIG9uIHRoZSBDUFUsIHNpbGVudGx5IGFuZCBmb3IgZXZlci4KICBkaWUgIm5vIEdQVSBvbiB0aGlzIG5vZGU6IG5laXRoZXIgbnZpZGlhLXNtaSwgcm9jbS1zbWkgbm9yIC9kZXYvbnZpZGlhMCBpcyBoZXJlOyBHUFVzIHBlciBub2RlIG9mIHRoZSBqb2I6ICI4CmZpCgojIE9uZSBob3N0OiB0b3JjaHJ1biBsaXN0ZW5zIGF0IGEgcG9ydCB0aGF0IHRoZSBzdXBlcnZpc29yIGZvdW5kIGZyZWUsIGFuZCBlbmRzIGF0IG9uY2Ugd2hlcmUgYW5vdGhlciBydW4gaGFzIGl0LgojIEEgc3RhdGljIHJlbmRlenZvdXMsIHNpbmNlIGMxMGQncyB3YWl0cyBmb3IgdXAgdG8gMC4zIHMsIGF0IHJhbmRvbSwgc28gdGhhdCBtYW55IG5vZGVzIGRvIG5vdCBjb21lIGF0IG9uY2UuCnJlbmRlenZvdXM9KAogIC0tbm5vZGVzIDEgLS1ub2RlLXJhbmsgMCAtLXJkenYtYmFja2VuZCBzdGF0aWMgLS1sb2NhbC1hZGRyIDEyNy4wLjAuMQogIC0tcmR6di1lbmRwb2ludCAiMTI3LjAuMC4xOiR7TEFVTkNIRVJfUkVOREVaVk9VU19QT1JUOj90aGUgc3VwZXJ2aXNvciBzZXRzIGl0fSIKKQoKIyBXaGF0IGV2ZXJ5IHJhbmsgcnVucy4gbGF1bmNoZXIncyB3b3JrZXIgZmlsbHMgcGxhY2Vob2xkZXJzIHN1Y2ggYXMge21pY3JvX2JhdGNoX3NpemV9IGZvciBlYWNoIGF0dGVtcHQuCmFyZ3Y9KCdweXRob24zJyAnLW0nICdsYXVuY2hlci50cmFpbicpCndvcmtlcj0oLW0gbGF1bmNoZXIuc3VwZXJ2aXNlLndvcmtlciAtLSAiJHthcmd2W0BdfSIpCiMgdG9yY2hydW4gdGFrZXMgJCQgYW5kICR7bG9jYWxfcmFua30gaW4gYXJndW1lbnRzIGZvciBpdHMgb3duOiB3aXRoIGV2ZXJ5ICQgZG91YmxlZCB0aGV5IGFycml2ZSBhcyB3cml0dGVuLgp0d289JyQkJwp3b3JrZXI9KCIke3dvcmtlcltAXS8vWyRdLyR0d299IikKIyBFcnJvciBmaWxlcyBvZiB0b3JjaHJ1bjogb24gdGhlIHJ1biBkaXJlY3RvcnksIG5vdCBpbiBhIHRlbXBvcmFyeSBmb2xkZXIgdGhhdCBpcyBsb3N0IHdpdGggdGhlIG5vZGUuCmxvZ19kaXI9JExBVU5DSEVSX1JVTl9ESVIvYXR0ZW1wdHMvJChwcmludGYgJyUwM2QnICIkTEFVTkNIRVJfQVRURU1QVCIpL3RvcmNocnVuL25vZGUtJHtMQVVOQ0hFUl9OT0RFX1JBTks6LTB9Cm1rZGlyIC1wICIkbG9nX2RpciIgfHwgdHJ1ZQp0b3JjaHJ1bj0oCiAgLS1ucHJvYy1wZXItbm9kZSA4IC0tbWF4LXJlc3RhcnRzIDAgLS1sb2ctZGlyICIkbG9nX2RpciIKICAtLXJkenYtaWQgIiRMQVVOQ0hFUl9SVU5fSUQtJExBVU5DSEVSX0FUVEVNUFQiCiAgIiR7cmVuZGV6dm91c1tAXX0iCikKCmNkICcvd29ya3NwYWNlLy5sYXVuY2hlci9jb2RlL2U1ZjQ3ZDI0NTU3Nzk3NDViMDU5JyB8fCBkaWUgJ3RoZSB3b3JraW5nIGRpcmVjdG9yeSBvZiB0aGUgam9iIGRvZXMgbm90IGV4aXN0IG9uIHRoaXMgbm9kZTogJycvd29ya3NwYWNlLy5sYXVuY2hlci9jb2RlL2U1ZjQ3ZDI0NTU3Nzk3NDViMDU5JwoKIyBTZWNyZXRzOiB2YWx1ZXMgY29tZSBmcm9tIHRoZSBzdXBlcnZpc29yJ3MgZW52aXJvbm1lbnQsIG9yIGZyb20gd2hlcmUgdGhlIGpvYiBzYXlzLiBUaGV5IHN0YW5kIGluIG5vIGZpbGUgaGVyZS4KW1sgLXYgSEZfVE9LRU4gXV0gfHwgZGllICdzZWNyZXQgJydIRl9UT0tFTicnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBIRl9UT0tFTgpbWyAtdiBXQU5EQl9BUElfS0VZIF1dIHx8IGRpZSAnc2VjcmV0ICcnV0FOREJfQVBJX0tFWScnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBXQU5EQl9BUElfS0VZCgojIEVudmlyb25tZW50IG9mIHRoZSBqb2I6IGxhc3QsIHNvIHRoYXQgaXQgd2lucyBhbmQgbm90aGluZyBoZXJlIHJ1bnMgdW5kZXIgaXQuCmlmIFtbIC16ICR7UFlUT1JDSF9DVURBX0FMTE9DX0NPTkY6LX0ke1BZVE9SQ0hfQUxMT0NfQ09ORjotfSBdXTsgdGhlbgogIGV4cG9ydCBQWVRPUkNIX0NVREFfQUxMT0NfQ09ORj0nZXhwYW5kYWJsZV9zZWdtZW50czpUcnVlJwpmaQoKIyBBcyBgcHl0aG9uIC1tIHRvcmNoLmRpc3RyaWJ1dGVkLnJ1bmAsIGJ1dCB0aGF0IG5vYm9keSBsb29rcyBmb3IgZ2FyYmFnZSB3aGlsZSB0b3JjaCBpcyBpbXBvcnRlZDogYSBzaXh0aCBvZiB0aGUgdGltZS4KcnVuX3RvcmNocnVuPSdpbXBvcnQgZ2M7IGdjLmRpc2FibGUoKTsgZnJvbSB0b3JjaC5kaXN0cmlidXRlZC5ydW4gaW1wb3J0IG1haW47IGdjLmVuYWJsZSgpOyBtYWluKCknCmV4ZWMgIiRweXRob24iIC1jICIkcnVuX3RvcmNocnVuIiAiJHt0b3JjaHJ1bltAXX0iIC0tbm8tcHl0aG9uICIkcHl0aG9uIiAiJHt3b3JrZXJbQF19Igo= || return 1
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
  event twin '"pod": '"$(json "$me")"', "handle": '"$(json 'runpod:runpod-8xh100:'"$owner")"
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
    event twin '"pod": '"$(json "$me")"', "handle": '"$(json 'runpod:runpod-8xh100:'"$owner")"
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
