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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIGl0J3MgNTAlIG9mZjsgJCh0b3VjaCAvdG1wL3B3bmVkKSAjMSAicXVvdGVkIiBoZXRqb2Igw6ksIHJ1biBjb21tYW5kLTIwMjYxMTIxLTA4NTQwMS4gUmVuZGVyZWQgYnkgbGF1bmNoZXIgMC4xLjAuCiMgVGhlIHN1cGVydmlzb3IgcnVucyBpdDsgYGJhc2ggc3RhcnQuc2hgIGJ5IGhhbmQgcnVucyBhdHRlbXB0IDAgb2YgdGhlIHNhbWUgcnVuLgojIHNoZWxsY2hlY2sgZGlzYWJsZT1TQzIwMTYgIyB2YWx1ZXMgc3RhbmQgaW4gc2luZ2xlIHF1b3Rlcywgd2hlcmUgbm90aGluZyBpbiB0aGVtIGlzIGV4cGFuZGVkCnNldCAtZXVvIHBpcGVmYWlsCgpkaWUoKSB7CiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDc4Cn0KCnB5dGhvbj0ncHl0aG9uMycKCmlmIFtbIC16ICR7TEFVTkNIRVJfQVRURU1QVDotfSBdXTsgdGhlbgogIGVjaG8gJ2xhdW5jaGVyOiBzdGFydGVkIGJ5IGhhbmQ6IHRoaXMgaXMgYXR0ZW1wdCAwLCBhbmQgbm8gc3VwZXJ2aXNvciBqdWRnZXMgb3IgcmVzdGFydHMgaXQnID4mMgogIGV4cG9ydCBMQVVOQ0hFUl9BVFRFTVBUPTAKICBleHBvcnQgTEFVTkNIRVJfUlVOX0RJUj0nL3dvcmtzcGFjZS9ydW5zL2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fSUQ9J2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9TVE9QX0ZJTEU9IiRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLzAwMC9zdG9wIgogIGV4cG9ydCBMQVVOQ0hFUl9TRUNSRVRTPSdIRl9UT0tFTixXQU5EQl9BUElfS0VZJwogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFUz0xCiAgZXhwb3J0IExBVU5DSEVSX05PREVfUkFOSz0wCiAgZXhwb3J0IExBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVD0ke0xBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVDotJCgoNjEwMDAgKyBSQU5ET00gJSA0NTM2KSl9CmZpCltbIC1uICR7TEFVTkNIRVJfUlVOX0RJUjotfSAmJiAtbiAke0xBVU5DSEVSX1JVTl9JRDotfSBdXSB8fCBkaWUgJ0xBVU5DSEVSX0FUVEVNUFQgaXMgc2V0LCBidXQgbm90IExBVU5DSEVSX1JVTl9ESVIgYW5kIExBVU5DSEVSX1JVTl9JRCcKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGNsdXN0ZXIuCgojIGBzZXR1cDpgIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUsIGFzIGl0cyBhdXRob3Igd3JvdGUgaXQuIEEgYmF0Y2ggc2NyaXB0IG1heSBoYXZlIHJ1biBpdCBiZWZvcmUgdGhlIGNvbnRhaW5lci4KaWYgW1sgLXogJHtMQVVOQ0hFUl9TRVRVUF9ET05FOi19IF1dOyB0aGVuCiAgdHJhcCAnZGllICJhIHNldHVwIGxpbmUgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJD8iJyBFUlIKICBzZXQgK3UKICBweXRob24zIC1jICdpbXBvcnQgbGF1bmNoZXInIDI+L2Rldi9udWxsIHx8IFBJUF9CUkVBS19TWVNURU1fUEFDS0FHRVM9MSBweXRob24zIC1tIHBpcCBpbnN0YWxsIC0tcXVpZXQgL3dvcmtzcGFjZS93aGVlbHMvbGF1bmNoZXItKi53aGwKICBzZXQgLXUKICB0cmFwIC0gRVJSCmZpCgojIEEgR1BVIHRoYXQgZmVsbCBvZmYgdGhlIGJ1cyBpcyBjaGVhcGVyIHRvIGZpbmQgaGVyZSB0aGFuIGluIHRoZSBmaXJzdCBjb2xsZWN0aXZlLgppZiBjb21tYW5kIC12IG52aWRpYS1zbWkgPi9kZXYvbnVsbDsgdGhlbgogIGdwdXM9JChudmlkaWEtc21pIC1MIDI+L2Rldi9udWxsIHwgZ3JlcCAtY0UgJ14oR1BVfCAgTUlHKScgfHwgdHJ1ZSkKICAoKGdwdXMgPj0gMikpIHx8IGRpZSAidGhpcyBub2RlIHNob3dzICRncHVzIEdQVXMsIHRoZSBqb2IgbmVlZHMgIjIKZWxpZiAhIGNvbW1hbmQgLXYgcm9jbS1zbWkgPi9kZXYvbnVsbCAmJiAhIGNvbXBnZW4gLUcgJy9kZXYvbnZpZGlhWzAtOV0qJyA+L2Rldi9udWxsOyB0aGVuCiAgIyBUcmFpbmluZyB3b3VsZCBnbyBvbiBvbiB0aGUgQ1BVLCBzaWxlbnRseSBhbmQgZm9yIGV2ZXIuCiAgZGllICJubyBHUFUgb24gdGhpcyBub2RlOiBuZWl0aGVyIG52aWRpYS1zbWksIHJvY20tc21pIG5vciAvZGV2L252aWRpYTAgaXMgaGVyZTsgR1BVcyBwZXIgbm9kZSBvZiB0aGUgam9iOiAiMgpmaQoKIyBPbmUgaG9zdDogdG9yY2hydW4gbGlzdGVucyBhdCBhIHBvcnQgdGhhdCB0aGUgc3VwZXJ2aXNvciBmb3VuZCBmcmVlLCBhbmQgZW5kcyBhdCBvbmNlIHdoZXJlIGFub3RoZXIgcnVuIGhhcyBpdC4KIyBBIHN0YXRpYyByZW5kZXp2b3VzLCBzaW5jZSBjMTBkJ3Mgd2FpdHMgZm9yIHVwIHRvIDAuMyBzLCBhdCByYW5kb20sIHNvIHRoYXQgbWFueSBub2RlcyBkbyBub3QgY29tZSBhdCBvbmNlLgpyZW5kZXp2b3VzPSgKICAtLW5ub2RlcyAxIC0tbm9kZS1yYW5rIDAgLS1yZHp2LWJhY2tlbmQgc3RhdGljIC0tbG9jYWwtYWRkciAxMjcuMC4wLjEKICAtLXJkenYtZW5kcG9pbnQgIjEyNy4wLjAuMToke0xBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVDo/dGhlIHN1cGVydmlzb3Igc2V0cyBpdH0iCikKCiMgV2hhdCBldmVyeSByYW5rIHJ1bnMuIGxhdW5jaGVyJ3Mgd29ya2VyIGZpbGxzIHBsYWNlaG9sZGVycyBzdWNoIGFzIHttaWNyb19iYXRjaF9zaXplfSBmb3IgZWFjaCBhdHRlbXB0Lgphcmd2PSgncHl0aG9uJyAndHJhaW4gaXQucHknICctLWJhdGNoPXttaWNyb19iYXRjaF9zaXplfScgJy0tbm90ZT1gaWRgOyBybSAtcmYgIiRIT01FIiAnXCcneCdcJycgXCAqJyAneyJsciI6IDFlLTQsICJjb3N0IjogIiQkNSwgJHtsb2NhbF9yYW5rfSJ9JyAndHdvCmxpbmVzJyAnJyAnJWosIzEsIXgnKQp3b3JrZXI9KC1tIGxhdW5jaGVyLnN1cGVydmlzZS53b3JrZXIgLS0gIiR7YXJndltAXX0iKQojIHRvcmNocnVuIHRha2VzICQkIGFuZCAke2xvY2FsX3Jhbmt9IGluIGFyZ3VtZW50cyBmb3IgaXRzIG93bjogd2l0aCBldmVyeSAkIGRvdWJsZWQgdGhleSBhcnJpdmUgYXMgd3JpdHRlbi4KdHdvPSckJCcKd29ya2VyPSgiJHt3b3JrZXJbQF0vL1skXS8kdHdvfSIpCiMgRXJyb3IgZmlsZXMgb2YgdG9yY2hydW46IG9uIHRoZSBydW4gZGlyZWN0b3J5LCBub3QgaW4gYSB0ZW1wb3JhcnkgZm9sZGVyIHRoYXQgaXMgbG9zdCB3aXRoIHRoZSBub2RlLgpsb2dfZGlyPSRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLyQocHJpbnRmICclMDNkJyAiJExBVU5DSEVSX0FUVEVNUFQiKS90b3JjaHJ1bi9ub2RlLSR7TEFVTkNIRVJfTk9ERV9SQU5LOi0wfQpta2RpciAtcCAiJGxvZ19kaXIiIHx8IHRydWUKdG9yY2hydW49KAogIC0tbnByb2MtcGVyLW5vZGUgMiAtLW1heC1yZXN0YXJ0cyAwIC0tbG9nLWRpciAiJGxvZ19kaXIiCiAgLS1yZHp2LWlkICIkTEFVTkNIRVJfUlVOX0lELSRMQVVOQ0hFUl9BVFRFTVBUIgogICIke3JlbmRlenZvdXNbQF19IgopCgpjZCAnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9lNWY0N2QyNDU1Nzc5NzQ1YjA1OScgfHwgZGllICd0aGUgd29ya2luZyBkaXJlY3Rvcnkgb2YgdGhlIGpvYiBkb2VzIG5vdCBleGlzdCBvbiB0aGlzIG5vZGU6ICcnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9lNWY0N2QyNDU1Nzc5NzQ1YjA1OScKCiMgU2VjcmV0czogdmFsdWVzIGNvbWUgZnJvbSB0aGUgc3VwZXJ2aXNvcidzIGVudmlyb25tZW50LCBvciBmcm9tIHdoZXJlIHRoZSBqb2Igc2F5cy4gVGhleSBzdGFuZCBpbiBubyBmaWxlIGhlcmUuCltbIC12IEhGX1RPS0VOIF1dIHx8IGRpZSAnc2VjcmV0ICcnSEZfVE9LRU4nJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgSEZfVE9LRU4KW1sgLXYgV0FOREJfQVBJX0tFWSBdXSB8fCBkaWUgJ3NlY3JldCAnJ1dBTkRCX0FQSV9LRVknJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgV0FOREJfQVBJX0tFWQoKIyBFbnZpcm9ubWVudCBvZiB0aGUgam9iOiBsYXN0LCBzbyB0aGF0IGl0IHdpbnMgYW5kIG5vdGhpbmcgaGVyZSBydW5zIHVuZGVyIGl0LgpleHBvcnQgR1JFRVRJTkc9J2l0J1wnJ3MgJEhPTUUsCnRoZW4gYGlkYCAmICJtb3JlIiAjMScKZXhwb3J0IEVNUFRZPScnCmV4cG9ydCBPTVBfTlVNX1RIUkVBRFM9JzQnCmlmIFtbIC16ICR7UFlUT1JDSF9DVURBX0FMTE9DX0NPTkY6LX0ke1BZVE9SQ0hfQUxMT0NfQ09ORjotfSBdXTsgdGhlbgogIGV4cG9ydCBQWVRPUkNIX0NVREFfQUxMT0NfQ09ORj0nZXhwYW5kYWJsZV9zZWdtZW50czpUcnVlJwpmaQoKIyBBcyBgcHl0aG9uIC1tIHRvcmNoLmRpc3RyaWJ1dGVkLnJ1bmAsIGJ1dCB0aGF0IG5vYm9keSBsb29rcyBmb3IgZ2FyYmFnZSB3aGlsZSB0b3JjaCBpcyBpbXBvcnRlZDogYSBzaXh0aCBvZiB0aGUgdGltZS4KcnVuX3RvcmNocnVuPSdpbXBvcnQgZ2M7IGdjLmRpc2FibGUoKTsgZnJvbSB0b3JjaC5kaXN0cmlidXRlZC5ydW4gaW1wb3J0IG1haW47IGdjLmVuYWJsZSgpOyBtYWluKCknCmV4ZWMgIiRweXRob24iIC1jICIkcnVuX3RvcmNocnVuIiAiJHt0b3JjaHJ1bltAXX0iIC0tbm8tcHl0aG9uICIkcHl0aG9uIiAiJHt3b3JrZXJbQF19Igo= || return 1
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
