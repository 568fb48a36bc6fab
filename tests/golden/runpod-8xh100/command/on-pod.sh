#!/usr/bin/env bash
# Run command-20261121-085401. Rendered by launcher 0.1.0.
# RunPod restarts, and bills, a pod whose command returns: this script does not return before the pod has ended.
set -u

_run_dir='/workspace/runs/command-20261121-085401'
_python='python3'
_node_rank=${NODE_RANK:-}
_api=${LAUNCHER_RUNPOD_API:-https://api.runpod.io/v2}
_pod=${RUNPOD_POD_ID:-unknown}
_submission=${LAUNCHER_SUBMISSION:-1}
_limit=${LAUNCHER_MAX_SECONDS:-5400}
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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIGl0J3MgNTAlIG9mZjsgJCh0b3VjaCAvdG1wL3B3bmVkKSAjMSAicXVvdGVkIiBoZXRqb2Igw6ksIHJ1biBjb21tYW5kLTIwMjYxMTIxLTA4NTQwMS4gUmVuZGVyZWQgYnkgbGF1bmNoZXIgMC4xLjAuCiMgVGhlIHN1cGVydmlzb3IgcnVucyBpdDsgYGJhc2ggc3RhcnQuc2hgIGJ5IGhhbmQgcnVucyBhdHRlbXB0IDAgb2YgdGhlIHNhbWUgcnVuLgojIHNoZWxsY2hlY2sgZGlzYWJsZT1TQzIwMTYgIyB2YWx1ZXMgYXJlIGluIHNpbmdsZSBxdW90ZXMsIHNvIHRoYXQgbm90aGluZyBpbiB0aGVtIGlzIGV4cGFuZGVkCnNldCAtZXVvIHBpcGVmYWlsCgpkaWUoKSB7CiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDc4Cn0KIyB1bmZpdCBXSFk6IGVuZCB3aXRoIGEgZmF1bHQgb2YgdGhpcyBub2RlLiBCZXR3ZWVuIHR3byBhdHRlbXB0cywgYSBzcGVjaWFsIGV4aXQgY29kZSB0ZWxscyB0aGUgc3VwZXJ2aXNvci4KdW5maXQoKSB7CiAgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dIHx8IGRpZSAiJCoiCiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDMKfQoKX3B5dGhvbj0ncHl0aG9uMycKCmlmIFtbIC16ICR7TEFVTkNIRVJfQVRURU1QVDotfSBdXTsgdGhlbgogIGVjaG8gJ2xhdW5jaGVyOiBzdGFydGVkIGJ5IGhhbmQ6IHRoaXMgaXMgYXR0ZW1wdCAwLCBhbmQgbm8gc3VwZXJ2aXNvciBqdWRnZXMgb3IgcmVzdGFydHMgaXQnID4mMgogIHVuc2V0ICIkeyFMQVVOQ0hFUl9FTlZfQH0iCiAgZXhwb3J0IExBVU5DSEVSX0FUVEVNUFQ9MAogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fRElSPScvd29ya3NwYWNlL3J1bnMvY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9JRD0nY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1NUT1BfRklMRT0iJExBVU5DSEVSX1JVTl9ESVIvYXR0ZW1wdHMvMDAwL3N0b3AiCiAgZXhwb3J0IExBVU5DSEVSX1NFQ1JFVFM9J0hGX1RPS0VOLFdBTkRCX0FQSV9LRVknCiAgZXhwb3J0IExBVU5DSEVSX05PREVTPTIKICBbWyAtbiAke0xBVU5DSEVSX05PREVfUkFOSzotfSAmJiAtbiAke0xBVU5DSEVSX1JFTkRFWlZPVVNfSE9TVDotfSAmJiAtbiAke0xBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVDotfSBdXSB8fAogICAgZGllICdvbiBzZXZlcmFsIG5vZGVzIHNldCBMQVVOQ0hFUl9OT0RFX1JBTksgKDAsIDEsIC4uKSwgTEFVTkNIRVJfUkVOREVaVk9VU19IT1NUIChhZGRyZXNzIG9mIG5vZGUgMCBhcyB0aGUgb3RoZXJzIHJlYWNoIGl0KSBhbmQgTEFVTkNIRVJfUkVOREVaVk9VU19QT1JUICh0aGUgc2FtZSBldmVyeXdoZXJlLCA2MTAwMC02NTUzNSknCmZpCltbIC1uICR7TEFVTkNIRVJfUlVOX0RJUjotfSAmJiAtbiAke0xBVU5DSEVSX1JVTl9JRDotfSBdXSB8fCBkaWUgJ0xBVU5DSEVSX0FUVEVNUFQgaXMgc2V0LCBidXQgbm90IExBVU5DSEVSX1JVTl9ESVIgYW5kIExBVU5DSEVSX1JVTl9JRCcKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGNsdXN0ZXIuCmV4cG9ydCBOQ0NMX1NPQ0tFVF9JRk5BTUU9J2VuczEnCmV4cG9ydCBHTE9PX1NPQ0tFVF9JRk5BTUU9J2VuczEnCmV4cG9ydCBOQ0NMX0RFQlVHPSdXQVJOJwoKIyBTb3VyY2UgdGhlIGZpbGUgdGhhdCBkZWZpbmVzIHRoZSBmdW5jdGlvbiBgbW9kdWxlYC4gT24gbWFueSBzaXRlcyBvbmx5IGxvZ2luIHNoZWxscyBoYXZlIGl0LgpmaW5kX21vZHVsZV9jb21tYW5kKCkgewogIGxvY2FsIF9maWxlCiAgZm9yIF9maWxlIGluICR7TU9EVUxFU0hPTUU6KyIkTU9EVUxFU0hPTUUvaW5pdC9iYXNoIn0gJHtMTU9EX1BLRzorIiRMTU9EX1BLRy9pbml0L2Jhc2gifSBcCiAgICAvZXRjL3Byb2ZpbGUuZC8qbW9kdWxlcy5zaCAvZXRjL3Byb2ZpbGUuZC8qbG1vZC5zaCAvdXNyL3NoYXJlL3ttb2R1bGVzLE1vZHVsZXMsbG1vZC9sbW9kfS9pbml0L2Jhc2g7IGRvCiAgICBpZiB0eXBlIG1vZHVsZSA+L2Rldi9udWxsIDI+JjE7IHRoZW4gcmV0dXJuIDA7IGZpCiAgICAjIHNoZWxsY2hlY2sgc291cmNlPS9kZXYvbnVsbAogICAgaWYgW1sgLXIgJF9maWxlIF1dOyB0aGVuIHNvdXJjZSAiJF9maWxlIiB8fCB0cnVlOyBmaQogIGRvbmUKfQojIHNldHVwX2ZhaWxlZCBFWElUX0NPREUgUFJJTlRFRCBDT01NQU5ELi4uOiBjYWxsIENPTU1BTkQgd2l0aCBhIG1lc3NhZ2UgdGhhdCBuYW1lcyB0aGUgZmFpbGVkIGxpbmUgb2YgYHNldHVwOmAuCiMgYF9zZXR1cF9hdGAgaXMgdGhlIG51bWJlciBvZiB0aGUgc2NyaXB0J3MgbGluZSBiZWZvcmUgdGhlIGZpcnN0IG9mIHRoZW0uCnNldHVwX2ZhaWxlZCgpIHsKICB0cmFwIC0gRVJSIEVYSVQKICAjIFRoZSBsaW5lIG9mIHRoZSBzY3JpcHQgaXRzZWxmLCBldmVuIGlmIHRoZSBlcnJvciB3YXMgaW4gYSBmdW5jdGlvbiBvciBpbiBhIHNvdXJjZWQgZmlsZS4KICBsb2NhbCBfbGluZT0ke0JBU0hfTElORU5PWyR7I0JBU0hfTElORU5PW0BdfSAtIDJdfSBfdGV4dD0nJyBfd29yZHMKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF9saW5lPSR7X3NldHVwX2xpbmU6LTB9OyBmaQogIGlmICgoX2xpbmUgPiBfc2V0dXBfYXQpKTsgdGhlbiBfdGV4dD0kKHNlZCAtbiAiJF9saW5le3MvXiAqLy87cH0iICIke0JBU0hfU09VUkNFWyR7I0JBU0hfU09VUkNFW0BdfSAtIDFdfSIgMj4vZGV2L251bGwpIHx8IHRydWU7IGZpCiAgX3dvcmRzPSJsaW5lICQoKF9saW5lIC0gX3NldHVwX2F0KSkgb2Ygc2V0dXAgaW4gdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDE6ICRfdGV4dCIKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF93b3Jkcz0ic2V0dXAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDEiOyBmaQogIGlmIFtbIC1uICQyIF1dOyB0aGVuIF93b3Jkcys9IiAoaXQgcHJpbnRlZDogJDIpIjsgZmkKICBpZiBbWyAkX3RleHQgPX4gKF58W15bOmFsbnVtOl1fLV0pKG1vZHVsZXxtbClbWzpzcGFjZTpdXSBdXSAmJiAhIHR5cGUgbW9kdWxlID4vZGV2L251bGwgMj4mMTsgdGhlbgogICAgX3dvcmRzKz0nOyBubyBmaWxlIGluIHRoZSB1c3VhbCBwbGFjZXMgZGVmaW5lcyBtb2R1bGU6IGFkZCBhIGxpbmUgYmVmb3JlIHRoaXMgb25lIHRoYXQgc291cmNlcyB0aGUgZmlsZSB3aGljaCBkb2VzJwogIGZpCiAgIiR7QDozfSIgIiRfd29yZHMiCn0KCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgdW5jaGFuZ2VkLiBBIGJhdGNoIHNjcmlwdCBtYXkgaGF2ZSBydW4gaXQgYmVmb3JlIGl0IHN0YXJ0ZWQgdGhlIGNvbnRhaW5lci4KaWYgW1sgLXogJHtMQVVOQ0hFUl9TRVRVUF9ET05FOi19IF1dOyB0aGVuCiAgc2V0ICt1CiAgX3NldHVwX2F0PSRMSU5FTk87IHRyYXAgJygoTElORU5PID4gX3NldHVwX2F0KSkgJiYgX3NldHVwX2xpbmU9JExJTkVOTycgREVCVUc7IHRyYXAgJ3NldHVwX2ZhaWxlZCAkPyAiIiBkaWUnIEVSUiBFWElUCiAgcHl0aG9uMyAtYyAnaW1wb3J0IGxhdW5jaGVyJyAyPi9kZXYvbnVsbCB8fCBQSVBfQlJFQUtfU1lTVEVNX1BBQ0tBR0VTPTEgcHl0aG9uMyAtbSBwaXAgaW5zdGFsbCAtLXF1aWV0IC93b3Jrc3BhY2Uvd2hlZWxzL2dwdV9sYXVuY2hlci0qLndobAogIHRyYXAgLSBFUlIgRVhJVCBERUJVRwogIHNldCAtdQpmaQoKIyBGaW5kIGxvc3QgR1BVcyBoZXJlLCBub3QgaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuIElmIHRoZSBkcml2ZXIgaGFuZ3MsIGV2ZW4gU0lHS0lMTCBtYXkgbm90IGVuZCBudmlkaWEtc21pOiB3YWl0IG9ubHkKIyBmb3IgaXRzIGFuc3dlci4gV2l0aG91dCBwZXJzaXN0ZW5jZSBtb2RlLCB0aGUgZHJpdmVyIG11c3QgZmlyc3Qgc3RhcnQuCl9wYXRpZW5jZT02MAppZiBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV07IHRoZW4gX3BhdGllbmNlPTIwOyBmaSAjIHRoZSBzdXBlcnZpc29yIHdhaXRzIGZvciBhdCBtb3N0IDMwIHMKaWYgY29tbWFuZCAtdiBudmlkaWEtc21pID4vZGV2L251bGw7IHRoZW4KICByZWFkIC1yIC10ICIkX3BhdGllbmNlIiBfZ3B1cyA8IDwoZXhlYyAyPi9kZXYvbnVsbDsgbnZpZGlhLXNtaSAtTCB8IGdyZXAgLWNFICdeKEdQVXwgIE1JRyknKSB8fAogICAgdW5maXQgIm52aWRpYS1zbWkgZ2l2ZXMgbm8gYW5zd2VyIHdpdGhpbiAkX3BhdGllbmNlIHMgb24gJChob3N0bmFtZSk6IHRoZSBkcml2ZXIgb2YgaXRzIEdQVXMgaGFuZ3MuIExvb2sgYXQgZG1lc2cgKFhpZCksIGFuZCByZXN0YXJ0IHRoZSBub2RlIG9yIGxlYXZlIGl0IG91dCIKICAoKF9ncHVzID49IDgpKSB8fCB1bmZpdCAidGhpcyBub2RlIHNob3dzICRfZ3B1cyBHUFVzLCB0aGUgam9iIG5lZWRzICI4CmVsaWYgISBjb21tYW5kIC12IHJvY20tc21pID4vZGV2L251bGwgJiYgISBjb21wZ2VuIC1HICcvZGV2L252aWRpYVswLTldKicgPi9kZXYvbnVsbDsgdGhlbgogICMgT3RoZXJ3aXNlIHRoZSBqb2Igd291bGQgc2lsZW50bHkgdHJhaW4gb24gdGhlIENQVS4KICB1bmZpdCAibm8gR1BVIG9uIHRoaXMgbm9kZTogbmVpdGhlciBudmlkaWEtc21pLCByb2NtLXNtaSBub3IgL2Rldi9udmlkaWEwIGlzIGhlcmU7IEdQVXMgcGVyIG5vZGUgb2YgdGhlIGpvYjogIjgKZmkKCiMgUmFpc2UgdGhlIGxpbWl0cyBvZiBvcGVuIGZpbGVzIChEYXRhTG9hZGVyIHdvcmtlcnMgYW5kIE5DQ0wgbmVlZCBtYW55KSBhbmQgb2YgbG9ja2VkIG1lbW9yeSBhcyBmYXIgYXMgYWxsb3dlZC4KX3NvZnQ9JCh1bGltaXQgLVMgLW4pIF9oYXJkPSQodWxpbWl0IC1IIC1uKQppZiBbWyAkX2hhcmQgPT0gdW5saW1pdGVkIF1dIHx8ICgoX2hhcmQgPiAxMDQ4NTc2KSk7IHRoZW4gX2hhcmQ9MTA0ODU3NjsgZmkKaWYgW1sgJF9zb2Z0ICE9IHVubGltaXRlZCBdXSAmJiAoKF9zb2Z0IDwgX2hhcmQpKTsgdGhlbiB1bGltaXQgLVMgLW4gIiRfaGFyZCIgfHwgdHJ1ZTsgZmkKdWxpbWl0IC1TIC1sICIkKHVsaW1pdCAtSCAtbCkiIDI+L2Rldi9udWxsIHx8IHRydWUKaWYgW1sgJCh1bGltaXQgLWwpICE9IHVubGltaXRlZCBdXSAmJiBjb21wZ2VuIC1HICcvZGV2L2luZmluaWJhbmQvdXZlcmJzKicgPi9kZXYvbnVsbDsgdGhlbgogIGVjaG8gImxhdW5jaGVyOiBsb2NrZWQgbWVtb3J5IGlzIGxpbWl0ZWQgdG8gJCh1bGltaXQgLWwpIEtpQiBoZXJlICh1bGltaXQgLWwpLCBhbmQgSW5maW5pQmFuZCBuZWVkcyBtb3JlOiBzZXQgTGltaXRNRU1MT0NLPWluZmluaXR5IGZvciBzbHVybWQsIG9yIHJhaXNlIG1lbWxvY2sgaW4gbGltaXRzLmNvbmYiID4mMgpmaQoKIyBTZXZlcmFsIG5vZGVzOiBuZXZlciBmYWxsIGJhY2sgdG8gbG9jYWxob3N0LCB3aGVyZSBlYWNoIG5vZGUgd291bGQgd2FpdCBmb3IgaXRzZWxmLgpfaG9zdD0ke0xBVU5DSEVSX1JFTkRFWlZPVVNfSE9TVDotfSBfcG9ydD0ke0xBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVDotfSBfbm9kZV9yYW5rPSR7TEFVTkNIRVJfTk9ERV9SQU5LOi19CltbIC1uICRfaG9zdCAmJiAtbiAkX3BvcnQgJiYgLW4gJF9ub2RlX3JhbmsgXV0gfHwKICBkaWUgIm5vIHJlbmRlenZvdXM6IExBVU5DSEVSX1JFTkRFWlZPVVNfSE9TVCBpcyAnJF9ob3N0JywgTEFVTkNIRVJfUkVOREVaVk9VU19QT1JUICckX3BvcnQnLCBMQVVOQ0hFUl9OT0RFX1JBTksgJyRfbm9kZV9yYW5rJyIKIyBUaGUgYWRkcmVzcyBhbmQgaW50ZXJmYWNlIHRocm91Z2ggd2hpY2ggdGhpcyBub2RlIHJlYWNoZXMgdGhlIGZpcnN0IG9uZS4gSG9zdCBuYW1lcyBtYXkgbm90IHJlc29sdmUsIG9yIHJlc29sdmUgdG8KIyAxMjcuMC4xLjEuCl9mb3VuZD0kKCIkX3B5dGhvbiIgLWMgJ2Zyb20gbGF1bmNoZXIuc3VwZXJ2aXNlLmludGVyZmFjZSBpbXBvcnQgbWFpbjsgbWFpbigpJyAiJF9ob3N0IiAiJF9wb3J0IikgfHwgZGllICJjYW5ub3QgcmVhY2ggdGhlIGZpcnN0IG5vZGUgYXQgJyRfaG9zdCciCnJlYWQgLXIgX2xvY2FsX2FkZHIgX2dsb28gX25jY2wgPDw8IiRfZm91bmQiCltbICRfbG9jYWxfYWRkciAhPSAxMjcuKiAmJiAkX2xvY2FsX2FkZHIgIT0gOjoxIF1dIHx8IGRpZSAidGhlIGZpcnN0IG5vZGUncyBhZGRyZXNzICckX2hvc3QnIGlzIGEgbG9vcGJhY2sgYWRkcmVzcyBoZXJlOiBvdGhlciBub2RlcyBjYW5ub3QgcmVhY2ggaXQiCiMgQnkgZGVmYXVsdCBnbG9vIGFubm91bmNlcyB0aGUgYWRkcmVzcyBvZiB0aGUgaG9zdCdzIG93biBuYW1lLCBhbmQgTkNDTCB0aGF0IG9mIGl0cyBmaXJzdCBpbnRlcmZhY2UuCmlmIFtbIC16ICR7R0xPT19TT0NLRVRfSUZOQU1FOi19ICYmICRfZ2xvbyAhPSAtIF1dOyB0aGVuIGV4cG9ydCBHTE9PX1NPQ0tFVF9JRk5BTUU9JF9nbG9vOyBmaQppZiBbWyAteiAke05DQ0xfU09DS0VUX0lGTkFNRTotfSAmJiAkX25jY2wgIT0gLSBdXTsgdGhlbiBleHBvcnQgTkNDTF9TT0NLRVRfSUZOQU1FPSRfbmNjbDsgZmkKX2lzX2hvc3Q9ZmFsc2UKaWYgW1sgJF9ub2RlX3JhbmsgPT0gMCBdXTsgdGhlbiBfaXNfaG9zdD10cnVlOyBmaQppZiBbWyAkX2hvc3QgPT0gKjoqIF1dOyB0aGVuIF9ob3N0PSJbJF9ob3N0XSI7IGZpCl9yZW5kZXp2b3VzPSgtLW5ub2RlcyAyIC0tcmR6di1lbmRwb2ludCAiJF9ob3N0OiRfcG9ydCIgLS1sb2NhbC1hZGRyICIkX2xvY2FsX2FkZHIiKQppZiBbWyAtbiAke0xBVU5DSEVSX0FQQVJUOi19IF1dOyB0aGVuCiAgIyBIb3N0cyB3aXRob3V0IGEgc2hhcmVkIGZvbGRlciBoYXZlIG9ubHkgdGhlIGZpbGVzIG9mIHRoZWlyIG93biByYW5rcywgc28gcmFua3MgbXVzdCBmb2xsb3cgdGhlIG5vZGUgbnVtYmVycy4gVGhlCiAgIyBjMTBkIHJlbmRlenZvdXMgd291bGQgc29ydCBieSBhZGRyZXNzLgogIF9yZW5kZXp2b3VzKz0oLS1yZHp2LWJhY2tlbmQgc3RhdGljIC0tbm9kZS1yYW5rICIkX25vZGVfcmFuayIpCmVsc2UKICAjIFdpdGhvdXQgaXNfaG9zdCwgdG9yY2hydW4gd291bGQgY29tcGFyZSBob3N0IG5hbWVzLCBhbmQgd2FpdCBmb3JldmVyIGlmIHRoZXkgZG8gbm90IG1hdGNoLgogIF9yZW5kZXp2b3VzKz0oLS1yZHp2LWJhY2tlbmQgYzEwZCAtLXJkenYtY29uZiAiaXNfaG9zdD0kX2lzX2hvc3QiKQpmaQoKIyBUaGUgY29tbWFuZCBvZiBldmVyeSByYW5rLiBsYXVuY2hlcidzIHdvcmtlciBmaWxscyBpbiBwbGFjZWhvbGRlcnMgc3VjaCBhcyB7bWljcm9fYmF0Y2hfc2l6ZX0gZm9yIGVhY2ggYXR0ZW1wdC4KX2FyZ3Y9KCdweXRob24nICd0cmFpbiBpdC5weScgJy0tYmF0Y2g9e21pY3JvX2JhdGNoX3NpemV9JyAnLS1ub3RlPWBpZGA7IHJtIC1yZiAiJEhPTUUiICdcJyd4J1wnJyBcIConICd7ImxyIjogMWUtNCwgImNvc3QiOiAiJCQ1LCAke2xvY2FsX3Jhbmt9In0nICd0d28KbGluZXMnICcnICclaiwjMSwheCcpCl93b3JrZXI9KC1tIGxhdW5jaGVyLnN1cGVydmlzZS53b3JrZXIgLS0gIiR7X2FyZ3ZbQF19IikKIyB0b3JjaHJ1biBleHBhbmRzICQkIGFuZCAke2xvY2FsX3Jhbmt9IGluIGFyZ3VtZW50cy4gRG91YmxpbmcgZXZlcnkgJCBwcmV2ZW50cyB0aGF0LgpfdHdvPSckJCcKX3dvcmtlcj0oIiR7X3dvcmtlcltAXS8vWyRdLyRfdHdvfSIpCiMgdG9yY2hydW4ncyBlcnJvciBmaWxlcyBnbyBpbnRvIHRoZSBydW4gZGlyZWN0b3J5LCBiZWNhdXNlIGEgdGVtcG9yYXJ5IGZvbGRlciBpcyBsb3N0IHdpdGggdGhlIG5vZGUuCl9sb2dfZGlyPSRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLyQocHJpbnRmICclMDNkJyAiJExBVU5DSEVSX0FUVEVNUFQiKS90b3JjaHJ1bi9ub2RlLSR7TEFVTkNIRVJfTk9ERV9SQU5LOi0wfQpta2RpciAtcCAiJF9sb2dfZGlyIiB8fCB0cnVlCl90b3JjaHJ1bj0oCiAgLS1ucHJvYy1wZXItbm9kZSA4IC0tbWF4LXJlc3RhcnRzIDAgLS1sb2ctZGlyICIkX2xvZ19kaXIiCiAgLS1yZHp2LWlkICIkTEFVTkNIRVJfUlVOX0lELSRMQVVOQ0hFUl9BVFRFTVBUIgogICIke19yZW5kZXp2b3VzW0BdfSIKKQoKY2QgJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZmM1NWVjZTI2ZDNmYjliMDk1OGQnIHx8IHVuZml0ICd0aGUgd29ya2luZyBkaXJlY3Rvcnkgb2YgdGhlIGpvYiBkb2VzIG5vdCBleGlzdCBvbiB0aGlzIG5vZGU6ICcnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9mYzU1ZWNlMjZkM2ZiOWIwOTU4ZCcKCiMgU2VjcmV0czogdGhlIHN1cGVydmlzb3IgcGFzc2VzIHRoZSB2YWx1ZXM7IG90aGVyd2lzZSB0aGV5IGFyZSByZWFkIGZyb20gdGhlIHNvdXJjZSB0aGF0IHRoZSBqb2IgbmFtZXMuIFRoaXMgZmlsZSBkb2VzCiMgbm90IGNvbnRhaW4gdGhlbS4KaWYgW1sgISAtdiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4gXV07IHRoZW4KICBpZiBbWyAtdiBIRl9UT0tFTiBdXTsgdGhlbiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU49JEhGX1RPS0VOOyBmaQpmaQpbWyAtdiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4gXV0gfHwgZGllICdzZWNyZXQgJydIRl9UT0tFTicnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4KaWYgW1sgISAtdiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWSBdXTsgdGhlbgogIGlmIFtbIC12IFdBTkRCX0FQSV9LRVkgXV07IHRoZW4gTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVk9JFdBTkRCX0FQSV9LRVk7IGZpCmZpCltbIC12IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZIF1dIHx8IGRpZSAnc2VjcmV0ICcnV0FOREJfQVBJX0tFWScnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWQoKIyBFbnZpcm9ubWVudCBvZiB0aGUgam9iLiBUaGUgd29ya2VyIHJlbW92ZXMgdGhlIHByZWZpeCBMQVVOQ0hFUl9FTlZfLCBzbyB0aGF0IHRoZSB2YWx1ZXMgcmVhY2ggb25seSB0aGUgcmFuay4KZXhwb3J0IExBVU5DSEVSX0VOVl9HUkVFVElORz0naXQnXCcncyAkSE9NRSwKdGhlbiBgaWRgICYgIm1vcmUiICMxJwpleHBvcnQgTEFVTkNIRVJfRU5WX0VNUFRZPScnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfT01QX05VTV9USFJFQURTPSc0JwoKaWYgW1sgLXogJHtQWVRPUkNIX0NVREFfQUxMT0NfQ09ORjotfSR7UFlUT1JDSF9BTExPQ19DT05GOi19IF1dOyB0aGVuCiAgZXhwb3J0IFBZVE9SQ0hfQ1VEQV9BTExPQ19DT05GPSdleHBhbmRhYmxlX3NlZ21lbnRzOlRydWUnCmZpCgojIENoZWNrIHRoaXMgbm9kZSBpbiB0aGUgZW52aXJvbm1lbnQgb2YgdGhlIHJhbmtzLCBpZiB0aGUgcHJvZmlsZSBoYXMgYGNoZWNrczogZG9jdG9yYCwgb3IgaWYgdGhlIHN1cGVydmlzb3IgYXNrcyBmb3IgaXQKIyBhZnRlciBhbiBhdHRlbXB0IHRoYXQgbWF5IGhhdmUgZmFpbGVkIGJlY2F1c2Ugb2YgdGhlIGNsdXN0ZXIuCl9jaGVja3M9CmlmIFtbIC1uICRfY2hlY2tzJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuCiAgX3NhaWQ9JCgiJF9weXRob24iIC1tIGxhdW5jaGVyLmRvY3RvcikgJiYgX3JjPTAgfHwgX3JjPSQ/CiAgaWYgKChfcmMgPT0gMykpOyB0aGVuCiAgICB1bmZpdCAibm9kZSAke0xBVU5DSEVSX05PREVfUkFOSzotMH0gKCQoaG9zdG5hbWUpKSBmYWlscyB0aGUgZG9jdG9yJ3MgY2hlY2tzOiAkX3NhaWQiCiAgZWxpZiAoKF9yYykpOyB0aGVuCiAgICBlY2hvICJsYXVuY2hlcjogdGhlIGRvY3RvcidzIGNoZWNrcyBlbmRlZCB3aXRoIGV4aXQgY29kZSAkX3JjOiBjb250aW51aW5nIHdpdGhvdXQgdGhlbSIgPiYyCiAgZmkKZmkKaWYgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuIGV4aXQgMDsgZmkKCiMgTGlrZSBgcHl0aG9uIC1tIHRvcmNoLmRpc3RyaWJ1dGVkLnJ1bmAsIGJ1dCB3aXRob3V0IGdhcmJhZ2UgY29sbGVjdGlvbiBkdXJpbmcgdGhlIGltcG9ydCBvZiB0b3JjaCwgYSBzaXh0aCBvZiBpdHMgdGltZS4KX3J1bl90b3JjaHJ1bj0naW1wb3J0IGdjOyBnYy5kaXNhYmxlKCk7IGZyb20gdG9yY2guZGlzdHJpYnV0ZWQucnVuIGltcG9ydCBtYWluOyBnYy5lbmFibGUoKTsgbWFpbigpJwpleGVjICIkX3B5dGhvbiIgLWMgIiRfcnVuX3RvcmNocnVuIiAiJHtfdG9yY2hydW5bQF19IiAtLW5vLXB5dGhvbiAiJF9weXRob24iICIke193b3JrZXJbQF19Igo= || return 1
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
  if [[ -z ${PRIMARY_ADDR:-} || -z $_node_rank ]]; then
    say "RunPod gave no PRIMARY_ADDR ('${PRIMARY_ADDR:-}') or NODE_RANK ('$_node_rank')"
    return 1
  fi
  # Each submission has another port, so that the supervisors recognize records of an earlier cluster, whose first pod may
  # have had the same address.
  exec "$_python" -m launcher.supervise "$_run_dir" --nodes 2 --node-rank "$_node_rank" \
    --rendezvous "$PRIMARY_ADDR" --port-base "$((61000 + (_submission - 1) * 17 % 4536))" --stop-file "$_stop"
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
  # The first node ends the cluster, and first gives the other nodes time to finish. They wait longer, in case it still
  # waits for nodes that have not started, or records how the run ended.
  if [[ $_node_rank == 0 ]]; then sleep 30; else sleep 900; fi
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
# Repeat the query: a pod that does not know its cluster would regard the other pods as a different one, and end it.
for _pause in 1 2 4 8 15 30 0; do
  if _me=$(cluster_id) || ((_pause == 0)); then break; fi
  say "RunPod did not say which cluster pod $_pod belongs to; asking again in $_pause s"
  sleep "$_pause"
done
_me=${_me:-${PRIMARY_ADDR:-$_pod}}
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
  event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-8xh100:cluster/'"$_owner")"
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
    event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-8xh100:cluster/'"$_owner")"
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
