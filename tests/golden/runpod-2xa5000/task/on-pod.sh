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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIHRpbnktZ3B0LCBydW4gdGFzay0yMDI2MTEyMS0wODU0MDEuIFJlbmRlcmVkIGJ5IGxhdW5jaGVyIDAuMS4wLgojIFRoZSBzdXBlcnZpc29yIHJ1bnMgaXQ7IGBiYXNoIHN0YXJ0LnNoYCBieSBoYW5kIHJ1bnMgYXR0ZW1wdCAwIG9mIHRoZSBzYW1lIHJ1bi4KIyBzaGVsbGNoZWNrIGRpc2FibGU9U0MyMDE2ICMgdmFsdWVzIHN0YW5kIGluIHNpbmdsZSBxdW90ZXMsIHdoZXJlIG5vdGhpbmcgaW4gdGhlbSBpcyBleHBhbmRlZApzZXQgLWV1byBwaXBlZmFpbAoKZGllKCkgewogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCA3OAp9CgpweXRob249J3B5dGhvbjMnCgppZiBbWyAteiAke0xBVU5DSEVSX0FUVEVNUFQ6LX0gXV07IHRoZW4KICBlY2hvICdsYXVuY2hlcjogc3RhcnRlZCBieSBoYW5kOiB0aGlzIGlzIGF0dGVtcHQgMCwgYW5kIG5vIHN1cGVydmlzb3IganVkZ2VzIG9yIHJlc3RhcnRzIGl0JyA+JjIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MAogIGV4cG9ydCBMQVVOQ0hFUl9SRU5ERVpWT1VTX1BPUlQ9JHtMQVVOQ0hFUl9SRU5ERVpWT1VTX1BPUlQ6LSQoKDYxMDAwICsgUkFORE9NICUgNDUzNikpfQpmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgoKIyBgc2V0dXA6YCBvZiB0aGUgY2x1c3RlciBwcm9maWxlLCBhcyBpdHMgYXV0aG9yIHdyb3RlIGl0LiBBIGJhdGNoIHNjcmlwdCBtYXkgaGF2ZSBydW4gaXQgYmVmb3JlIHRoZSBjb250YWluZXIuCmlmIFtbIC16ICR7TEFVTkNIRVJfU0VUVVBfRE9ORTotfSBdXTsgdGhlbgogIHRyYXAgJ2RpZSAiYSBzZXR1cCBsaW5lIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUgZmFpbGVkIHdpdGggZXhpdCBjb2RlICQ/IicgRVJSCiAgc2V0ICt1CiAgcHl0aG9uMyAtYyAnaW1wb3J0IGxhdW5jaGVyJyAyPi9kZXYvbnVsbCB8fCBQSVBfQlJFQUtfU1lTVEVNX1BBQ0tBR0VTPTEgcHl0aG9uMyAtbSBwaXAgaW5zdGFsbCAtLXF1aWV0IC93b3Jrc3BhY2Uvd2hlZWxzL2xhdW5jaGVyLSoud2hsCiAgc2V0IC11CiAgdHJhcCAtIEVSUgpmaQoKIyBBIEdQVSB0aGF0IGZlbGwgb2ZmIHRoZSBidXMgaXMgY2hlYXBlciB0byBmaW5kIGhlcmUgdGhhbiBpbiB0aGUgZmlyc3QgY29sbGVjdGl2ZS4KaWYgY29tbWFuZCAtdiBudmlkaWEtc21pID4vZGV2L251bGw7IHRoZW4KICBncHVzPSQobnZpZGlhLXNtaSAtTCAyPi9kZXYvbnVsbCB8IGdyZXAgLWNFICdeKEdQVXwgIE1JRyknIHx8IHRydWUpCiAgKChncHVzID49IDIpKSB8fCBkaWUgInRoaXMgbm9kZSBzaG93cyAkZ3B1cyBHUFVzLCB0aGUgam9iIG5lZWRzICIyCmVsaWYgISBjb21tYW5kIC12IHJvY20tc21pID4vZGV2L251bGwgJiYgISBjb21wZ2VuIC1HICcvZGV2L252aWRpYVswLTldKicgPi9kZXYvbnVsbDsgdGhlbgogICMgVHJhaW5pbmcgd291bGQgZ28gb24gb24gdGhlIENQVSwgc2lsZW50bHkgYW5kIGZvciBldmVyLgogIGRpZSAibm8gR1BVIG9uIHRoaXMgbm9kZTogbmVpdGhlciBudmlkaWEtc21pLCByb2NtLXNtaSBub3IgL2Rldi9udmlkaWEwIGlzIGhlcmU7IEdQVXMgcGVyIG5vZGUgb2YgdGhlIGpvYjogIjIKZmkKCiMgT25lIGhvc3Q6IHRvcmNocnVuIGxpc3RlbnMgYXQgYSBwb3J0IHRoYXQgdGhlIHN1cGVydmlzb3IgZm91bmQgZnJlZSwgYW5kIGVuZHMgYXQgb25jZSB3aGVyZSBhbm90aGVyIHJ1biBoYXMgaXQuCiMgQSBzdGF0aWMgcmVuZGV6dm91cywgc2luY2UgYzEwZCdzIHdhaXRzIGZvciB1cCB0byAwLjMgcywgYXQgcmFuZG9tLCBzbyB0aGF0IG1hbnkgbm9kZXMgZG8gbm90IGNvbWUgYXQgb25jZS4KcmVuZGV6dm91cz0oCiAgLS1ubm9kZXMgMSAtLW5vZGUtcmFuayAwIC0tcmR6di1iYWNrZW5kIHN0YXRpYyAtLWxvY2FsLWFkZHIgMTI3LjAuMC4xCiAgLS1yZHp2LWVuZHBvaW50ICIxMjcuMC4wLjE6JHtMQVVOQ0hFUl9SRU5ERVpWT1VTX1BPUlQ6P3RoZSBzdXBlcnZpc29yIHNldHMgaXR9IgopCgojIFdoYXQgZXZlcnkgcmFuayBydW5zLiBsYXVuY2hlcidzIHdvcmtlciBmaWxscyBwbGFjZWhvbGRlcnMgc3VjaCBhcyB7bWljcm9fYmF0Y2hfc2l6ZX0gZm9yIGVhY2ggYXR0ZW1wdC4KYXJndj0oJ3B5dGhvbjMnICctbScgJ2xhdW5jaGVyLnRyYWluJykKd29ya2VyPSgtbSBsYXVuY2hlci5zdXBlcnZpc2Uud29ya2VyIC0tICIke2FyZ3ZbQF19IikKIyB0b3JjaHJ1biB0YWtlcyAkJCBhbmQgJHtsb2NhbF9yYW5rfSBpbiBhcmd1bWVudHMgZm9yIGl0cyBvd246IHdpdGggZXZlcnkgJCBkb3VibGVkIHRoZXkgYXJyaXZlIGFzIHdyaXR0ZW4uCnR3bz0nJCQnCndvcmtlcj0oIiR7d29ya2VyW0BdLy9bJF0vJHR3b30iKQojIEVycm9yIGZpbGVzIG9mIHRvcmNocnVuOiBvbiB0aGUgcnVuIGRpcmVjdG9yeSwgbm90IGluIGEgdGVtcG9yYXJ5IGZvbGRlciB0aGF0IGlzIGxvc3Qgd2l0aCB0aGUgbm9kZS4KbG9nX2Rpcj0kTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8kKHByaW50ZiAnJTAzZCcgIiRMQVVOQ0hFUl9BVFRFTVBUIikvdG9yY2hydW4vbm9kZS0ke0xBVU5DSEVSX05PREVfUkFOSzotMH0KbWtkaXIgLXAgIiRsb2dfZGlyIiB8fCB0cnVlCnRvcmNocnVuPSgKICAtLW5wcm9jLXBlci1ub2RlIDIgLS1tYXgtcmVzdGFydHMgMCAtLWxvZy1kaXIgIiRsb2dfZGlyIgogIC0tcmR6di1pZCAiJExBVU5DSEVSX1JVTl9JRC0kTEFVTkNIRVJfQVRURU1QVCIKICAiJHtyZW5kZXp2b3VzW0BdfSIKKQoKY2QgJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZTVmNDdkMjQ1NTc3OTc0NWIwNTknIHx8IGRpZSAndGhlIHdvcmtpbmcgZGlyZWN0b3J5IG9mIHRoZSBqb2IgZG9lcyBub3QgZXhpc3Qgb24gdGhpcyBub2RlOiAnJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZTVmNDdkMjQ1NTc3OTc0NWIwNTknCgojIFNlY3JldHM6IHZhbHVlcyBjb21lIGZyb20gdGhlIHN1cGVydmlzb3IncyBlbnZpcm9ubWVudCwgb3IgZnJvbSB3aGVyZSB0aGUgam9iIHNheXMuIFRoZXkgc3RhbmQgaW4gbm8gZmlsZSBoZXJlLgpbWyAtdiBIRl9UT0tFTiBdXSB8fCBkaWUgJ3NlY3JldCAnJ0hGX1RPS0VOJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IEhGX1RPS0VOCltbIC12IFdBTkRCX0FQSV9LRVkgXV0gfHwgZGllICdzZWNyZXQgJydXQU5EQl9BUElfS0VZJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IFdBTkRCX0FQSV9LRVkKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGpvYjogbGFzdCwgc28gdGhhdCBpdCB3aW5zIGFuZCBub3RoaW5nIGhlcmUgcnVucyB1bmRlciBpdC4KaWYgW1sgLXogJHtQWVRPUkNIX0NVREFfQUxMT0NfQ09ORjotfSR7UFlUT1JDSF9BTExPQ19DT05GOi19IF1dOyB0aGVuCiAgZXhwb3J0IFBZVE9SQ0hfQ1VEQV9BTExPQ19DT05GPSdleHBhbmRhYmxlX3NlZ21lbnRzOlRydWUnCmZpCgojIEFzIGBweXRob24gLW0gdG9yY2guZGlzdHJpYnV0ZWQucnVuYCwgYnV0IHRoYXQgbm9ib2R5IGxvb2tzIGZvciBnYXJiYWdlIHdoaWxlIHRvcmNoIGlzIGltcG9ydGVkOiBhIHNpeHRoIG9mIHRoZSB0aW1lLgpydW5fdG9yY2hydW49J2ltcG9ydCBnYzsgZ2MuZGlzYWJsZSgpOyBmcm9tIHRvcmNoLmRpc3RyaWJ1dGVkLnJ1biBpbXBvcnQgbWFpbjsgZ2MuZW5hYmxlKCk7IG1haW4oKScKZXhlYyAiJHB5dGhvbiIgLWMgIiRydW5fdG9yY2hydW4iICIke3RvcmNocnVuW0BdfSIgLS1uby1weXRob24gIiRweXRob24iICIke3dvcmtlcltAXX0iCg== || return 1
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
  event twin '"pod": '"$(json "$me")"', "handle": '"$(json 'runpod:runpod-2xa5000:'"$owner")"
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
    event twin '"pod": '"$(json "$me")"', "handle": '"$(json 'runpod:runpod-2xa5000:'"$owner")"
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
