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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIHRpbnktZ3B0LCBydW4gdGFzay0yMDI2MTEyMS0wODU0MDEuIFJlbmRlcmVkIGJ5IGxhdW5jaGVyIDAuMS4wLgojIFRoZSBzdXBlcnZpc29yIHJ1bnMgaXQ7IGBiYXNoIHN0YXJ0LnNoYCBieSBoYW5kIHJ1bnMgYXR0ZW1wdCAwIG9mIHRoZSBzYW1lIHJ1bi4KIyBzaGVsbGNoZWNrIGRpc2FibGU9U0MyMDE2ICMgdmFsdWVzIHN0YW5kIGluIHNpbmdsZSBxdW90ZXMsIHdoZXJlIG5vdGhpbmcgaW4gdGhlbSBpcyBleHBhbmRlZApzZXQgLWV1byBwaXBlZmFpbAoKZGllKCkgewogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCA3OAp9CgpweXRob249J3B5dGhvbjMnCgppZiBbWyAteiAke0xBVU5DSEVSX0FUVEVNUFQ6LX0gXV07IHRoZW4KICBlY2hvICdsYXVuY2hlcjogc3RhcnRlZCBieSBoYW5kOiB0aGlzIGlzIGF0dGVtcHQgMCwgYW5kIG5vIHN1cGVydmlzb3IganVkZ2VzIG9yIHJlc3RhcnRzIGl0JyA+JjIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MApmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgoKIyBgc2V0dXA6YCBvZiB0aGUgY2x1c3RlciBwcm9maWxlLCBhcyBpdHMgYXV0aG9yIHdyb3RlIGl0LiBBIGJhdGNoIHNjcmlwdCBtYXkgaGF2ZSBydW4gaXQgYmVmb3JlIHRoZSBjb250YWluZXIuCmlmIFtbIC16ICR7TEFVTkNIRVJfU0VUVVBfRE9ORTotfSBdXTsgdGhlbgogIHRyYXAgJ2RpZSAiYSBzZXR1cCBsaW5lIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUgZmFpbGVkIHdpdGggZXhpdCBjb2RlICQ/IicgRVJSCiAgc2V0ICt1CiAgcHl0aG9uMyAtYyAnaW1wb3J0IGxhdW5jaGVyJyAyPi9kZXYvbnVsbCB8fCBweXRob24zIC1tIHBpcCBpbnN0YWxsIC0tcXVpZXQgL3dvcmtzcGFjZS93aGVlbHMvbGF1bmNoZXItKi53aGwKICBzZXQgLXUKICB0cmFwIC0gRVJSCmZpCgojIEEgR1BVIHRoYXQgZmVsbCBvZmYgdGhlIGJ1cyBpcyBjaGVhcGVyIHRvIGZpbmQgaGVyZSB0aGFuIGluIHRoZSBmaXJzdCBjb2xsZWN0aXZlLgppZiBjb21tYW5kIC12IG52aWRpYS1zbWkgPi9kZXYvbnVsbDsgdGhlbgogIGdwdXM9JChudmlkaWEtc21pIC1MIDI+L2Rldi9udWxsIHwgZ3JlcCAtY0UgJ14oR1BVfCAgTUlHKScgfHwgdHJ1ZSkKICAoKGdwdXMgPj0gMikpIHx8IGRpZSAidGhpcyBub2RlIHNob3dzICRncHVzIEdQVXMsIHRoZSBqb2IgbmVlZHMgIjIKZWxpZiAhIGNvbW1hbmQgLXYgcm9jbS1zbWkgPi9kZXYvbnVsbCAmJiAhIGNvbXBnZW4gLUcgJy9kZXYvbnZpZGlhWzAtOV0qJyA+L2Rldi9udWxsOyB0aGVuCiAgIyBUcmFpbmluZyB3b3VsZCBnbyBvbiBvbiB0aGUgQ1BVLCBzaWxlbnRseSBhbmQgZm9yIGV2ZXIuCiAgZGllICJubyBHUFUgb24gdGhpcyBub2RlOiBuZWl0aGVyIG52aWRpYS1zbWksIHJvY20tc21pIG5vciAvZGV2L252aWRpYTAgaXMgaGVyZTsgR1BVcyBwZXIgbm9kZSBvZiB0aGUgam9iOiAiMgpmaQoKIyBPbmUgaG9zdDogcG9ydCAwIGxldHMgdGhlIGtlcm5lbCBjaG9vc2UsIHNvIHRoYXQgdHdvIHJ1bnMgbmV2ZXIgbWVldC4KcmVuZGV6dm91cz0oLS1ubm9kZXMgMSAtLXJkenYtZW5kcG9pbnQgMTI3LjAuMC4xOjAgLS1sb2NhbC1hZGRyIDEyNy4wLjAuMSkKCiMgV2hhdCBldmVyeSByYW5rIHJ1bnMuIGxhdW5jaGVyJ3Mgd29ya2VyIGZpbGxzIHBsYWNlaG9sZGVycyBzdWNoIGFzIHttaWNyb19iYXRjaF9zaXplfSBmb3IgZWFjaCBhdHRlbXB0Lgphcmd2PSgncHl0aG9uMycgJy1tJyAnbGF1bmNoZXIudHJhaW4nKQp3b3JrZXI9KC1tIGxhdW5jaGVyLnN1cGVydmlzZS53b3JrZXIgLS0gIiR7YXJndltAXX0iKQojIHRvcmNocnVuIHRha2VzICQkIGFuZCAke2xvY2FsX3Jhbmt9IGluIGFyZ3VtZW50cyBmb3IgaXRzIG93bjogd2l0aCBldmVyeSAkIGRvdWJsZWQgdGhleSBhcnJpdmUgYXMgd3JpdHRlbi4KdHdvPSckJCcKd29ya2VyPSgiJHt3b3JrZXJbQF0vL1skXS8kdHdvfSIpCiMgRXJyb3IgZmlsZXMgb2YgdG9yY2hydW46IG9uIHRoZSBydW4gZGlyZWN0b3J5LCBub3QgaW4gYSB0ZW1wb3JhcnkgZm9sZGVyIHRoYXQgaXMgbG9zdCB3aXRoIHRoZSBub2RlLgpsb2dfZGlyPSRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLyQocHJpbnRmICclMDNkJyAiJExBVU5DSEVSX0FUVEVNUFQiKS90b3JjaHJ1bi9ub2RlLSR7TEFVTkNIRVJfTk9ERV9SQU5LOi0wfQpta2RpciAtcCAiJGxvZ19kaXIiIHx8IHRydWUKdG9yY2hydW49KAogIC0tbnByb2MtcGVyLW5vZGUgMiAtLW1heC1yZXN0YXJ0cyAwIC0tbG9nLWRpciAiJGxvZ19kaXIiCiAgLS1yZHp2LWJhY2tlbmQgYzEwZCAtLXJkenYtaWQgIiRMQVVOQ0hFUl9SVU5fSUQtJExBVU5DSEVSX0FUVEVNUFQiCiAgIiR7cmVuZGV6dm91c1tAXX0iCikKCmNkICcvd29ya3NwYWNlL2NvZGUgb2YgdXNlcicgfHwgZGllICd0aGUgd29ya2luZyBkaXJlY3Rvcnkgb2YgdGhlIGpvYiBkb2VzIG5vdCBleGlzdCBvbiB0aGlzIG5vZGU6ICcnL3dvcmtzcGFjZS9jb2RlIG9mIHVzZXInCgojIFNlY3JldHM6IHZhbHVlcyBjb21lIGZyb20gdGhlIHN1cGVydmlzb3IncyBlbnZpcm9ubWVudCwgb3IgZnJvbSB3aGVyZSB0aGUgam9iIHNheXMuIFRoZXkgc3RhbmQgaW4gbm8gZmlsZSBoZXJlLgpbWyAtdiBIRl9UT0tFTiBdXSB8fCBkaWUgJ3NlY3JldCAnJ0hGX1RPS0VOJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IEhGX1RPS0VOCltbIC12IFdBTkRCX0FQSV9LRVkgXV0gfHwgZGllICdzZWNyZXQgJydXQU5EQl9BUElfS0VZJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IFdBTkRCX0FQSV9LRVkKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGpvYjogbGFzdCwgc28gdGhhdCBpdCB3aW5zIGFuZCBub3RoaW5nIGhlcmUgcnVucyB1bmRlciBpdC4KaWYgW1sgLXogJHtQWVRPUkNIX0NVREFfQUxMT0NfQ09ORjotfSR7UFlUT1JDSF9BTExPQ19DT05GOi19IF1dOyB0aGVuCiAgZXhwb3J0IFBZVE9SQ0hfQ1VEQV9BTExPQ19DT05GPSdleHBhbmRhYmxlX3NlZ21lbnRzOlRydWUnCmZpCgpleGVjICIkcHl0aG9uIiAtbSB0b3JjaC5kaXN0cmlidXRlZC5ydW4gIiR7dG9yY2hydW5bQF19IiAtLW5vLXB5dGhvbiAiJHB5dGhvbiIgIiR7d29ya2VyW0BdfSIK || return 1
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
