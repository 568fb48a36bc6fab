#!/usr/bin/env bash
# Run task-20261121-085401. Rendered by launcher 0.1.0.
# A pod whose command returns is restarted and billed on: this script never returns before the pod has ended.
set -u

run_dir='/workspace/runs/task-20261121-085401'
python='python3'
node_rank=0
api=${LAUNCHER_RUNPOD_API:-https://api.runpod.io/v2}
done_mark=$run_dir/pod-${RUNPOD_POD_ID:-unknown}.done

say() {
  printf '[launcher] %s\n' "$*" >&2
}

# put PATH MODE BASE64 [keep]: whole or not at all; `keep` leaves a file that is there.
put() {
  local file=$run_dir/$1
  local new=$file.$BASHPID.new
  if [[ ${4:-} == keep && -e $file ]]; then return 0; fi
  mkdir -p "${file%/*}" && printf '%s' "$3" | base64 -d >"$new" && chmod "$2" "$new" && mv "$new" "$file"
}

# Everything that may fail. Runs as a process of its own, under a time limit.
work() {
  put 'plan.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'run.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIHRpbnktZ3B0LCBydW4gdGFzay0yMDI2MTEyMS0wODU0MDEuIFJlbmRlcmVkIGJ5IGxhdW5jaGVyIDAuMS4wLgojIFRoZSBzdXBlcnZpc29yIHJ1bnMgaXQ7IGBiYXNoIHN0YXJ0LnNoYCBieSBoYW5kIHJ1bnMgYXR0ZW1wdCAwIG9mIHRoZSBzYW1lIHJ1bi4KIyBzaGVsbGNoZWNrIGRpc2FibGU9U0MyMDE2ICMgdmFsdWVzIHN0YW5kIGluIHNpbmdsZSBxdW90ZXMsIHdoZXJlIG5vdGhpbmcgaW4gdGhlbSBpcyBleHBhbmRlZApzZXQgLWV1byBwaXBlZmFpbAoKZGllKCkgewogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCA3OAp9CgpweXRob249J3B5dGhvbjMnCgppZiBbWyAteiAke0xBVU5DSEVSX0FUVEVNUFQ6LX0gXV07IHRoZW4KICBlY2hvICdsYXVuY2hlcjogc3RhcnRlZCBieSBoYW5kOiB0aGlzIGlzIGF0dGVtcHQgMCwgYW5kIG5vIHN1cGVydmlzb3IganVkZ2VzIG9yIHJlc3RhcnRzIGl0JyA+JjIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MApmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgpleHBvcnQgTkNDTF9ERUJVRz0nV0FSTicKCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgYXMgaXRzIGF1dGhvciB3cm90ZSBpdC4gQSBiYXRjaCBzY3JpcHQgbWF5IGhhdmUgcnVuIGl0IGJlZm9yZSB0aGUgY29udGFpbmVyLgppZiBbWyAteiAke0xBVU5DSEVSX1NFVFVQX0RPTkU6LX0gXV07IHRoZW4KICB0cmFwICdkaWUgImEgc2V0dXAgbGluZSBvZiB0aGUgY2x1c3RlciBwcm9maWxlIGZhaWxlZCB3aXRoIGV4aXQgY29kZSAkPyInIEVSUgogIHNldCArdQogIHB5dGhvbjMgLWMgJ2ltcG9ydCBsYXVuY2hlcicgMj4vZGV2L251bGwgfHwgcHl0aG9uMyAtbSBwaXAgaW5zdGFsbCAtLXF1aWV0IC93b3Jrc3BhY2Uvd2hlZWxzL2xhdW5jaGVyLSoud2hsCiAgc2V0IC11CiAgdHJhcCAtIEVSUgpmaQoKIyBBIEdQVSB0aGF0IGZlbGwgb2ZmIHRoZSBidXMgaXMgY2hlYXBlciB0byBmaW5kIGhlcmUgdGhhbiBpbiB0aGUgZmlyc3QgY29sbGVjdGl2ZS4KaWYgY29tbWFuZCAtdiBudmlkaWEtc21pID4vZGV2L251bGw7IHRoZW4KICBncHVzPSQobnZpZGlhLXNtaSAtTCAyPi9kZXYvbnVsbCB8IGdyZXAgLWNFICdeKEdQVXwgIE1JRyknIHx8IHRydWUpCiAgKChncHVzID49IDgpKSB8fCBkaWUgInRoaXMgbm9kZSBzaG93cyAkZ3B1cyBHUFVzLCB0aGUgam9iIG5lZWRzICI4CmVsaWYgISBjb21tYW5kIC12IHJvY20tc21pID4vZGV2L251bGwgJiYgISBjb21wZ2VuIC1HICcvZGV2L252aWRpYVswLTldKicgPi9kZXYvbnVsbDsgdGhlbgogICMgVHJhaW5pbmcgd291bGQgZ28gb24gb24gdGhlIENQVSwgc2lsZW50bHkgYW5kIGZvciBldmVyLgogIGRpZSAibm8gR1BVIG9uIHRoaXMgbm9kZTogbmVpdGhlciBudmlkaWEtc21pLCByb2NtLXNtaSBub3IgL2Rldi9udmlkaWEwIGlzIGhlcmU7IEdQVXMgcGVyIG5vZGUgb2YgdGhlIGpvYjogIjgKZmkKCiMgT25lIGhvc3Q6IHBvcnQgMCBsZXRzIHRoZSBrZXJuZWwgY2hvb3NlLCBzbyB0aGF0IHR3byBydW5zIG5ldmVyIG1lZXQuCnJlbmRlenZvdXM9KC0tbm5vZGVzIDEgLS1yZHp2LWVuZHBvaW50IDEyNy4wLjAuMTowIC0tbG9jYWwtYWRkciAxMjcuMC4wLjEpCgojIFdoYXQgZXZlcnkgcmFuayBydW5zLiBsYXVuY2hlcidzIHdvcmtlciBmaWxscyBwbGFjZWhvbGRlcnMgc3VjaCBhcyB7bWljcm9fYmF0Y2hfc2l6ZX0gZm9yIGVhY2ggYXR0ZW1wdC4KYXJndj0oJ3B5dGhvbjMnICctbScgJ2xhdW5jaGVyLnRyYWluJykKd29ya2VyPSgtbSBsYXVuY2hlci5zdXBlcnZpc2Uud29ya2VyIC0tICIke2FyZ3ZbQF19IikKIyB0b3JjaHJ1biB0YWtlcyAkJCBhbmQgJHtsb2NhbF9yYW5rfSBpbiBhcmd1bWVudHMgZm9yIGl0cyBvd246IHdpdGggZXZlcnkgJCBkb3VibGVkIHRoZXkgYXJyaXZlIGFzIHdyaXR0ZW4uCnR3bz0nJCQnCndvcmtlcj0oIiR7d29ya2VyW0BdLy9bJF0vJHR3b30iKQojIEVycm9yIGZpbGVzIG9mIHRvcmNocnVuOiBvbiB0aGUgcnVuIGRpcmVjdG9yeSwgbm90IGluIGEgdGVtcG9yYXJ5IGZvbGRlciB0aGF0IGlzIGxvc3Qgd2l0aCB0aGUgbm9kZS4KbG9nX2Rpcj0kTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8kKHByaW50ZiAnJTAzZCcgIiRMQVVOQ0hFUl9BVFRFTVBUIikvdG9yY2hydW4vbm9kZS0ke0xBVU5DSEVSX05PREVfUkFOSzotMH0KbWtkaXIgLXAgIiRsb2dfZGlyIiB8fCB0cnVlCnRvcmNocnVuPSgKICAtLW5wcm9jLXBlci1ub2RlIDggLS1tYXgtcmVzdGFydHMgMCAtLWxvZy1kaXIgIiRsb2dfZGlyIgogIC0tcmR6di1iYWNrZW5kIGMxMGQgLS1yZHp2LWlkICIkTEFVTkNIRVJfUlVOX0lELSRMQVVOQ0hFUl9BVFRFTVBUIgogICIke3JlbmRlenZvdXNbQF19IgopCgpjZCAnL3dvcmtzcGFjZS9jb2RlIG9mIHVzZXInIHx8IGRpZSAndGhlIHdvcmtpbmcgZGlyZWN0b3J5IG9mIHRoZSBqb2IgZG9lcyBub3QgZXhpc3Qgb24gdGhpcyBub2RlOiAnJy93b3Jrc3BhY2UvY29kZSBvZiB1c2VyJwoKIyBTZWNyZXRzOiB2YWx1ZXMgY29tZSBmcm9tIHRoZSBzdXBlcnZpc29yJ3MgZW52aXJvbm1lbnQsIG9yIGZyb20gd2hlcmUgdGhlIGpvYiBzYXlzLiBUaGV5IHN0YW5kIGluIG5vIGZpbGUgaGVyZS4KW1sgLXYgSEZfVE9LRU4gXV0gfHwgZGllICdzZWNyZXQgJydIRl9UT0tFTicnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBIRl9UT0tFTgpbWyAtdiBXQU5EQl9BUElfS0VZIF1dIHx8IGRpZSAnc2VjcmV0ICcnV0FOREJfQVBJX0tFWScnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBXQU5EQl9BUElfS0VZCgojIEVudmlyb25tZW50IG9mIHRoZSBqb2I6IGxhc3QsIHNvIHRoYXQgaXQgd2lucyBhbmQgbm90aGluZyBoZXJlIHJ1bnMgdW5kZXIgaXQuCmlmIFtbIC16ICR7UFlUT1JDSF9DVURBX0FMTE9DX0NPTkY6LX0ke1BZVE9SQ0hfQUxMT0NfQ09ORjotfSBdXTsgdGhlbgogIGV4cG9ydCBQWVRPUkNIX0NVREFfQUxMT0NfQ09ORj0nZXhwYW5kYWJsZV9zZWdtZW50czpUcnVlJwpmaQoKZXhlYyAiJHB5dGhvbiIgLW0gdG9yY2guZGlzdHJpYnV0ZWQucnVuICIke3RvcmNocnVuW0BdfSIgLS1uby1weXRob24gIiRweXRob24iICIke3dvcmtlcltAXX0iCg== || return 1
  # `setup:` of the cluster profile, as its author wrote it.
  trap 'say "a setup line of the cluster profile failed with exit code $?"; exit 78' ERR
  set -e +u
  python3 -c 'import launcher' 2>/dev/null || python3 -m pip install --quiet /workspace/wheels/launcher-*.whl
  set +e -u
  trap - ERR
  export LAUNCHER_SETUP_DONE=1
  # Looked for after `setup:`, which may fetch it.
  if [[ ! -d '/workspace/code of user' ]]; then
    say "the job's code is not on this pod: put it on the network volume (or into the image), in "'/workspace/code of user'
    return 78
  fi
  exec "$python" -m launcher.supervise "$run_dir"
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

# Ends this pod, or the whole cluster that it belongs to. 404: it is gone already.
end_once() {
  local answer status cluster
  answer=$(call DELETE "/pods/${RUNPOD_POD_ID:-}")
  status=${answer##*$'\n'}
  case $status in
    2?? | 404) return 0 ;;
    409)
      # Pods of a cluster end with the cluster only.
      answer=$(call GET "/pods/$RUNPOD_POD_ID" | tr -d ' \n')
      if [[ $answer =~ \"cluster\":\{[^}]*\"id\":\"([A-Za-z0-9_-]+)\" ]]; then
        cluster=${BASH_REMATCH[1]}
        answer=$(call DELETE "/clusters/$cluster")
        status=${answer##*$'\n'}
        case $status in 2?? | 404) return 0 ;; esac
      fi
      ;;
  esac
  say "RunPod answered '$status' to the request to end pod ${RUNPOD_POD_ID:-(no RUNPOD_POD_ID)}"
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
# --foreground: a signal reaches the supervisor alone, which ends its ranks in order.
timeout --foreground --signal=TERM --kill-after=180 86400 bash "$0" work \
  > >(tee -a "$run_dir/pod-node-${node_rank:-unknown}.log") 2>&1 &
child=$!
woken=''
trap 'woken=yes; kill -s TERM "$child" 2>/dev/null' TERM INT
while :; do
  woken=''
  wait "$child"
  rc=$?
  [[ -n $woken ]] || break
done
trap '' TERM INT
if ((rc == 124 || rc == 137)); then
  say 'stopped by runpod.max_hours of the cluster profile, or killed'
fi
say "the run ended with exit code $rc"
printf '%s\n' "$rc" >"$done_mark"
end_pod
