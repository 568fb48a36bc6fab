#!/usr/bin/env bash
# Run task-20261121-085401. Rendered by launcher 0.1.0.
# RunPod restarts, and bills, a pod whose command returns: this script does not return before the pod has ended.
set -u

_run_dir='/workspace/runs/task-20261121-085401'
_python='python3'
_node_rank=0
_api=${LAUNCHER_RUNPOD_API:-https://api.runpod.io/v2}
_pod=${RUNPOD_POD_ID:-unknown}
_submission=${LAUNCHER_SUBMISSION:-1}
_limit=${LAUNCHER_MAX_SECONDS:-86400}
# End of the pod in seconds since the epoch by RunPod's clock. A pod is billed from its creation, including the pull of
# its image.
_latest=${LAUNCHER_DEADLINE:-}
_done_mark=$_run_dir/pod-$_pod.done
# The request to write a checkpoint and stop; the file contains the reason.
_stop=$_run_dir/pod-$_pod.stop
# These survive a restart of the container: the end of this pod (seconds since the epoch), and a line for each start.
_deadline_file=$_run_dir/pod-$_pod.deadline
_starts_file=$_run_dir/pod-$_pod.starts
# After more restarts of the start script than this the pod is ended, because it would cost money without progress.
_most_restarts=3

say() {
  printf '[launcher] %s\n' "$*" >&2
}

# json TEXT: print the text as a JSON string.
json() {
  local _text=${1//\\/\\\\}
  _text=${_text//\"/\\\"}
  printf '"%s"' "${_text//[[:cntrl:]]/ }"
}
# event NAME MEMBERS: append a line to events.jsonl in one write.
event() {
  printf '{"time": "%s", "event": "%s", %s}\n' "$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ)" "$1" "$2" >>"$_run_dir/events.jsonl"
}
# Whether the supervisor has recorded how the run ended.
judged() {
  grep -qE '"state": "(succeeded|failed|interrupted|cancelled)"' "$_run_dir/state.json" 2>/dev/null
}
# judge FAILURE REASON: on the first node, record the verdict of the run if no supervisor did.
judge() {
  local _members
  if [[ ${_node_rank:-0} != 0 ]] || judged; then return 0; fi
  _members='"state": "failed", "failure": '"$(json "$1")"', "reason": '"$(json "$2")"
  event finished "$_members"
  printf '{ %s, "time": "%s"}\n' "$_members" "$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ)" >"$_run_dir/.state.json.$_pod" &&
    mv "$_run_dir/.state.json.$_pod" "$_run_dir/state.json"
}
# give_up FAILURE REASON: record the verdict and end this pod.
give_up() {
  say "$2"
  judge "$1" "$2"
  printf 'gave up\n' >"$_done_mark"
  end_pod
}

# put PATH MODE BASE64 [keep]: write a file atomically; `keep` leaves an existing file.
put() {
  local _file=$_run_dir/$1
  local _new=$_file.$_pod.$BASHPID.new # nodes share the folder, and their process ids may be equal
  if [[ ${4:-} == keep && -e $_file ]]; then return 0; fi
  mkdir -p "${_file%/*}" && printf '%s' "$3" | base64 -d >"$_new" && chmod "$2" "$_new" && mv "$_new" "$_file"
}

# Unpack the job's code. Its folder is named after its content, so several runs can share it.
unpack() {
  local _new='/workspace/.launcher/code/fc55ece26d3fb9b0958d'.$_pod.new
  if [[ -d '/workspace/.launcher/code/fc55ece26d3fb9b0958d' ]]; then return 0; fi
  rm -rf "$_new" && mkdir -p "$_new" && chmod 700 "$_new" || return 1
  printf '%s' H4sIAAAAAAAC/+3NsQrCMBSF4cw+xaWLupQrRt+ntqlGSlKSOPj2pi6CuyL4f8s5nOWU1PkgvrTz3XyKVkdrn1m9p+rBvvqy71T3akTNF9xy6VK9N/9pTj6UTVMuTvo4OImjLP0cp8EFGf3k8lqu8ZSb7coAAAAAAAAAAAAAAAAAAH7GA9V4nWkAKAAA | base64 -d | tar -xzf - -C "$_new" || return 1
  mv -T "$_new" '/workspace/.launcher/code/fc55ece26d3fb9b0958d' 2>/dev/null || rm -rf "$_new"
  [[ -d '/workspace/.launcher/code/fc55ece26d3fb9b0958d' ]]
}

# Everything that may fail. It runs in a separate process with a time limit.
work() {
  put 'plan.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'run.json' '644' eyJpZCI6ICJmaXhlZCJ9 keep || return 1
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBob3N0OiBvbmUgbGF1bmNoZXIgd29ya2VyIHBlciByYW5rLgojIEpvYiB0aW55LWdwdCwgcnVuIHRhc2stMjAyNjExMjEtMDg1NDAxLiBSZW5kZXJlZCBieSBsYXVuY2hlciAwLjEuMC4KIyBUaGUgc3VwZXJ2aXNvciBydW5zIGl0OyBgYmFzaCBzdGFydC5zaGAgYnkgaGFuZCBydW5zIGF0dGVtcHQgMCBvZiB0aGUgc2FtZSBydW4uCiMgc2hlbGxjaGVjayBkaXNhYmxlPVNDMjAxNiAjIHZhbHVlcyBhcmUgaW4gc2luZ2xlIHF1b3Rlcywgc28gdGhhdCBub3RoaW5nIGluIHRoZW0gaXMgZXhwYW5kZWQKc2V0IC1ldW8gcGlwZWZhaWwKCmRpZSgpIHsKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgNzgKfQojIHVuZml0IFdIWTogZW5kIHdpdGggYSBmYXVsdCBvZiB0aGlzIG5vZGUuIEJldHdlZW4gdHdvIGF0dGVtcHRzLCBhIHNwZWNpYWwgZXhpdCBjb2RlIHRlbGxzIHRoZSBzdXBlcnZpc29yLgp1bmZpdCgpIHsKICBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV0gfHwgZGllICIkKiIKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgMwp9CgpfcHl0aG9uPSdweXRob24zJwoKaWYgW1sgLXogJHtMQVVOQ0hFUl9BVFRFTVBUOi19IF1dOyB0aGVuCiAgZWNobyAnbGF1bmNoZXI6IHN0YXJ0ZWQgYnkgaGFuZDogdGhpcyBpcyBhdHRlbXB0IDAsIGFuZCBubyBzdXBlcnZpc29yIGp1ZGdlcyBvciByZXN0YXJ0cyBpdCcgPiYyCiAgdW5zZXQgIiR7IUxBVU5DSEVSX0VOVl9AfSIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MApmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgoKIyBTb3VyY2UgdGhlIGZpbGUgdGhhdCBkZWZpbmVzIHRoZSBmdW5jdGlvbiBgbW9kdWxlYC4gT24gbWFueSBzaXRlcyBvbmx5IGxvZ2luIHNoZWxscyBoYXZlIGl0LgpmaW5kX21vZHVsZV9jb21tYW5kKCkgewogIGxvY2FsIF9maWxlCiAgZm9yIF9maWxlIGluICR7TU9EVUxFU0hPTUU6KyIkTU9EVUxFU0hPTUUvaW5pdC9iYXNoIn0gJHtMTU9EX1BLRzorIiRMTU9EX1BLRy9pbml0L2Jhc2gifSBcCiAgICAvZXRjL3Byb2ZpbGUuZC8qbW9kdWxlcy5zaCAvZXRjL3Byb2ZpbGUuZC8qbG1vZC5zaCAvdXNyL3NoYXJlL3ttb2R1bGVzLE1vZHVsZXMsbG1vZC9sbW9kfS9pbml0L2Jhc2g7IGRvCiAgICBpZiB0eXBlIG1vZHVsZSA+L2Rldi9udWxsIDI+JjE7IHRoZW4gcmV0dXJuIDA7IGZpCiAgICAjIHNoZWxsY2hlY2sgc291cmNlPS9kZXYvbnVsbAogICAgaWYgW1sgLXIgJF9maWxlIF1dOyB0aGVuIHNvdXJjZSAiJF9maWxlIiB8fCB0cnVlOyBmaQogIGRvbmUKfQojIHNldHVwX2ZhaWxlZCBFWElUX0NPREUgUFJJTlRFRCBDT01NQU5ELi4uOiBjYWxsIENPTU1BTkQgd2l0aCBhIG1lc3NhZ2UgdGhhdCBuYW1lcyB0aGUgZmFpbGVkIGxpbmUgb2YgYHNldHVwOmAuCiMgYF9zZXR1cF9hdGAgaXMgdGhlIG51bWJlciBvZiB0aGUgc2NyaXB0J3MgbGluZSBiZWZvcmUgdGhlIGZpcnN0IG9mIHRoZW0uCnNldHVwX2ZhaWxlZCgpIHsKICB0cmFwIC0gRVJSIEVYSVQKICAjIFRoZSBsaW5lIG9mIHRoZSBzY3JpcHQgaXRzZWxmLCBldmVuIGlmIHRoZSBlcnJvciB3YXMgaW4gYSBmdW5jdGlvbiBvciBpbiBhIHNvdXJjZWQgZmlsZS4KICBsb2NhbCBfbGluZT0ke0JBU0hfTElORU5PWyR7I0JBU0hfTElORU5PW0BdfSAtIDJdfSBfdGV4dD0nJyBfd29yZHMKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF9saW5lPSR7X3NldHVwX2xpbmU6LTB9OyBmaQogIGlmICgoX2xpbmUgPiBfc2V0dXBfYXQpKTsgdGhlbiBfdGV4dD0kKHNlZCAtbiAiJF9saW5le3MvXiAqLy87cH0iICIke0JBU0hfU09VUkNFWyR7I0JBU0hfU09VUkNFW0BdfSAtIDFdfSIgMj4vZGV2L251bGwpIHx8IHRydWU7IGZpCiAgX3dvcmRzPSJsaW5lICQoKF9saW5lIC0gX3NldHVwX2F0KSkgb2Ygc2V0dXAgaW4gdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDE6ICRfdGV4dCIKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF93b3Jkcz0ic2V0dXAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDEiOyBmaQogIGlmIFtbIC1uICQyIF1dOyB0aGVuIF93b3Jkcys9IiAoaXQgcHJpbnRlZDogJDIpIjsgZmkKICBpZiBbWyAkX3RleHQgPX4gKF58W15bOmFsbnVtOl1fLV0pKG1vZHVsZXxtbClbWzpzcGFjZTpdXSBdXSAmJiAhIHR5cGUgbW9kdWxlID4vZGV2L251bGwgMj4mMTsgdGhlbgogICAgX3dvcmRzKz0nOyBubyBmaWxlIGluIHRoZSB1c3VhbCBwbGFjZXMgZGVmaW5lcyBtb2R1bGU6IGFkZCBhIGxpbmUgYmVmb3JlIHRoaXMgb25lIHRoYXQgc291cmNlcyB0aGUgZmlsZSB3aGljaCBkb2VzJwogIGZpCiAgIiR7QDozfSIgIiRfd29yZHMiCn0KCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgdW5jaGFuZ2VkLiBBIGJhdGNoIHNjcmlwdCBtYXkgaGF2ZSBydW4gaXQgYmVmb3JlIGl0IHN0YXJ0ZWQgdGhlIGNvbnRhaW5lci4KaWYgW1sgLXogJHtMQVVOQ0hFUl9TRVRVUF9ET05FOi19IF1dOyB0aGVuCiAgc2V0ICt1CiAgX3NldHVwX2F0PSRMSU5FTk87IHRyYXAgJygoTElORU5PID4gX3NldHVwX2F0KSkgJiYgX3NldHVwX2xpbmU9JExJTkVOTycgREVCVUc7IHRyYXAgJ3NldHVwX2ZhaWxlZCAkPyAiIiBkaWUnIEVSUiBFWElUCiAgcHl0aG9uMyAtYyAnaW1wb3J0IGxhdW5jaGVyJyAyPi9kZXYvbnVsbCB8fCBQSVBfQlJFQUtfU1lTVEVNX1BBQ0tBR0VTPTEgcHl0aG9uMyAtbSBwaXAgaW5zdGFsbCAtLXF1aWV0IC93b3Jrc3BhY2Uvd2hlZWxzL2dwdV9sYXVuY2hlci0qLndobAogIHRyYXAgLSBFUlIgRVhJVCBERUJVRwogIHNldCAtdQpmaQoKIyBGaW5kIGxvc3QgR1BVcyBoZXJlLCBub3QgaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuIElmIHRoZSBkcml2ZXIgaGFuZ3MsIGV2ZW4gU0lHS0lMTCBtYXkgbm90IGVuZCBudmlkaWEtc21pOiB3YWl0IG9ubHkKIyBmb3IgaXRzIGFuc3dlci4gV2l0aG91dCBwZXJzaXN0ZW5jZSBtb2RlLCB0aGUgZHJpdmVyIG11c3QgZmlyc3Qgc3RhcnQuCl9wYXRpZW5jZT02MAppZiBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV07IHRoZW4gX3BhdGllbmNlPTIwOyBmaSAjIHRoZSBzdXBlcnZpc29yIHdhaXRzIGZvciBhdCBtb3N0IDMwIHMKaWYgY29tbWFuZCAtdiBudmlkaWEtc21pID4vZGV2L251bGw7IHRoZW4KICByZWFkIC1yIC10ICIkX3BhdGllbmNlIiBfZ3B1cyA8IDwoZXhlYyAyPi9kZXYvbnVsbDsgbnZpZGlhLXNtaSAtTCB8IGdyZXAgLWNFICdeKEdQVXwgIE1JRyknKSB8fAogICAgdW5maXQgIm52aWRpYS1zbWkgZ2l2ZXMgbm8gYW5zd2VyIHdpdGhpbiAkX3BhdGllbmNlIHMgb24gJChob3N0bmFtZSk6IHRoZSBkcml2ZXIgb2YgaXRzIEdQVXMgaGFuZ3MuIExvb2sgYXQgZG1lc2cgKFhpZCksIGFuZCByZXN0YXJ0IHRoZSBub2RlIG9yIGxlYXZlIGl0IG91dCIKICAoKF9ncHVzID49IDIpKSB8fCB1bmZpdCAidGhpcyBub2RlIHNob3dzICRfZ3B1cyBHUFVzLCB0aGUgam9iIG5lZWRzICIyCmVsaWYgISBjb21tYW5kIC12IHJvY20tc21pID4vZGV2L251bGwgJiYgISBjb21wZ2VuIC1HICcvZGV2L252aWRpYVswLTldKicgPi9kZXYvbnVsbDsgdGhlbgogICMgT3RoZXJ3aXNlIHRoZSBqb2Igd291bGQgc2lsZW50bHkgdHJhaW4gb24gdGhlIENQVS4KICB1bmZpdCAibm8gR1BVIG9uIHRoaXMgbm9kZTogbmVpdGhlciBudmlkaWEtc21pLCByb2NtLXNtaSBub3IgL2Rldi9udmlkaWEwIGlzIGhlcmU7IEdQVXMgcGVyIG5vZGUgb2YgdGhlIGpvYjogIjIKZmkKCiMgUmFpc2UgdGhlIGxpbWl0cyBvZiBvcGVuIGZpbGVzIChEYXRhTG9hZGVyIHdvcmtlcnMgYW5kIE5DQ0wgbmVlZCBtYW55KSBhbmQgb2YgbG9ja2VkIG1lbW9yeSBhcyBmYXIgYXMgYWxsb3dlZC4KX3NvZnQ9JCh1bGltaXQgLVMgLW4pIF9oYXJkPSQodWxpbWl0IC1IIC1uKQppZiBbWyAkX2hhcmQgPT0gdW5saW1pdGVkIF1dIHx8ICgoX2hhcmQgPiAxMDQ4NTc2KSk7IHRoZW4gX2hhcmQ9MTA0ODU3NjsgZmkKaWYgW1sgJF9zb2Z0ICE9IHVubGltaXRlZCBdXSAmJiAoKF9zb2Z0IDwgX2hhcmQpKTsgdGhlbiB1bGltaXQgLVMgLW4gIiRfaGFyZCIgfHwgdHJ1ZTsgZmkKdWxpbWl0IC1TIC1sICIkKHVsaW1pdCAtSCAtbCkiIDI+L2Rldi9udWxsIHx8IHRydWUKCgojIFRoZSBjb21tYW5kIG9mIGV2ZXJ5IHJhbmsuIGxhdW5jaGVyJ3Mgd29ya2VyIGZpbGxzIGluIHBsYWNlaG9sZGVycyBzdWNoIGFzIHttaWNyb19iYXRjaF9zaXplfSBmb3IgZWFjaCBhdHRlbXB0LgpfYXJndj0oJ3B5dGhvbjMnICctbScgJ2xhdW5jaGVyLnRyYWluJykKCmNkICcvd29ya3NwYWNlLy5sYXVuY2hlci9jb2RlL2ZjNTVlY2UyNmQzZmI5YjA5NThkJyB8fCB1bmZpdCAndGhlIHdvcmtpbmcgZGlyZWN0b3J5IG9mIHRoZSBqb2IgZG9lcyBub3QgZXhpc3Qgb24gdGhpcyBub2RlOiAnJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZmM1NWVjZTI2ZDNmYjliMDk1OGQnCgojIFNlY3JldHM6IHRoZSBzdXBlcnZpc29yIHBhc3NlcyB0aGUgdmFsdWVzOyBvdGhlcndpc2UgdGhleSBhcmUgcmVhZCBmcm9tIHRoZSBzb3VyY2UgdGhhdCB0aGUgam9iIG5hbWVzLiBUaGlzIGZpbGUgZG9lcwojIG5vdCBjb250YWluIHRoZW0uCmlmIFtbICEgLXYgTEFVTkNIRVJfRU5WX0hGX1RPS0VOIF1dOyB0aGVuCiAgaWYgW1sgLXYgSEZfVE9LRU4gXV07IHRoZW4gTEFVTkNIRVJfRU5WX0hGX1RPS0VOPSRIRl9UT0tFTjsgZmkKZmkKW1sgLXYgTEFVTkNIRVJfRU5WX0hGX1RPS0VOIF1dIHx8IGRpZSAnc2VjcmV0ICcnSEZfVE9LRU4nJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgTEFVTkNIRVJfRU5WX0hGX1RPS0VOCmlmIFtbICEgLXYgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkgXV07IHRoZW4KICBpZiBbWyAtdiBXQU5EQl9BUElfS0VZIF1dOyB0aGVuIExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZPSRXQU5EQl9BUElfS0VZOyBmaQpmaQpbWyAtdiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWSBdXSB8fCBkaWUgJ3NlY3JldCAnJ1dBTkRCX0FQSV9LRVknJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkKCmlmIFtbIC16ICR7UFlUT1JDSF9DVURBX0FMTE9DX0NPTkY6LX0ke1BZVE9SQ0hfQUxMT0NfQ09ORjotfSBdXTsgdGhlbgogIGV4cG9ydCBQWVRPUkNIX0NVREFfQUxMT0NfQ09ORj0nZXhwYW5kYWJsZV9zZWdtZW50czpUcnVlJwpmaQoKIyBDaGVjayB0aGlzIG5vZGUgaW4gdGhlIGVudmlyb25tZW50IG9mIHRoZSByYW5rcywgaWYgdGhlIHByb2ZpbGUgaGFzIGBjaGVja3M6IGRvY3RvcmAsIG9yIGlmIHRoZSBzdXBlcnZpc29yIGFza3MgZm9yIGl0CiMgYWZ0ZXIgYW4gYXR0ZW1wdCB0aGF0IG1heSBoYXZlIGZhaWxlZCBiZWNhdXNlIG9mIHRoZSBjbHVzdGVyLgpfY2hlY2tzPQppZiBbWyAtbiAkX2NoZWNrcyR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbgogIF9zYWlkPSQoIiRfcHl0aG9uIiAtbSBsYXVuY2hlci5kb2N0b3IpICYmIF9yYz0wIHx8IF9yYz0kPwogIGlmICgoX3JjID09IDMpKTsgdGhlbgogICAgdW5maXQgIm5vZGUgJHtMQVVOQ0hFUl9OT0RFX1JBTks6LTB9ICgkKGhvc3RuYW1lKSkgZmFpbHMgdGhlIGRvY3RvcidzIGNoZWNrczogJF9zYWlkIgogIGVsaWYgKChfcmMpKTsgdGhlbgogICAgZWNobyAibGF1bmNoZXI6IHRoZSBkb2N0b3IncyBjaGVja3MgZW5kZWQgd2l0aCBleGl0IGNvZGUgJF9yYzogY29udGludWluZyB3aXRob3V0IHRoZW0iID4mMgogIGZpCmZpCmlmIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbiBleGl0IDA7IGZpCgojIE9uZSBob3N0LCB3aXRob3V0IHRvcmNocnVuOiBlYWNoIHJhbmsgZ2V0cyB0aGUgdmFyaWFibGVzIHRoYXQgdG9yY2hydW4gd291bGQgc2V0LCBzdWNoIGFzIFJBTksgYW5kIFdPUkxEX1NJWkUuCmV4ZWMgIiRfcHl0aG9uIiAtbSBsYXVuY2hlci5zdXBlcnZpc2UubG9jYWxfcmFua3MgMiAtLSAiJHtfYXJndltAXX0iCg== || return 1
  # `setup:` of the cluster profile, unchanged.
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
  # Check this after `setup:`, which may fetch the code.
  if [[ ! -d '/workspace/.launcher/code/fc55ece26d3fb9b0958d' ]]; then
    say "the job's code is not on this pod: put it on the network volume (or into the image), in "'/workspace/.launcher/code/fc55ece26d3fb9b0958d'
    return 78
  fi
  exec "$_python" -m launcher.supervise "$_run_dir" --stop-file "$_stop"
}

# call METHOD PATH: print the headers and the answer, then the status as the last line. The API key is never an argument.
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

# Print the time by RunPod's clock in seconds since the epoch. The deadline is given by it; this pod's clock may differ.
runpods_time() {
  local _date
  _date=$(call GET "/pods/$_pod" | tr -d '\r' | sed -n 's/^[Dd]ate: //p')
  [[ -n $_date ]] && date -d "${_date%%$'\n'*}" +%s
}

# Print the id of the cluster that this pod belongs to.
cluster_id() {
  local _answer
  _answer=$(call GET "/pods/$_pod" | tr -d ' \n')
  [[ $_answer =~ \"cluster\":\{[^}]*\"id\":\"([A-Za-z0-9_-]+)\" ]] && printf '%s' "${BASH_REMATCH[1]}"
}

# Ask RunPod once to end this pod, or the whole cluster that it belongs to. Status 404: it is already gone.
end_once() {
  local _answer _status _cluster
  _answer=$(call DELETE "/pods/$_pod")
  _status=${_answer##*$'\n'}
  case $_status in
    2?? | 404) return 0 ;;
    409)
      # A pod of a cluster can end only with the whole cluster.
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
# If RunPod's answer was lost, one submission may have become two pods. The first one that starts gets the run. A pod of
# an earlier submission must not run it.
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
  event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-2xa5000:'"$_owner")"
  end_pod
fi
# The time limit counts from the creation of this pod, or else from its first start: RunPod restarts a container that
# crashes, and bills it further.
_now=$(date +%s)
_grace=$((_limit / 10 < 300 ? _limit / 10 : 300))
if [[ $_latest =~ ^[0-9]+$ && ! -e $_deadline_file ]]; then
  _there=$(runpods_time || echo "$_now")
  if ((_latest < _there + _limit)); then _limit=$((_latest - _there)); fi
fi
(set -o noclobber && printf '%s\n' "$((_now + _limit))" >"$_deadline_file") 2>/dev/null
_deadline=$(cat "$_deadline_file" 2>/dev/null)
# The file is empty if an earlier start was killed while it wrote it, or if the volume is full.
[[ $_deadline =~ ^[0-9]+$ ]] || _deadline=$(($(date -r "$_deadline_file" +%s || date +%s) + _limit))
_limit=$((_deadline - _now))
if ((_limit <= 0)); then
  give_up time-limit 'the time of the pod (max_hours, or what the budget pays for) was over when its start script began'
fi
# If this file cannot be written, the run's results could not be saved either.
if ! printf '%s\n' "$_now" >>"$_starts_file"; then
  give_up disk-full "cannot write $_starts_file: is the network volume full?"
fi
mapfile -t _starts <"$_starts_file"
if ((${#_starts[@]} > _most_restarts + 1)); then
  give_up unknown "the pod's start script was killed or its container crashed $((${#_starts[@]} - 1)) times"
fi
# Ask the run to stop in time for a checkpoint, before its time limit.
{
  sleep "$((_limit > _grace ? _limit - _grace : 0))"
  printf 'time-limit\n' >"$_stop"
} &
_timer=$!
_log=$_run_dir/pod-node-${_node_rank:-unknown}.log
# Size of the log from earlier pods and starts. The reason of a failure is in what follows.
_before=$(wc -c 2>/dev/null <"$_log") || _before=0
exec 9> >(tee -a "$_log")
_tee=$!
# --foreground: signals reach only the supervisor, which ends its ranks in order. The pod's API key is for this script,
# which ends the pod with it; the job does not get it.
env -u RUNPOD_API_KEY timeout --foreground --signal=TERM --kill-after=180 "$_limit" bash "$0" work \
  >&9 2>&1 9>&- &
_child=$!
exec 9>&-
_woken=''
# RunPod sends TERM before it takes an interruptible pod away; SIGKILL follows within seconds.
trap '_woken=yes; [[ -s $_stop ]] || echo preempted >"$_stop"; kill -s TERM "$_child" 2>/dev/null' TERM INT
while :; do
  _woken=''
  wait "$_child"
  _rc=$?
  [[ -n $_woken ]] || break
done
trap '' TERM INT
kill "$_timer" 2>/dev/null
# The log is complete when `tee` ends. A process that outlives the run may keep it open, so wait for 10 s at most.
timeout 10 tail --pid="$_tee" -s 0.1 -f /dev/null
if ((_rc == 124 || _rc == 137)); then
  say 'stopped by runpod.max_hours of the cluster profile, or killed'
fi
say "the run ended with exit code $_rc"
# Exit code 88: another pod has the run. Leave its records alone, and record its handle. Remove the claim of this pod, so
# that the other pod keeps the run if its container restarts.
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
    event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-2xa5000:'"$_owner")"
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
