#!/usr/bin/env bash
# Run task-20261121-085401. Rendered by launcher 0.1.0.
# A pod whose command returns is restarted and billed on: this script never returns before the pod has ended.
set -u

_run_dir='/workspace/runs/task-20261121-085401'
_python='python3'
_node_rank=0
_api=${LAUNCHER_RUNPOD_API:-https://api.runpod.io/v2}
_pod=${RUNPOD_POD_ID:-unknown}
_submission=${LAUNCHER_SUBMISSION:-1}
_limit=${LAUNCHER_MAX_SECONDS:-86400}
# Epoch seconds by RunPod's clock. A pod is billed from its creation on, also while its image is pulled.
_latest=${LAUNCHER_DEADLINE:-}
_done_mark=$_run_dir/pod-$_pod.done
# Appears with the reason when the run is to write a checkpoint and stop.
_stop=$_run_dir/pod-$_pod.stop
# Kept for a container that is restarted: the end of this pod (epoch seconds), and a line for each start.
_deadline_file=$_run_dir/pod-$_pod.deadline
_starts_file=$_run_dir/pod-$_pod.starts
# A pod whose start script is killed more often than this is ended: it would be billed for nothing.
_most_restarts=3

say() {
  printf '[launcher] %s\n' "$*" >&2
}

# A JSON string.
json() {
  local _text=${1//\\/\\\\}
  _text=${_text//\"/\\\"}
  printf '"%s"' "${_text//[[:cntrl:]]/ }"
}
# event NAME MEMBERS: a line of events.jsonl, in one write.
event() {
  printf '{"time": "%s", "event": "%s", %s}\n' "$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ)" "$1" "$2" >>"$_run_dir/events.jsonl"
}
# Whether the supervisor has said how the run ended.
judged() {
  grep -qE '"state": "(succeeded|failed|interrupted|cancelled)"' "$_run_dir/state.json" 2>/dev/null
}
# judge FAILURE REASON: the verdict of the run, from the first node, where no supervisor gave one.
judge() {
  local _members
  if [[ ${_node_rank:-0} != 0 ]] || judged; then return 0; fi
  _members='"state": "failed", "failure": '"$(json "$1")"', "reason": '"$(json "$2")"
  event finished "$_members"
  printf '{ %s, "time": "%s"}\n' "$_members" "$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ)" >"$_run_dir/.state.json.$_pod" &&
    mv "$_run_dir/.state.json.$_pod" "$_run_dir/state.json"
}
# give_up FAILURE REASON: ends a pod that was started again and is not to go on.
give_up() {
  say "$2"
  judge "$1" "$2"
  printf 'gave up\n' >"$_done_mark"
  end_pod
}

# put PATH MODE BASE64 [keep]: whole or not at all; `keep` leaves a file that is there.
put() {
  local _file=$_run_dir/$1
  local _new=$_file.$_pod.$BASHPID.new # nodes share the folder, and process ids from 1 on
  if [[ ${4:-} == keep && -e $_file ]]; then return 0; fi
  mkdir -p "${_file%/*}" && printf '%s' "$3" | base64 -d >"$_new" && chmod "$2" "$_new" && mv "$_new" "$_file"
}

# The job's code, named by its content: several runs share it, and one of them unpacks it.
unpack() {
  local _new='/workspace/.launcher/code/fc55ece26d3fb9b0958d'.$_pod.new
  if [[ -d '/workspace/.launcher/code/fc55ece26d3fb9b0958d' ]]; then return 0; fi
  rm -rf "$_new" && mkdir -p "$_new" && chmod 700 "$_new" || return 1
  printf '%s' H4sIAAAAAAAC/+3NsQrCMBSF4cw+xaWLupQrRt+ntqlGSlKSOPj2pi6CuyL4f8s5nOWU1PkgvrTz3XyKVkdrn1m9p+rBvvqy71T3akTNF9xy6VK9N/9pTj6UTVMuTvo4OImjLP0cp8EFGf3k8lqu8ZSb7coAAAAAAAAAAAAAAAAAAH7GA9V4nWkAKAAA | base64 -d | tar -xzf - -C "$_new" || return 1
  mv -T "$_new" '/workspace/.launcher/code/fc55ece26d3fb9b0958d' 2>/dev/null || rm -rf "$_new"
  [[ -d '/workspace/.launcher/code/fc55ece26d3fb9b0958d' ]]
}

# Everything that may fail. Runs as a process of its own, under a time limit.
work() {
  put 'plan.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'run.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBob3N0OiBvbmUgbGF1bmNoZXIgd29ya2VyIHBlciByYW5rLgojIEpvYiB0aW55LWdwdCwgcnVuIHRhc2stMjAyNjExMjEtMDg1NDAxLiBSZW5kZXJlZCBieSBsYXVuY2hlciAwLjEuMC4KIyBUaGUgc3VwZXJ2aXNvciBydW5zIGl0OyBgYmFzaCBzdGFydC5zaGAgYnkgaGFuZCBydW5zIGF0dGVtcHQgMCBvZiB0aGUgc2FtZSBydW4uCiMgc2hlbGxjaGVjayBkaXNhYmxlPVNDMjAxNiAjIHZhbHVlcyBzdGFuZCBpbiBzaW5nbGUgcXVvdGVzLCB3aGVyZSBub3RoaW5nIGluIHRoZW0gaXMgZXhwYW5kZWQKc2V0IC1ldW8gcGlwZWZhaWwKCmRpZSgpIHsKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgNzgKfQojIHVuZml0IFdIWTogdGhlIGZhdWx0IGlzIHRoaXMgbm9kZSdzLiBCZXR3ZWVuIHR3byBhdHRlbXB0cyB0aGUgc3VwZXJ2aXNvciB3YW50cyB0byBrbm93Lgp1bmZpdCgpIHsKICBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV0gfHwgZGllICIkKiIKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgMwp9CgpfcHl0aG9uPSdweXRob24zJwoKaWYgW1sgLXogJHtMQVVOQ0hFUl9BVFRFTVBUOi19IF1dOyB0aGVuCiAgZWNobyAnbGF1bmNoZXI6IHN0YXJ0ZWQgYnkgaGFuZDogdGhpcyBpcyBhdHRlbXB0IDAsIGFuZCBubyBzdXBlcnZpc29yIGp1ZGdlcyBvciByZXN0YXJ0cyBpdCcgPiYyCiAgdW5zZXQgIiR7IUxBVU5DSEVSX0VOVl9AfSIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MApmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgoKIyBPbiBtYW55IHNpdGVzIG9ubHkgYSBsb2dpbiBzaGVsbCBoYXMgdGhlIGZ1bmN0aW9uIGBtb2R1bGVgOiB0aGUgZmlsZSB0aGF0IGRlZmluZXMgaXQgaXMgcmVhZCBoZXJlLgpmaW5kX21vZHVsZV9jb21tYW5kKCkgewogIGxvY2FsIF9maWxlCiAgZm9yIF9maWxlIGluICR7TU9EVUxFU0hPTUU6KyIkTU9EVUxFU0hPTUUvaW5pdC9iYXNoIn0gJHtMTU9EX1BLRzorIiRMTU9EX1BLRy9pbml0L2Jhc2gifSBcCiAgICAvZXRjL3Byb2ZpbGUuZC8qbW9kdWxlcy5zaCAvZXRjL3Byb2ZpbGUuZC8qbG1vZC5zaCAvdXNyL3NoYXJlL3ttb2R1bGVzLE1vZHVsZXMsbG1vZC9sbW9kfS9pbml0L2Jhc2g7IGRvCiAgICBpZiB0eXBlIG1vZHVsZSA+L2Rldi9udWxsIDI+JjE7IHRoZW4gcmV0dXJuIDA7IGZpCiAgICAjIHNoZWxsY2hlY2sgc291cmNlPS9kZXYvbnVsbAogICAgaWYgW1sgLXIgJF9maWxlIF1dOyB0aGVuIHNvdXJjZSAiJF9maWxlIiB8fCB0cnVlOyBmaQogIGRvbmUKfQojIHNldHVwX2ZhaWxlZCBFWElUX0NPREUgUFJJTlRFRCBDT01NQU5ELi4uOiBlbmRzIHdpdGggQ09NTUFORCBhbmQgd2hpY2ggbGluZSBvZiBgc2V0dXA6YCBpdCB3YXMuIGBfc2V0dXBfYXRgIGlzIHRoZSBzY3JpcHQncyBsaW5lIGJlZm9yZSBpdHMgZmlyc3QuCnNldHVwX2ZhaWxlZCgpIHsKICB0cmFwIC0gRVJSIEVYSVQKICAjIFRoZSBsaW5lIHRoYXQgdGhlIHdob2xlIHNjcmlwdCBjYW1lIHRvLCBhbHNvIHdoZXJlIHRoYXQgb25lIGhhcyBjYWxsZWQgYSBmdW5jdGlvbiBvciByZWFkIGEgZmlsZS4KICBsb2NhbCBfbGluZT0ke0JBU0hfTElORU5PWyR7I0JBU0hfTElORU5PW0BdfSAtIDJdfSBfdGV4dD0nJyBfd29yZHMKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF9saW5lPSR7X3NldHVwX2xpbmU6LTB9OyBmaQogIGlmICgoX2xpbmUgPiBfc2V0dXBfYXQpKTsgdGhlbiBfdGV4dD0kKHNlZCAtbiAiJF9saW5le3MvXiAqLy87cH0iICIke0JBU0hfU09VUkNFWyR7I0JBU0hfU09VUkNFW0BdfSAtIDFdfSIgMj4vZGV2L251bGwpIHx8IHRydWU7IGZpCiAgX3dvcmRzPSJsaW5lICQoKF9saW5lIC0gX3NldHVwX2F0KSkgb2Ygc2V0dXAgaW4gdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDE6ICRfdGV4dCIKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF93b3Jkcz0ic2V0dXAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDEiOyBmaQogIGlmIFtbIC1uICQyIF1dOyB0aGVuIF93b3Jkcys9IiAoaXQgcHJpbnRlZDogJDIpIjsgZmkKICBpZiBbWyAkX3RleHQgPX4gKF58W15bOmFsbnVtOl1fLV0pKG1vZHVsZXxtbClbWzpzcGFjZTpdXSBdXSAmJiAhIHR5cGUgbW9kdWxlID4vZGV2L251bGwgMj4mMTsgdGhlbgogICAgX3dvcmRzKz0nOyBubyBmaWxlIGluIHRoZSB1c3VhbCBwbGFjZXMgZGVmaW5lcyBtb2R1bGU6IGFkZCBhIGxpbmUgYmVmb3JlIHRoaXMgb25lIHRoYXQgc291cmNlcyB0aGUgZmlsZSB3aGljaCBkb2VzJwogIGZpCiAgIiR7QDozfSIgIiRfd29yZHMiCn0KCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgYXMgaXRzIGF1dGhvciB3cm90ZSBpdC4gQSBiYXRjaCBzY3JpcHQgbWF5IGhhdmUgcnVuIGl0IGJlZm9yZSB0aGUgY29udGFpbmVyLgppZiBbWyAteiAke0xBVU5DSEVSX1NFVFVQX0RPTkU6LX0gXV07IHRoZW4KICBzZXQgK3UKICBfc2V0dXBfYXQ9JExJTkVOTzsgdHJhcCAnKChMSU5FTk8gPiBfc2V0dXBfYXQpKSAmJiBfc2V0dXBfbGluZT0kTElORU5PJyBERUJVRzsgdHJhcCAnc2V0dXBfZmFpbGVkICQ/ICIiIGRpZScgRVJSIEVYSVQKICBweXRob24zIC1jICdpbXBvcnQgbGF1bmNoZXInIDI+L2Rldi9udWxsIHx8IFBJUF9CUkVBS19TWVNURU1fUEFDS0FHRVM9MSBweXRob24zIC1tIHBpcCBpbnN0YWxsIC0tcXVpZXQgL3dvcmtzcGFjZS93aGVlbHMvZ3B1X2xhdW5jaGVyLSoud2hsCiAgdHJhcCAtIEVSUiBFWElUIERFQlVHCiAgc2V0IC11CmZpCgojIEEgR1BVIHRoYXQgZmVsbCBvZmYgdGhlIGJ1cyBpcyBjaGVhcGVyIHRvIGZpbmQgaGVyZSB0aGFuIGluIHRoZSBmaXJzdCBjb2xsZWN0aXZlLiBXaGVyZSB0aGUgZHJpdmVyIGhhbmdzLCBudmlkaWEtc21pCiMgbWF5IG5vdCBldmVuIGVuZCBieSBTSUdLSUxMOiBvbmx5IGl0cyBhbnN3ZXIgaXMgd2FpdGVkIGZvci4gV2l0aG91dCBwZXJzaXN0ZW5jZSBtb2RlLCB0aGUgZHJpdmVyIHN0YXJ0cyBmaXJzdC4KX3BhdGllbmNlPTYwCmlmIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbiBfcGF0aWVuY2U9MjA7IGZpICMgdGhlIHN1cGVydmlzb3Igd2FpdHMgbm8gbG9uZ2VyIHRoYW4gMzAgcwppZiBjb21tYW5kIC12IG52aWRpYS1zbWkgPi9kZXYvbnVsbDsgdGhlbgogIHJlYWQgLXIgLXQgIiRfcGF0aWVuY2UiIF9ncHVzIDwgPChleGVjIDI+L2Rldi9udWxsOyBudmlkaWEtc21pIC1MIHwgZ3JlcCAtY0UgJ14oR1BVfCAgTUlHKScpIHx8CiAgICB1bmZpdCAibnZpZGlhLXNtaSBnaXZlcyBubyBhbnN3ZXIgd2l0aGluICRfcGF0aWVuY2UgcyBvbiAkKGhvc3RuYW1lKTogdGhlIGRyaXZlciBvZiBpdHMgR1BVcyBoYW5ncy4gTG9vayBhdCBkbWVzZyAoWGlkKSwgYW5kIHJlc3RhcnQgdGhlIG5vZGUgb3IgbGVhdmUgaXQgb3V0IgogICgoX2dwdXMgPj0gMSkpIHx8IHVuZml0ICJ0aGlzIG5vZGUgc2hvd3MgJF9ncHVzIEdQVXMsIHRoZSBqb2IgbmVlZHMgIjEKZWxpZiAhIGNvbW1hbmQgLXYgcm9jbS1zbWkgPi9kZXYvbnVsbCAmJiAhIGNvbXBnZW4gLUcgJy9kZXYvbnZpZGlhWzAtOV0qJyA+L2Rldi9udWxsOyB0aGVuCiAgIyBUcmFpbmluZyB3b3VsZCBnbyBvbiBvbiB0aGUgQ1BVLCBzaWxlbnRseSBhbmQgZm9yIGV2ZXIuCiAgdW5maXQgIm5vIEdQVSBvbiB0aGlzIG5vZGU6IG5laXRoZXIgbnZpZGlhLXNtaSwgcm9jbS1zbWkgbm9yIC9kZXYvbnZpZGlhMCBpcyBoZXJlOyBHUFVzIHBlciBub2RlIG9mIHRoZSBqb2I6ICIxCmZpCgojIEFzIG1hbnkgb3BlbiBmaWxlcyBhcyB0aGlzIGhvc3QgYWxsb3dzLCBzaW5jZSBEYXRhTG9hZGVyIHdvcmtlcnMgYW5kIE5DQ0wgbmVlZCB0aGVtLCBhbmQgYXMgbXVjaCBsb2NrZWQgbWVtb3J5Lgpfc29mdD0kKHVsaW1pdCAtUyAtbikgX2hhcmQ9JCh1bGltaXQgLUggLW4pCmlmIFtbICRfaGFyZCA9PSB1bmxpbWl0ZWQgXV0gfHwgKChfaGFyZCA+IDEwNDg1NzYpKTsgdGhlbiBfaGFyZD0xMDQ4NTc2OyBmaQppZiBbWyAkX3NvZnQgIT0gdW5saW1pdGVkIF1dICYmICgoX3NvZnQgPCBfaGFyZCkpOyB0aGVuIHVsaW1pdCAtUyAtbiAiJF9oYXJkIiB8fCB0cnVlOyBmaQp1bGltaXQgLVMgLWwgIiQodWxpbWl0IC1IIC1sKSIgMj4vZGV2L251bGwgfHwgdHJ1ZQoKCiMgV2hhdCBldmVyeSByYW5rIHJ1bnMuIGxhdW5jaGVyJ3Mgd29ya2VyIGZpbGxzIHBsYWNlaG9sZGVycyBzdWNoIGFzIHttaWNyb19iYXRjaF9zaXplfSBmb3IgZWFjaCBhdHRlbXB0LgpfYXJndj0oJ3B5dGhvbjMnICctbScgJ2xhdW5jaGVyLnRyYWluJykKCmNkICcvd29ya3NwYWNlLy5sYXVuY2hlci9jb2RlL2ZjNTVlY2UyNmQzZmI5YjA5NThkJyB8fCB1bmZpdCAndGhlIHdvcmtpbmcgZGlyZWN0b3J5IG9mIHRoZSBqb2IgZG9lcyBub3QgZXhpc3Qgb24gdGhpcyBub2RlOiAnJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZmM1NWVjZTI2ZDNmYjliMDk1OGQnCgojIFNlY3JldHM6IHZhbHVlcyBjb21lIGZyb20gdGhlIHN1cGVydmlzb3IsIG9yIGZyb20gd2hlcmUgdGhlIGpvYiBzYXlzLiBUaGV5IHN0YW5kIGluIG5vIGZpbGUgaGVyZS4KaWYgW1sgISAtdiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4gXV07IHRoZW4KICBpZiBbWyAtdiBIRl9UT0tFTiBdXTsgdGhlbiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU49JEhGX1RPS0VOOyBmaQpmaQpbWyAtdiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4gXV0gfHwgZGllICdzZWNyZXQgJydIRl9UT0tFTicnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4KaWYgW1sgISAtdiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWSBdXTsgdGhlbgogIGlmIFtbIC12IFdBTkRCX0FQSV9LRVkgXV07IHRoZW4gTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVk9JFdBTkRCX0FQSV9LRVk7IGZpCmZpCltbIC12IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZIF1dIHx8IGRpZSAnc2VjcmV0ICcnV0FOREJfQVBJX0tFWScnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWQoKaWYgW1sgLXogJHtQWVRPUkNIX0NVREFfQUxMT0NfQ09ORjotfSR7UFlUT1JDSF9BTExPQ19DT05GOi19IF1dOyB0aGVuCiAgZXhwb3J0IFBZVE9SQ0hfQ1VEQV9BTExPQ19DT05GPSdleHBhbmRhYmxlX3NlZ21lbnRzOlRydWUnCmZpCgojIEV4YW1pbmUgdGhpcyBub2RlIGluIHRoZSBlbnZpcm9ubWVudCBvZiB0aGUgcmFua3M6IGBjaGVja3M6IGRvY3RvcmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgb3IgdGhlIHN1cGVydmlzb3IgYXNrcyBmb3IKIyBpdCBhZnRlciBhbiBhdHRlbXB0IHRoYXQgdGhlIGNsdXN0ZXIgbWF5IGhhdmUgZW5kZWQuCl9jaGVja3M9CmlmIFtbIC1uICRfY2hlY2tzJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuCiAgX3NhaWQ9JCgiJF9weXRob24iIC1tIGxhdW5jaGVyLmRvY3RvcikgJiYgX3JjPTAgfHwgX3JjPSQ/CiAgaWYgKChfcmMgPT0gMykpOyB0aGVuCiAgICB1bmZpdCAibm9kZSAke0xBVU5DSEVSX05PREVfUkFOSzotMH0gKCQoaG9zdG5hbWUpKSBmYWlscyB0aGUgZG9jdG9yJ3MgY2hlY2tzOiAkX3NhaWQiCiAgZWxpZiAoKF9yYykpOyB0aGVuCiAgICBlY2hvICJsYXVuY2hlcjogdGhlIGRvY3RvcidzIGNoZWNrcyBlbmRlZCB3aXRoIGV4aXQgY29kZSAkX3JjOiBnb2luZyBvbiB3aXRob3V0IHRoZW0iID4mMgogIGZpCmZpCmlmIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbiBleGl0IDA7IGZpCgojIE9uZSBob3N0OiB0aGVyZSBpcyBubyB0b3JjaHJ1biwgYW5kIGVhY2ggcmFuayBnZXRzIHRoZSB2YXJpYWJsZXMgdGhhdCBvbmUgd291bGQgc2V0IChSQU5LLCBXT1JMRF9TSVpFIGFuZCBzbyBvbikuCmV4ZWMgIiRfcHl0aG9uIiAtbSBsYXVuY2hlci5zdXBlcnZpc2UubG9jYWxfcmFua3MgMSAtLSAiJHtfYXJndltAXX0iCg== || return 1
  # `setup:` of the cluster profile, as its author wrote it.
  trap 'say "a setup line of the cluster profile failed with exit code $?"; exit 78' ERR
  set -e +u
  python3 -c 'import launcher' 2>/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet /workspace/wheels/gpu_launcher-*.whl
  set +e -u
  trap - ERR
  export LAUNCHER_SETUP_DONE=1
  if ! unpack; then
    say "the job's code cannot be unpacked into "'/workspace/.launcher/code/fc55ece26d3fb9b0958d'
    return 78
  fi
  # Looked for after `setup:`, which may fetch it.
  if [[ ! -d '/workspace/.launcher/code/fc55ece26d3fb9b0958d' ]]; then
    say "the job's code is not on this pod: put it on the network volume (or into the image), in "'/workspace/.launcher/code/fc55ece26d3fb9b0958d'
    return 78
  fi
  exec "$_python" -m launcher.supervise "$_run_dir" --stop-file "$_stop"
}

# call METHOD PATH: headers and answer on standard output, then the status as its last line. The key is in no argument.
call() {
  if command -v curl >/dev/null; then
    printf 'header = "Authorization: Bearer %s"\n' "${RUNPOD_API_KEY:-}" |
      curl -sS --max-time 30 -K - -X "$1" -D - -w '\n%{http_code}\n' "$_api$2"
  else
    "$(command -v python3 || command -v python || echo "$_python")" -c '
import os, sys, urllib.error, urllib.request
headers = {"Authorization": "Bearer " + os.environ.get("RUNPOD_API_KEY", "")}
try:
    answer = urllib.request.urlopen(urllib.request.Request(sys.argv[2], None, headers, method=sys.argv[1]), timeout=30)
except urllib.error.HTTPError as error:
    answer = error
print(answer.headers)
print(answer.read().decode(errors="replace"))
print(answer.status)
' "$1" "$_api$2"
  fi
}

# The time by RunPod's clock, which the deadline is told by, in epoch seconds. This pod's may be another.
runpods_time() {
  local _date
  _date=$(call GET "/pods/$_pod" | tr -d '\r' | sed -n 's/^[Dd]ate: //p')
  [[ -n $_date ]] && date -d "${_date%%$'\n'*}" +%s
}

# The cluster that this pod belongs to.
cluster_id() {
  local _answer
  _answer=$(call GET "/pods/$_pod" | tr -d ' \n')
  [[ $_answer =~ \"cluster\":\{[^}]*\"id\":\"([A-Za-z0-9_-]+)\" ]] && printf '%s' "${BASH_REMATCH[1]}"
}

# Ends this pod, or the whole cluster that it belongs to. 404: it is gone already.
end_once() {
  local _answer _status _cluster
  _answer=$(call DELETE "/pods/$_pod")
  _status=${_answer##*$'\n'}
  case $_status in
    2?? | 404) return 0 ;;
    409)
      # Pods of a cluster end with the cluster only.
      if _cluster=$(cluster_id); then
        _answer=$(call DELETE "/clusters/$_cluster")
        _status=${_answer##*$'\n'}
        case $_status in 2?? | 404) return 0 ;; esac
      fi
      ;;
  esac
  say "RunPod answered '$_status' to the request to end pod $_pod"
  return 1
}

end_pod() {
  local _pause=1
  until end_once; do
    say "trying again in $_pause s"
    sleep "$_pause"
    _pause=$((_pause < 150 ? _pause * 2 : 300))
  done
  say 'the pod is ending'
  while :; do sleep 3600; done
}

if [[ ${1:-} == work ]]; then
  work
  exit $?
fi

if [[ -e $_done_mark ]]; then
  say 'this pod has finished its run before and was started again'
  end_pod
fi
mkdir -p "$_run_dir" && chmod '700' "$_run_dir"
# Where RunPod's answer was lost, one submission may have become two pods: the first that starts has the run, and
# one of an earlier submission has nothing to do with it any more.
_me=$_pod
_claim=$_run_dir/runpod-submission-$_submission
(set -o noclobber && printf '%s\n' "$_me" >"$_claim") 2>/dev/null
for _ in 1 2 3 4 5; do
  _owner=$(cat "$_claim" 2>/dev/null)
  if [[ -n $_owner ]]; then break; fi
  sleep 1
done
for _file in "$_run_dir"/runpod-submission-*; do
  _suffix=${_file##*-}
  _number=${_suffix//[!0-9]/}
  if [[ $_suffix =~ ^[0-9]+$ ]] && ((_number > _submission)); then _owner=$(<"$_file"); fi
done
if [[ -n $_owner && $_owner != "$_me" ]]; then
  say "$_owner has this run: nothing is left to do here"
  event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-a6000:'"$_owner")"
  end_pod
fi
# The limit counts from the creation of this pod, or else from its first start: a container that crashes is started
# again and billed on.
_now=$(date +%s)
_grace=$((_limit / 10 < 300 ? _limit / 10 : 300))
if [[ $_latest =~ ^[0-9]+$ && ! -e $_deadline_file ]]; then
  _there=$(runpods_time || echo "$_now")
  if ((_latest < _there + _limit)); then _limit=$((_latest - _there)); fi
fi
(set -o noclobber && printf '%s\n' "$((_now + _limit))" >"$_deadline_file") 2>/dev/null
_deadline=$(cat "$_deadline_file" 2>/dev/null)
# Killed between making the file and writing it, or the volume is full.
[[ $_deadline =~ ^[0-9]+$ ]] || _deadline=$(($(date -r "$_deadline_file" +%s || date +%s) + _limit))
_limit=$((_deadline - _now))
if ((_limit <= 0)); then
  give_up time-limit 'the time of the pod (max_hours, or what the budget pays for) was over when its start script began'
fi
# Where it cannot be written, nothing that the run does would be kept either.
if ! printf '%s\n' "$_now" >>"$_starts_file"; then
  give_up disk-full "cannot write $_starts_file: is the network volume full?"
fi
mapfile -t _starts <"$_starts_file"
if ((${#_starts[@]} > _most_restarts + 1)); then
  give_up unknown "the pod's start script was killed or its container crashed $((${#_starts[@]} - 1)) times"
fi
# First the run is asked to stop, with time for a checkpoint, then it is ended.
{
  sleep "$((_limit > _grace ? _limit - _grace : 0))"
  printf 'time-limit\n' >"$_stop"
} &
_timer=$!
_log=$_run_dir/pod-node-${_node_rank:-unknown}.log
# Bytes from earlier pods and starts. What follows says why this one failed.
_before=$(wc -c 2>/dev/null <"$_log") || _before=0
exec 9> >(tee -a "$_log")
_tee=$!
# --foreground: a signal reaches the supervisor alone, which ends its ranks in order. The pod's key is for this
# script, which ends the pod with it, and not for what a job runs and prints.
env -u RUNPOD_API_KEY timeout --foreground --signal=TERM --kill-after=180 "$_limit" bash "$0" work \
  >&9 2>&1 9>&- &
_child=$!
exec 9>&-
_woken=''
# RunPod takes an interruptible pod away: SIGKILL follows within seconds.
trap '_woken=yes; [[ -s $_stop ]] || echo preempted >"$_stop"; kill -s TERM "$_child" 2>/dev/null' TERM INT
while :; do
  _woken=''
  wait "$_child"
  _rc=$?
  [[ -n $_woken ]] || break
done
trap '' TERM INT
kill "$_timer" 2>/dev/null
# The log is whole when `tee` ends. A process that outlives the run may hold it open for ever.
timeout 10 tail --pid="$_tee" -s 0.1 -f /dev/null
if ((_rc == 124 || _rc == 137)); then
  say 'stopped by runpod.max_hours of the cluster profile, or killed'
fi
say "the run ended with exit code $_rc"
# 88: another pod has the run: its records are not ours to write, and it is the one to ask about. Without our
# claim it goes on with the run, too, when its container is started again.
if ((_rc == 88)); then
  _owner='' _newest=0
  for _file in "$_run_dir"/runpod-submission-*; do
    _suffix=${_file##*-}
    _number=${_suffix//[!0-9]/}
    _other=$(cat "$_file" 2>/dev/null)
    if [[ ! $_suffix =~ ^[0-9]+$ || -z $_other || $_other == "$_me" || -e $_run_dir/pod-$_other.done ]]; then continue; fi
    if ((_number > _newest)); then _owner=$_other _newest=$_number; fi
  done
  if [[ -n $_owner ]]; then
    event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-a6000:'"$_owner")"
  fi
  rm -f "$_claim"
fi
if ((_rc != 0 && _rc != 88)); then
  _failure=unknown
  if [[ -s $_stop ]]; then _failure=$(<"$_stop"); fi
  _said() { tail -c "+$((_before + 1))" "$_log" 2>/dev/null; }
  _reason=$(_said | sed -n 's/^\[launcher\] //p' | tail -n 1)
  _reason=${_reason:-$(_said | tail -n 1)}
  judge "$_failure" "${_reason:-the supervisor left no record of its end} (exit code $_rc)"
fi
printf '%s\n' "$_rc" >"$_done_mark"
end_pod
