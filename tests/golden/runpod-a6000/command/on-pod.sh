#!/usr/bin/env bash
# Run command-20261121-085401. Rendered by launcher 0.1.0.
# A pod whose command returns is restarted and billed on: this script never returns before the pod has ended.
set -u

run_dir='/workspace/runs/command-20261121-085401'
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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIGl0J3MgNTAlIG9mZjsgJCh0b3VjaCAvdG1wL3B3bmVkKSAjMSAicXVvdGVkIiBoZXRqb2Igw6ksIHJ1biBjb21tYW5kLTIwMjYxMTIxLTA4NTQwMS4gUmVuZGVyZWQgYnkgbGF1bmNoZXIgMC4xLjAuCiMgVGhlIHN1cGVydmlzb3IgcnVucyBpdDsgYGJhc2ggc3RhcnQuc2hgIGJ5IGhhbmQgcnVucyBhdHRlbXB0IDAgb2YgdGhlIHNhbWUgcnVuLgojIHNoZWxsY2hlY2sgZGlzYWJsZT1TQzIwMTYgIyB2YWx1ZXMgc3RhbmQgaW4gc2luZ2xlIHF1b3Rlcywgd2hlcmUgbm90aGluZyBpbiB0aGVtIGlzIGV4cGFuZGVkCnNldCAtZXVvIHBpcGVmYWlsCgpkaWUoKSB7CiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDc4Cn0KCnB5dGhvbj0ncHl0aG9uMycKCmlmIFtbIC16ICR7TEFVTkNIRVJfQVRURU1QVDotfSBdXTsgdGhlbgogIGVjaG8gJ2xhdW5jaGVyOiBzdGFydGVkIGJ5IGhhbmQ6IHRoaXMgaXMgYXR0ZW1wdCAwLCBhbmQgbm8gc3VwZXJ2aXNvciBqdWRnZXMgb3IgcmVzdGFydHMgaXQnID4mMgogIGV4cG9ydCBMQVVOQ0hFUl9BVFRFTVBUPTAKICBleHBvcnQgTEFVTkNIRVJfUlVOX0RJUj0nL3dvcmtzcGFjZS9ydW5zL2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fSUQ9J2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9TVE9QX0ZJTEU9IiRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLzAwMC9zdG9wIgogIGV4cG9ydCBMQVVOQ0hFUl9TRUNSRVRTPSdIRl9UT0tFTixXQU5EQl9BUElfS0VZJwogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFUz0xCiAgZXhwb3J0IExBVU5DSEVSX05PREVfUkFOSz0wCmZpCltbIC1uICR7TEFVTkNIRVJfUlVOX0RJUjotfSAmJiAtbiAke0xBVU5DSEVSX1JVTl9JRDotfSBdXSB8fCBkaWUgJ0xBVU5DSEVSX0FUVEVNUFQgaXMgc2V0LCBidXQgbm90IExBVU5DSEVSX1JVTl9ESVIgYW5kIExBVU5DSEVSX1JVTl9JRCcKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGNsdXN0ZXIuCgojIGBzZXR1cDpgIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUsIGFzIGl0cyBhdXRob3Igd3JvdGUgaXQuIEEgYmF0Y2ggc2NyaXB0IG1heSBoYXZlIHJ1biBpdCBiZWZvcmUgdGhlIGNvbnRhaW5lci4KaWYgW1sgLXogJHtMQVVOQ0hFUl9TRVRVUF9ET05FOi19IF1dOyB0aGVuCiAgdHJhcCAnZGllICJhIHNldHVwIGxpbmUgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJD8iJyBFUlIKICBzZXQgK3UKICBweXRob24zIC1jICdpbXBvcnQgbGF1bmNoZXInIDI+L2Rldi9udWxsIHx8IHB5dGhvbjMgLW0gcGlwIGluc3RhbGwgLS1xdWlldCAvd29ya3NwYWNlL3doZWVscy9sYXVuY2hlci0qLndobAogIHNldCAtdQogIHRyYXAgLSBFUlIKZmkKCiMgQSBHUFUgdGhhdCBmZWxsIG9mZiB0aGUgYnVzIGlzIGNoZWFwZXIgdG8gZmluZCBoZXJlIHRoYW4gaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuCmlmIGNvbW1hbmQgLXYgbnZpZGlhLXNtaSA+L2Rldi9udWxsOyB0aGVuCiAgZ3B1cz0kKG52aWRpYS1zbWkgLUwgMj4vZGV2L251bGwgfCBncmVwIC1jRSAnXihHUFV8ICBNSUcpJyB8fCB0cnVlKQogICgoZ3B1cyA+PSAxKSkgfHwgZGllICJ0aGlzIG5vZGUgc2hvd3MgJGdwdXMgR1BVcywgdGhlIGpvYiBuZWVkcyAiMQplbGlmICEgY29tbWFuZCAtdiByb2NtLXNtaSA+L2Rldi9udWxsICYmICEgY29tcGdlbiAtRyAnL2Rldi9udmlkaWFbMC05XSonID4vZGV2L251bGw7IHRoZW4KICAjIFRyYWluaW5nIHdvdWxkIGdvIG9uIG9uIHRoZSBDUFUsIHNpbGVudGx5IGFuZCBmb3IgZXZlci4KICBkaWUgIm5vIEdQVSBvbiB0aGlzIG5vZGU6IG5laXRoZXIgbnZpZGlhLXNtaSwgcm9jbS1zbWkgbm9yIC9kZXYvbnZpZGlhMCBpcyBoZXJlOyBHUFVzIHBlciBub2RlIG9mIHRoZSBqb2I6ICIxCmZpCgojIE9uZSBob3N0OiBwb3J0IDAgbGV0cyB0aGUga2VybmVsIGNob29zZSwgc28gdGhhdCB0d28gcnVucyBuZXZlciBtZWV0LgpyZW5kZXp2b3VzPSgtLW5ub2RlcyAxIC0tcmR6di1lbmRwb2ludCAxMjcuMC4wLjE6MCAtLWxvY2FsLWFkZHIgMTI3LjAuMC4xKQoKIyBXaGF0IGV2ZXJ5IHJhbmsgcnVucy4gbGF1bmNoZXIncyB3b3JrZXIgZmlsbHMgcGxhY2Vob2xkZXJzIHN1Y2ggYXMge21pY3JvX2JhdGNoX3NpemV9IGZvciBlYWNoIGF0dGVtcHQuCmFyZ3Y9KCdweXRob24nICd0cmFpbiBpdC5weScgJy0tYmF0Y2g9e21pY3JvX2JhdGNoX3NpemV9JyAnLS1ub3RlPWBpZGA7IHJtIC1yZiAiJEhPTUUiICdcJyd4J1wnJyBcIConICd7ImxyIjogMWUtNCwgImNvc3QiOiAiJCQ1LCAke2xvY2FsX3Jhbmt9In0nICd0d28KbGluZXMnICcnICclaiwjMSwheCcpCndvcmtlcj0oLW0gbGF1bmNoZXIuc3VwZXJ2aXNlLndvcmtlciAtLSAiJHthcmd2W0BdfSIpCiMgdG9yY2hydW4gdGFrZXMgJCQgYW5kICR7bG9jYWxfcmFua30gaW4gYXJndW1lbnRzIGZvciBpdHMgb3duOiB3aXRoIGV2ZXJ5ICQgZG91YmxlZCB0aGV5IGFycml2ZSBhcyB3cml0dGVuLgp0d289JyQkJwp3b3JrZXI9KCIke3dvcmtlcltAXS8vWyRdLyR0d299IikKIyBFcnJvciBmaWxlcyBvZiB0b3JjaHJ1bjogb24gdGhlIHJ1biBkaXJlY3RvcnksIG5vdCBpbiBhIHRlbXBvcmFyeSBmb2xkZXIgdGhhdCBpcyBsb3N0IHdpdGggdGhlIG5vZGUuCmxvZ19kaXI9JExBVU5DSEVSX1JVTl9ESVIvYXR0ZW1wdHMvJChwcmludGYgJyUwM2QnICIkTEFVTkNIRVJfQVRURU1QVCIpL3RvcmNocnVuL25vZGUtJHtMQVVOQ0hFUl9OT0RFX1JBTks6LTB9Cm1rZGlyIC1wICIkbG9nX2RpciIgfHwgdHJ1ZQp0b3JjaHJ1bj0oCiAgLS1ucHJvYy1wZXItbm9kZSAxIC0tbWF4LXJlc3RhcnRzIDAgLS1sb2ctZGlyICIkbG9nX2RpciIKICAtLXJkenYtYmFja2VuZCBjMTBkIC0tcmR6di1pZCAiJExBVU5DSEVSX1JVTl9JRC0kTEFVTkNIRVJfQVRURU1QVCIKICAiJHtyZW5kZXp2b3VzW0BdfSIKKQoKY2QgJy93b3Jrc3BhY2UvY29kZSBvZiB1c2VyJyB8fCBkaWUgJ3RoZSB3b3JraW5nIGRpcmVjdG9yeSBvZiB0aGUgam9iIGRvZXMgbm90IGV4aXN0IG9uIHRoaXMgbm9kZTogJycvd29ya3NwYWNlL2NvZGUgb2YgdXNlcicKCiMgU2VjcmV0czogdmFsdWVzIGNvbWUgZnJvbSB0aGUgc3VwZXJ2aXNvcidzIGVudmlyb25tZW50LCBvciBmcm9tIHdoZXJlIHRoZSBqb2Igc2F5cy4gVGhleSBzdGFuZCBpbiBubyBmaWxlIGhlcmUuCltbIC12IEhGX1RPS0VOIF1dIHx8IGRpZSAnc2VjcmV0ICcnSEZfVE9LRU4nJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgSEZfVE9LRU4KW1sgLXYgV0FOREJfQVBJX0tFWSBdXSB8fCBkaWUgJ3NlY3JldCAnJ1dBTkRCX0FQSV9LRVknJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgV0FOREJfQVBJX0tFWQoKIyBFbnZpcm9ubWVudCBvZiB0aGUgam9iOiBsYXN0LCBzbyB0aGF0IGl0IHdpbnMgYW5kIG5vdGhpbmcgaGVyZSBydW5zIHVuZGVyIGl0LgpleHBvcnQgR1JFRVRJTkc9J2l0J1wnJ3MgJEhPTUUsCnRoZW4gYGlkYCAmICJtb3JlIiAjMScKZXhwb3J0IEVNUFRZPScnCmV4cG9ydCBPTVBfTlVNX1RIUkVBRFM9JzQnCmlmIFtbIC16ICR7UFlUT1JDSF9DVURBX0FMTE9DX0NPTkY6LX0ke1BZVE9SQ0hfQUxMT0NfQ09ORjotfSBdXTsgdGhlbgogIGV4cG9ydCBQWVRPUkNIX0NVREFfQUxMT0NfQ09ORj0nZXhwYW5kYWJsZV9zZWdtZW50czpUcnVlJwpmaQoKZXhlYyAiJHB5dGhvbiIgLW0gdG9yY2guZGlzdHJpYnV0ZWQucnVuICIke3RvcmNocnVuW0BdfSIgLS1uby1weXRob24gIiRweXRob24iICIke3dvcmtlcltAXX0iCg== || return 1
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
