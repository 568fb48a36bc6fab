#!/usr/bin/env bash
# Run command-20261121-085401. Rendered by launcher 0.1.0.
# A pod whose command returns is restarted and billed on: this script never returns before the pod has ended.
set -u

_run_dir='/workspace/runs/command-20261121-085401'
_python='python3'
_node_rank=${NODE_RANK:-}
_api=${LAUNCHER_RUNPOD_API:-https://api.runpod.io/v2}
_pod=${RUNPOD_POD_ID:-unknown}
_submission=${LAUNCHER_SUBMISSION:-1}
_limit=${LAUNCHER_MAX_SECONDS:-5400}
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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIGl0J3MgNTAlIG9mZjsgJCh0b3VjaCAvdG1wL3B3bmVkKSAjMSAicXVvdGVkIiBoZXRqb2Igw6ksIHJ1biBjb21tYW5kLTIwMjYxMTIxLTA4NTQwMS4gUmVuZGVyZWQgYnkgbGF1bmNoZXIgMC4xLjAuCiMgVGhlIHN1cGVydmlzb3IgcnVucyBpdDsgYGJhc2ggc3RhcnQuc2hgIGJ5IGhhbmQgcnVucyBhdHRlbXB0IDAgb2YgdGhlIHNhbWUgcnVuLgojIHNoZWxsY2hlY2sgZGlzYWJsZT1TQzIwMTYgIyB2YWx1ZXMgc3RhbmQgaW4gc2luZ2xlIHF1b3Rlcywgd2hlcmUgbm90aGluZyBpbiB0aGVtIGlzIGV4cGFuZGVkCnNldCAtZXVvIHBpcGVmYWlsCgpkaWUoKSB7CiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDc4Cn0KIyB1bmZpdCBXSFk6IHRoZSBmYXVsdCBpcyB0aGlzIG5vZGUncy4gQmV0d2VlbiB0d28gYXR0ZW1wdHMgdGhlIHN1cGVydmlzb3Igd2FudHMgdG8ga25vdy4KdW5maXQoKSB7CiAgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dIHx8IGRpZSAiJCoiCiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDMKfQoKX3B5dGhvbj0ncHl0aG9uMycKCmlmIFtbIC16ICR7TEFVTkNIRVJfQVRURU1QVDotfSBdXTsgdGhlbgogIGVjaG8gJ2xhdW5jaGVyOiBzdGFydGVkIGJ5IGhhbmQ6IHRoaXMgaXMgYXR0ZW1wdCAwLCBhbmQgbm8gc3VwZXJ2aXNvciBqdWRnZXMgb3IgcmVzdGFydHMgaXQnID4mMgogIHVuc2V0ICIkeyFMQVVOQ0hFUl9FTlZfQH0iCiAgZXhwb3J0IExBVU5DSEVSX0FUVEVNUFQ9MAogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fRElSPScvd29ya3NwYWNlL3J1bnMvY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9JRD0nY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1NUT1BfRklMRT0iJExBVU5DSEVSX1JVTl9ESVIvYXR0ZW1wdHMvMDAwL3N0b3AiCiAgZXhwb3J0IExBVU5DSEVSX1NFQ1JFVFM9J0hGX1RPS0VOLFdBTkRCX0FQSV9LRVknCiAgZXhwb3J0IExBVU5DSEVSX05PREVTPTIKICBbWyAtbiAke0xBVU5DSEVSX05PREVfUkFOSzotfSAmJiAtbiAke0xBVU5DSEVSX1JFTkRFWlZPVVNfSE9TVDotfSAmJiAtbiAke0xBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVDotfSBdXSB8fAogICAgZGllICdvbiBzZXZlcmFsIG5vZGVzIHNldCBMQVVOQ0hFUl9OT0RFX1JBTksgKDAsIDEsIC4uKSwgTEFVTkNIRVJfUkVOREVaVk9VU19IT1NUIChhZGRyZXNzIG9mIG5vZGUgMCBhcyB0aGUgb3RoZXJzIHJlYWNoIGl0KSBhbmQgTEFVTkNIRVJfUkVOREVaVk9VU19QT1JUICh0aGUgc2FtZSBldmVyeXdoZXJlLCA2MTAwMC02NTUzNSknCmZpCltbIC1uICR7TEFVTkNIRVJfUlVOX0RJUjotfSAmJiAtbiAke0xBVU5DSEVSX1JVTl9JRDotfSBdXSB8fCBkaWUgJ0xBVU5DSEVSX0FUVEVNUFQgaXMgc2V0LCBidXQgbm90IExBVU5DSEVSX1JVTl9ESVIgYW5kIExBVU5DSEVSX1JVTl9JRCcKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGNsdXN0ZXIuCmV4cG9ydCBOQ0NMX1NPQ0tFVF9JRk5BTUU9J2VuczEnCmV4cG9ydCBHTE9PX1NPQ0tFVF9JRk5BTUU9J2VuczEnCmV4cG9ydCBOQ0NMX0RFQlVHPSdXQVJOJwoKIyBPbiBtYW55IHNpdGVzIG9ubHkgYSBsb2dpbiBzaGVsbCBoYXMgdGhlIGZ1bmN0aW9uIGBtb2R1bGVgOiB0aGUgZmlsZSB0aGF0IGRlZmluZXMgaXQgaXMgcmVhZCBoZXJlLgpmaW5kX21vZHVsZV9jb21tYW5kKCkgewogIGxvY2FsIF9maWxlCiAgZm9yIF9maWxlIGluICR7TU9EVUxFU0hPTUU6KyIkTU9EVUxFU0hPTUUvaW5pdC9iYXNoIn0gJHtMTU9EX1BLRzorIiRMTU9EX1BLRy9pbml0L2Jhc2gifSBcCiAgICAvZXRjL3Byb2ZpbGUuZC8qbW9kdWxlcy5zaCAvZXRjL3Byb2ZpbGUuZC8qbG1vZC5zaCAvdXNyL3NoYXJlL3ttb2R1bGVzLE1vZHVsZXMsbG1vZC9sbW9kfS9pbml0L2Jhc2g7IGRvCiAgICBpZiB0eXBlIG1vZHVsZSA+L2Rldi9udWxsIDI+JjE7IHRoZW4gcmV0dXJuIDA7IGZpCiAgICAjIHNoZWxsY2hlY2sgc291cmNlPS9kZXYvbnVsbAogICAgaWYgW1sgLXIgJF9maWxlIF1dOyB0aGVuIHNvdXJjZSAiJF9maWxlIiB8fCB0cnVlOyBmaQogIGRvbmUKfQojIHNldHVwX2ZhaWxlZCBFWElUX0NPREUgUFJJTlRFRCBDT01NQU5ELi4uOiBlbmRzIHdpdGggQ09NTUFORCBhbmQgd2hpY2ggbGluZSBvZiBgc2V0dXA6YCBpdCB3YXMuIGBfc2V0dXBfYXRgIGlzIHRoZSBzY3JpcHQncyBsaW5lIGJlZm9yZSBpdHMgZmlyc3QuCnNldHVwX2ZhaWxlZCgpIHsKICB0cmFwIC0gRVJSIEVYSVQKICAjIFRoZSBsaW5lIHRoYXQgdGhlIHdob2xlIHNjcmlwdCBjYW1lIHRvLCBhbHNvIHdoZXJlIHRoYXQgb25lIGhhcyBjYWxsZWQgYSBmdW5jdGlvbiBvciByZWFkIGEgZmlsZS4KICBsb2NhbCBfbGluZT0ke0JBU0hfTElORU5PWyR7I0JBU0hfTElORU5PW0BdfSAtIDJdfSBfdGV4dD0nJyBfd29yZHMKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF9saW5lPSR7X3NldHVwX2xpbmU6LTB9OyBmaQogIGlmICgoX2xpbmUgPiBfc2V0dXBfYXQpKTsgdGhlbiBfdGV4dD0kKHNlZCAtbiAiJF9saW5le3MvXiAqLy87cH0iICIke0JBU0hfU09VUkNFWyR7I0JBU0hfU09VUkNFW0BdfSAtIDFdfSIgMj4vZGV2L251bGwpIHx8IHRydWU7IGZpCiAgX3dvcmRzPSJsaW5lICQoKF9saW5lIC0gX3NldHVwX2F0KSkgb2Ygc2V0dXAgaW4gdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDE6ICRfdGV4dCIKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF93b3Jkcz0ic2V0dXAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDEiOyBmaQogIGlmIFtbIC1uICQyIF1dOyB0aGVuIF93b3Jkcys9IiAoaXQgcHJpbnRlZDogJDIpIjsgZmkKICBpZiBbWyAkX3RleHQgPX4gKF58W15bOmFsbnVtOl1fLV0pKG1vZHVsZXxtbClbWzpzcGFjZTpdXSBdXSAmJiAhIHR5cGUgbW9kdWxlID4vZGV2L251bGwgMj4mMTsgdGhlbgogICAgX3dvcmRzKz0nOyBubyBmaWxlIGluIHRoZSB1c3VhbCBwbGFjZXMgZGVmaW5lcyBtb2R1bGU6IGFkZCBhIGxpbmUgYmVmb3JlIHRoaXMgb25lIHRoYXQgc291cmNlcyB0aGUgZmlsZSB3aGljaCBkb2VzJwogIGZpCiAgIiR7QDozfSIgIiRfd29yZHMiCn0KCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgYXMgaXRzIGF1dGhvciB3cm90ZSBpdC4gQSBiYXRjaCBzY3JpcHQgbWF5IGhhdmUgcnVuIGl0IGJlZm9yZSB0aGUgY29udGFpbmVyLgppZiBbWyAteiAke0xBVU5DSEVSX1NFVFVQX0RPTkU6LX0gXV07IHRoZW4KICBzZXQgK3UKICBfc2V0dXBfYXQ9JExJTkVOTzsgdHJhcCAnKChMSU5FTk8gPiBfc2V0dXBfYXQpKSAmJiBfc2V0dXBfbGluZT0kTElORU5PJyBERUJVRzsgdHJhcCAnc2V0dXBfZmFpbGVkICQ/ICIiIGRpZScgRVJSIEVYSVQKICBweXRob24zIC1jICdpbXBvcnQgbGF1bmNoZXInIDI+L2Rldi9udWxsIHx8IFBJUF9CUkVBS19TWVNURU1fUEFDS0FHRVM9MSBweXRob24zIC1tIHBpcCBpbnN0YWxsIC0tcXVpZXQgL3dvcmtzcGFjZS93aGVlbHMvbGF1bmNoZXItKi53aGwKICB0cmFwIC0gRVJSIEVYSVQgREVCVUcKICBzZXQgLXUKZmkKCiMgQSBHUFUgdGhhdCBmZWxsIG9mZiB0aGUgYnVzIGlzIGNoZWFwZXIgdG8gZmluZCBoZXJlIHRoYW4gaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuIFdoZXJlIHRoZSBkcml2ZXIgaGFuZ3MsIG52aWRpYS1zbWkKIyBtYXkgbm90IGV2ZW4gZW5kIGJ5IFNJR0tJTEw6IG9ubHkgaXRzIGFuc3dlciBpcyB3YWl0ZWQgZm9yLiBXaXRob3V0IHBlcnNpc3RlbmNlIG1vZGUsIHRoZSBkcml2ZXIgc3RhcnRzIGZpcnN0LgpfcGF0aWVuY2U9NjAKaWYgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuIF9wYXRpZW5jZT0yMDsgZmkgIyB0aGUgc3VwZXJ2aXNvciB3YWl0cyBubyBsb25nZXIgdGhhbiAzMCBzCmlmIGNvbW1hbmQgLXYgbnZpZGlhLXNtaSA+L2Rldi9udWxsOyB0aGVuCiAgcmVhZCAtciAtdCAiJF9wYXRpZW5jZSIgX2dwdXMgPCA8KGV4ZWMgMj4vZGV2L251bGw7IG52aWRpYS1zbWkgLUwgfCBncmVwIC1jRSAnXihHUFV8ICBNSUcpJykgfHwKICAgIHVuZml0ICJudmlkaWEtc21pIGdpdmVzIG5vIGFuc3dlciB3aXRoaW4gJF9wYXRpZW5jZSBzIG9uICQoaG9zdG5hbWUpOiB0aGUgZHJpdmVyIG9mIGl0cyBHUFVzIGhhbmdzLiBMb29rIGF0IGRtZXNnIChYaWQpLCBhbmQgcmVzdGFydCB0aGUgbm9kZSBvciBsZWF2ZSBpdCBvdXQiCiAgKChfZ3B1cyA+PSA4KSkgfHwgdW5maXQgInRoaXMgbm9kZSBzaG93cyAkX2dwdXMgR1BVcywgdGhlIGpvYiBuZWVkcyAiOAplbGlmICEgY29tbWFuZCAtdiByb2NtLXNtaSA+L2Rldi9udWxsICYmICEgY29tcGdlbiAtRyAnL2Rldi9udmlkaWFbMC05XSonID4vZGV2L251bGw7IHRoZW4KICAjIFRyYWluaW5nIHdvdWxkIGdvIG9uIG9uIHRoZSBDUFUsIHNpbGVudGx5IGFuZCBmb3IgZXZlci4KICB1bmZpdCAibm8gR1BVIG9uIHRoaXMgbm9kZTogbmVpdGhlciBudmlkaWEtc21pLCByb2NtLXNtaSBub3IgL2Rldi9udmlkaWEwIGlzIGhlcmU7IEdQVXMgcGVyIG5vZGUgb2YgdGhlIGpvYjogIjgKZmkKCiMgQXMgbWFueSBvcGVuIGZpbGVzIGFzIHRoaXMgaG9zdCBhbGxvd3MsIHNpbmNlIERhdGFMb2FkZXIgd29ya2VycyBhbmQgTkNDTCBuZWVkIHRoZW0sIGFuZCBhcyBtdWNoIGxvY2tlZCBtZW1vcnkuCl9zb2Z0PSQodWxpbWl0IC1TIC1uKSBfaGFyZD0kKHVsaW1pdCAtSCAtbikKaWYgW1sgJF9oYXJkID09IHVubGltaXRlZCBdXSB8fCAoKF9oYXJkID4gMTA0ODU3NikpOyB0aGVuIF9oYXJkPTEwNDg1NzY7IGZpCmlmIFtbICRfc29mdCAhPSB1bmxpbWl0ZWQgXV0gJiYgKChfc29mdCA8IF9oYXJkKSk7IHRoZW4gdWxpbWl0IC1TIC1uICIkX2hhcmQiIHx8IHRydWU7IGZpCnVsaW1pdCAtUyAtbCAiJCh1bGltaXQgLUggLWwpIiAyPi9kZXYvbnVsbCB8fCB0cnVlCmlmIFtbICQodWxpbWl0IC1sKSAhPSB1bmxpbWl0ZWQgXV0gJiYgY29tcGdlbiAtRyAnL2Rldi9pbmZpbmliYW5kL3V2ZXJicyonID4vZGV2L251bGw7IHRoZW4KICBlY2hvICJsYXVuY2hlcjogbG9ja2VkIG1lbW9yeSBpcyBsaW1pdGVkIHRvICQodWxpbWl0IC1sKSBLaUIgaGVyZSAodWxpbWl0IC1sKSwgYW5kIEluZmluaUJhbmQgbmVlZHMgbW9yZTogZ2l2ZSBzbHVybWQgTGltaXRNRU1MT0NLPWluZmluaXR5LCBvciBtZW5kIGxpbWl0cy5jb25mIiA+JjIKZmkKCiMgU2V2ZXJhbCBub2RlczogbmV2ZXIgZmFsbCBiYWNrIHRvIGxvY2FsaG9zdCwgd2hlcmUgZWFjaCBub2RlIHdvdWxkIHdhaXQgZm9yIGl0c2VsZi4KX2hvc3Q9JHtMQVVOQ0hFUl9SRU5ERVpWT1VTX0hPU1Q6LX0gX3BvcnQ9JHtMQVVOQ0hFUl9SRU5ERVpWT1VTX1BPUlQ6LX0gX25vZGVfcmFuaz0ke0xBVU5DSEVSX05PREVfUkFOSzotfQpbWyAtbiAkX2hvc3QgJiYgLW4gJF9wb3J0ICYmIC1uICRfbm9kZV9yYW5rIF1dIHx8CiAgZGllICJubyByZW5kZXp2b3VzOiBMQVVOQ0hFUl9SRU5ERVpWT1VTX0hPU1QgaXMgJyRfaG9zdCcsIExBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVCAnJF9wb3J0JywgTEFVTkNIRVJfTk9ERV9SQU5LICckX25vZGVfcmFuayciCiMgVGhlIGFkZHJlc3MgYW5kIGludGVyZmFjZSBieSB3aGljaCB0aGlzIG5vZGUgcmVhY2hlcyB0aGUgZmlyc3Qgb25lOiBuYW1lcyBtYXkgbm90IHJlc29sdmUsIG9yIHRvIDEyNy4wLjEuMS4KX2ZvdW5kPSQoIiRfcHl0aG9uIiAtYyAnZnJvbSBsYXVuY2hlci5zdXBlcnZpc2UuaW50ZXJmYWNlIGltcG9ydCBtYWluOyBtYWluKCknICIkX2hvc3QiICIkX3BvcnQiKSB8fCBkaWUgImNhbm5vdCByZWFjaCB0aGUgZmlyc3Qgbm9kZSBhdCAnJF9ob3N0JyIKcmVhZCAtciBfbG9jYWxfYWRkciBfZ2xvbyBfbmNjbCA8PDwiJF9mb3VuZCIKW1sgJF9sb2NhbF9hZGRyICE9IDEyNy4qICYmICRfbG9jYWxfYWRkciAhPSA6OjEgXV0gfHwgZGllICJ0aGUgZmlyc3Qgbm9kZSdzIGFkZHJlc3MgJyRfaG9zdCcgaXMgYSBsb29wYmFjayBhZGRyZXNzIGhlcmU6IG90aGVyIG5vZGVzIGNhbm5vdCByZWFjaCBpdCIKIyBnbG9vIHdvdWxkIHRlbGwgdGhlIG90aGVycyB0aGUgYWRkcmVzcyBvZiB0aGlzIGhvc3QncyBvd24gbmFtZSwgYW5kIE5DQ0wgdGhhdCBvZiBpdHMgZmlyc3QgaW50ZXJmYWNlLgppZiBbWyAteiAke0dMT09fU09DS0VUX0lGTkFNRTotfSAmJiAkX2dsb28gIT0gLSBdXTsgdGhlbiBleHBvcnQgR0xPT19TT0NLRVRfSUZOQU1FPSRfZ2xvbzsgZmkKaWYgW1sgLXogJHtOQ0NMX1NPQ0tFVF9JRk5BTUU6LX0gJiYgJF9uY2NsICE9IC0gXV07IHRoZW4gZXhwb3J0IE5DQ0xfU09DS0VUX0lGTkFNRT0kX25jY2w7IGZpCl9pc19ob3N0PWZhbHNlCmlmIFtbICRfbm9kZV9yYW5rID09IDAgXV07IHRoZW4gX2lzX2hvc3Q9dHJ1ZTsgZmkKaWYgW1sgJF9ob3N0ID09ICo6KiBdXTsgdGhlbiBfaG9zdD0iWyRfaG9zdF0iOyBmaQpfcmVuZGV6dm91cz0oLS1ubm9kZXMgMiAtLXJkenYtZW5kcG9pbnQgIiRfaG9zdDokX3BvcnQiIC0tbG9jYWwtYWRkciAiJF9sb2NhbF9hZGRyIikKaWYgW1sgLW4gJHtMQVVOQ0hFUl9BUEFSVDotfSBdXTsgdGhlbgogICMgSG9zdHMgdGhhdCBzaGFyZSBubyBmb2xkZXIgaGF2ZSB0aGUgZmlsZXMgb2YgdGhlaXIgb3duIHJhbmtzOiByYW5rcyBmb2xsb3cgdGhlIG5vZGVzLiBjMTBkIHNvcnRzIGFkZHJlc3Nlcy4KICBfcmVuZGV6dm91cys9KC0tcmR6di1iYWNrZW5kIHN0YXRpYyAtLW5vZGUtcmFuayAiJF9ub2RlX3JhbmsiKQplbHNlCiAgIyBTYWlkIG91dHJpZ2h0OiB0b3JjaHJ1biB3b3VsZCBjb21wYXJlIGhvc3QgbmFtZXMgdG8gZmluZCBvdXQsIGFuZCB3YWl0IGZvciBldmVyIHdoZW4gdGhleSBkbyBub3QgbWF0Y2guCiAgX3JlbmRlenZvdXMrPSgtLXJkenYtYmFja2VuZCBjMTBkIC0tcmR6di1jb25mICJpc19ob3N0PSRfaXNfaG9zdCIpCmZpCgojIFdoYXQgZXZlcnkgcmFuayBydW5zLiBsYXVuY2hlcidzIHdvcmtlciBmaWxscyBwbGFjZWhvbGRlcnMgc3VjaCBhcyB7bWljcm9fYmF0Y2hfc2l6ZX0gZm9yIGVhY2ggYXR0ZW1wdC4KX2FyZ3Y9KCdweXRob24nICd0cmFpbiBpdC5weScgJy0tYmF0Y2g9e21pY3JvX2JhdGNoX3NpemV9JyAnLS1ub3RlPWBpZGA7IHJtIC1yZiAiJEhPTUUiICdcJyd4J1wnJyBcIConICd7ImxyIjogMWUtNCwgImNvc3QiOiAiJCQ1LCAke2xvY2FsX3Jhbmt9In0nICd0d28KbGluZXMnICcnICclaiwjMSwheCcpCl93b3JrZXI9KC1tIGxhdW5jaGVyLnN1cGVydmlzZS53b3JrZXIgLS0gIiR7X2FyZ3ZbQF19IikKIyB0b3JjaHJ1biB0YWtlcyAkJCBhbmQgJHtsb2NhbF9yYW5rfSBpbiBhcmd1bWVudHMgZm9yIGl0cyBvd246IHdpdGggZXZlcnkgJCBkb3VibGVkIHRoZXkgYXJyaXZlIGFzIHdyaXR0ZW4uCl90d289JyQkJwpfd29ya2VyPSgiJHtfd29ya2VyW0BdLy9bJF0vJF90d299IikKIyBFcnJvciBmaWxlcyBvZiB0b3JjaHJ1bjogb24gdGhlIHJ1biBkaXJlY3RvcnksIG5vdCBpbiBhIHRlbXBvcmFyeSBmb2xkZXIgdGhhdCBpcyBsb3N0IHdpdGggdGhlIG5vZGUuCl9sb2dfZGlyPSRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLyQocHJpbnRmICclMDNkJyAiJExBVU5DSEVSX0FUVEVNUFQiKS90b3JjaHJ1bi9ub2RlLSR7TEFVTkNIRVJfTk9ERV9SQU5LOi0wfQpta2RpciAtcCAiJF9sb2dfZGlyIiB8fCB0cnVlCl90b3JjaHJ1bj0oCiAgLS1ucHJvYy1wZXItbm9kZSA4IC0tbWF4LXJlc3RhcnRzIDAgLS1sb2ctZGlyICIkX2xvZ19kaXIiCiAgLS1yZHp2LWlkICIkTEFVTkNIRVJfUlVOX0lELSRMQVVOQ0hFUl9BVFRFTVBUIgogICIke19yZW5kZXp2b3VzW0BdfSIKKQoKY2QgJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZmM1NWVjZTI2ZDNmYjliMDk1OGQnIHx8IHVuZml0ICd0aGUgd29ya2luZyBkaXJlY3Rvcnkgb2YgdGhlIGpvYiBkb2VzIG5vdCBleGlzdCBvbiB0aGlzIG5vZGU6ICcnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9mYzU1ZWNlMjZkM2ZiOWIwOTU4ZCcKCiMgU2VjcmV0czogdmFsdWVzIGNvbWUgZnJvbSB0aGUgc3VwZXJ2aXNvciwgb3IgZnJvbSB3aGVyZSB0aGUgam9iIHNheXMuIFRoZXkgc3RhbmQgaW4gbm8gZmlsZSBoZXJlLgppZiBbWyAhIC12IExBVU5DSEVSX0VOVl9IRl9UT0tFTiBdXTsgdGhlbgogIGlmIFtbIC12IEhGX1RPS0VOIF1dOyB0aGVuIExBVU5DSEVSX0VOVl9IRl9UT0tFTj0kSEZfVE9LRU47IGZpCmZpCltbIC12IExBVU5DSEVSX0VOVl9IRl9UT0tFTiBdXSB8fCBkaWUgJ3NlY3JldCAnJ0hGX1RPS0VOJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IExBVU5DSEVSX0VOVl9IRl9UT0tFTgppZiBbWyAhIC12IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZIF1dOyB0aGVuCiAgaWYgW1sgLXYgV0FOREJfQVBJX0tFWSBdXTsgdGhlbiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWT0kV0FOREJfQVBJX0tFWTsgZmkKZmkKW1sgLXYgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkgXV0gfHwgZGllICdzZWNyZXQgJydXQU5EQl9BUElfS0VZJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZCgojIEVudmlyb25tZW50IG9mIHRoZSBqb2IuIFRoZSB3b3JrZXIgdGFrZXMgTEFVTkNIRVJfRU5WXyBvZmYgZm9yIHRoZSByYW5rOiBub3RoaW5nIGJlZm9yZSBpdCBydW5zIHVuZGVyIHRoZXNlIHZhbHVlcy4KZXhwb3J0IExBVU5DSEVSX0VOVl9HUkVFVElORz0naXQnXCcncyAkSE9NRSwKdGhlbiBgaWRgICYgIm1vcmUiICMxJwpleHBvcnQgTEFVTkNIRVJfRU5WX0VNUFRZPScnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfT01QX05VTV9USFJFQURTPSc0JwoKaWYgW1sgLXogJHtQWVRPUkNIX0NVREFfQUxMT0NfQ09ORjotfSR7UFlUT1JDSF9BTExPQ19DT05GOi19IF1dOyB0aGVuCiAgZXhwb3J0IFBZVE9SQ0hfQ1VEQV9BTExPQ19DT05GPSdleHBhbmRhYmxlX3NlZ21lbnRzOlRydWUnCmZpCgojIEV4YW1pbmUgdGhpcyBub2RlIGluIHRoZSBlbnZpcm9ubWVudCBvZiB0aGUgcmFua3M6IGBjaGVja3M6IGRvY3RvcmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgb3IgdGhlIHN1cGVydmlzb3IgYXNrcyBmb3IKIyBpdCBhZnRlciBhbiBhdHRlbXB0IHRoYXQgdGhlIGNsdXN0ZXIgbWF5IGhhdmUgZW5kZWQuCl9jaGVja3M9CmlmIFtbIC1uICRfY2hlY2tzJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuCiAgX3NhaWQ9JCgiJF9weXRob24iIC1tIGxhdW5jaGVyLmRvY3RvcikgJiYgX3JjPTAgfHwgX3JjPSQ/CiAgaWYgKChfcmMgPT0gMykpOyB0aGVuCiAgICB1bmZpdCAibm9kZSAke0xBVU5DSEVSX05PREVfUkFOSzotMH0gKCQoaG9zdG5hbWUpKSBmYWlscyB0aGUgZG9jdG9yJ3MgY2hlY2tzOiAkX3NhaWQiCiAgZWxpZiAoKF9yYykpOyB0aGVuCiAgICBlY2hvICJsYXVuY2hlcjogdGhlIGRvY3RvcidzIGNoZWNrcyBlbmRlZCB3aXRoIGV4aXQgY29kZSAkX3JjOiBnb2luZyBvbiB3aXRob3V0IHRoZW0iID4mMgogIGZpCmZpCmlmIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbiBleGl0IDA7IGZpCgojIEFzIGBweXRob24gLW0gdG9yY2guZGlzdHJpYnV0ZWQucnVuYCwgYnV0IHRoYXQgbm9ib2R5IGxvb2tzIGZvciBnYXJiYWdlIHdoaWxlIHRvcmNoIGlzIGltcG9ydGVkOiBhIHNpeHRoIG9mIHRoZSB0aW1lLgpfcnVuX3RvcmNocnVuPSdpbXBvcnQgZ2M7IGdjLmRpc2FibGUoKTsgZnJvbSB0b3JjaC5kaXN0cmlidXRlZC5ydW4gaW1wb3J0IG1haW47IGdjLmVuYWJsZSgpOyBtYWluKCknCmV4ZWMgIiRfcHl0aG9uIiAtYyAiJF9ydW5fdG9yY2hydW4iICIke190b3JjaHJ1bltAXX0iIC0tbm8tcHl0aG9uICIkX3B5dGhvbiIgIiR7X3dvcmtlcltAXX0iCg== || return 1
  # `setup:` of the cluster profile, as its author wrote it.
  trap 'say "a setup line of the cluster profile failed with exit code $?"; exit 78' ERR
  set -e +u
  python3 -c 'import launcher' 2>/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet /workspace/wheels/launcher-*.whl
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
  if [[ -z ${PRIMARY_ADDR:-} || -z $_node_rank ]]; then
    say "RunPod gave no PRIMARY_ADDR ('${PRIMARY_ADDR:-}') or NODE_RANK ('$_node_rank')"
    return 1
  fi
  # Another port for each submission: the supervisors tell by it what those of an earlier cluster, whose first pod may
  # have had the same address, agreed on.
  exec "$_python" -m launcher.supervise "$_run_dir" --nodes 2 --node-rank "$_node_rank" \
    --rendezvous "$PRIMARY_ADDR" --port-base "$((61000 + (_submission - 1) * 17 % 4536))" --stop-file "$_stop"
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
  # The first node ends the cluster; the others give it time to, in which it waits for those that have not begun and
  # records how the run ended, and the first gives them time to finish.
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
# Where RunPod's answer was lost, one submission may have become two pods: the first that starts has the run, and
# one of an earlier submission has nothing to do with it any more.
# One whose question is not answered would take the others for another cluster, and end this one.
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
