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
# Epoch seconds. A pod is billed from its creation on, also while its image is pulled.
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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBub2RlOiB0b3JjaHJ1biwgd2hpY2ggc3RhcnRzIG9uZSBsYXVuY2hlciB3b3JrZXIgcGVyIHJhbmsuCiMgSm9iIGl0J3MgNTAlIG9mZjsgJCh0b3VjaCAvdG1wL3B3bmVkKSAjMSAicXVvdGVkIiBoZXRqb2Igw6ksIHJ1biBjb21tYW5kLTIwMjYxMTIxLTA4NTQwMS4gUmVuZGVyZWQgYnkgbGF1bmNoZXIgMC4xLjAuCiMgVGhlIHN1cGVydmlzb3IgcnVucyBpdDsgYGJhc2ggc3RhcnQuc2hgIGJ5IGhhbmQgcnVucyBhdHRlbXB0IDAgb2YgdGhlIHNhbWUgcnVuLgojIHNoZWxsY2hlY2sgZGlzYWJsZT1TQzIwMTYgIyB2YWx1ZXMgc3RhbmQgaW4gc2luZ2xlIHF1b3Rlcywgd2hlcmUgbm90aGluZyBpbiB0aGVtIGlzIGV4cGFuZGVkCnNldCAtZXVvIHBpcGVmYWlsCgpkaWUoKSB7CiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDc4Cn0KIyB1bmZpdCBXSFk6IHRoZSBmYXVsdCBpcyB0aGlzIG5vZGUncy4gQmV0d2VlbiB0d28gYXR0ZW1wdHMgdGhlIHN1cGVydmlzb3Igd2FudHMgdG8ga25vdy4KdW5maXQoKSB7CiAgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dIHx8IGRpZSAiJCoiCiAgcHJpbnRmICdsYXVuY2hlcjogJXNcbicgIiQqIiA+JjIKICBleGl0IDMKfQoKX3B5dGhvbj0ncHl0aG9uMycKCmlmIFtbIC16ICR7TEFVTkNIRVJfQVRURU1QVDotfSBdXTsgdGhlbgogIGVjaG8gJ2xhdW5jaGVyOiBzdGFydGVkIGJ5IGhhbmQ6IHRoaXMgaXMgYXR0ZW1wdCAwLCBhbmQgbm8gc3VwZXJ2aXNvciBqdWRnZXMgb3IgcmVzdGFydHMgaXQnID4mMgogIHVuc2V0ICIkeyFMQVVOQ0hFUl9FTlZfQH0iCiAgZXhwb3J0IExBVU5DSEVSX0FUVEVNUFQ9MAogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fRElSPScvd29ya3NwYWNlL3J1bnMvY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9JRD0nY29tbWFuZC0yMDI2MTEyMS0wODU0MDEnCiAgZXhwb3J0IExBVU5DSEVSX1NUT1BfRklMRT0iJExBVU5DSEVSX1JVTl9ESVIvYXR0ZW1wdHMvMDAwL3N0b3AiCiAgZXhwb3J0IExBVU5DSEVSX1NFQ1JFVFM9J0hGX1RPS0VOLFdBTkRCX0FQSV9LRVknCiAgZXhwb3J0IExBVU5DSEVSX05PREVTPTIKICBbWyAtbiAke0xBVU5DSEVSX05PREVfUkFOSzotfSAmJiAtbiAke0xBVU5DSEVSX1JFTkRFWlZPVVNfSE9TVDotfSAmJiAtbiAke0xBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVDotfSBdXSB8fAogICAgZGllICdvbiBzZXZlcmFsIG5vZGVzIHNldCBMQVVOQ0hFUl9OT0RFX1JBTksgKDAsIDEsIC4uKSwgTEFVTkNIRVJfUkVOREVaVk9VU19IT1NUIChhZGRyZXNzIG9mIG5vZGUgMCBhcyB0aGUgb3RoZXJzIHJlYWNoIGl0KSBhbmQgTEFVTkNIRVJfUkVOREVaVk9VU19QT1JUICh0aGUgc2FtZSBldmVyeXdoZXJlLCA2MTAwMC02NTUzNSknCmZpCltbIC1uICR7TEFVTkNIRVJfUlVOX0RJUjotfSAmJiAtbiAke0xBVU5DSEVSX1JVTl9JRDotfSBdXSB8fCBkaWUgJ0xBVU5DSEVSX0FUVEVNUFQgaXMgc2V0LCBidXQgbm90IExBVU5DSEVSX1JVTl9ESVIgYW5kIExBVU5DSEVSX1JVTl9JRCcKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGNsdXN0ZXIuCmV4cG9ydCBOQ0NMX1NPQ0tFVF9JRk5BTUU9J2VuczEnCmV4cG9ydCBHTE9PX1NPQ0tFVF9JRk5BTUU9J2VuczEnCmV4cG9ydCBOQ0NMX0RFQlVHPSdXQVJOJwoKIyBPbiBtYW55IHNpdGVzIG9ubHkgYSBsb2dpbiBzaGVsbCBoYXMgdGhlIGZ1bmN0aW9uIGBtb2R1bGVgOiB0aGUgZmlsZSB0aGF0IGRlZmluZXMgaXQgaXMgcmVhZCBoZXJlLgpmaW5kX21vZHVsZV9jb21tYW5kKCkgewogIGxvY2FsIF9maWxlCiAgZm9yIF9maWxlIGluICR7TU9EVUxFU0hPTUU6KyIkTU9EVUxFU0hPTUUvaW5pdC9iYXNoIn0gJHtMTU9EX1BLRzorIiRMTU9EX1BLRy9pbml0L2Jhc2gifSBcCiAgICAvZXRjL3Byb2ZpbGUuZC8qbW9kdWxlcy5zaCAvZXRjL3Byb2ZpbGUuZC8qbG1vZC5zaCAvdXNyL3NoYXJlL3ttb2R1bGVzLE1vZHVsZXMsbG1vZC9sbW9kfS9pbml0L2Jhc2g7IGRvCiAgICBpZiB0eXBlIG1vZHVsZSA+L2Rldi9udWxsIDI+JjE7IHRoZW4gcmV0dXJuIDA7IGZpCiAgICAjIHNoZWxsY2hlY2sgc291cmNlPS9kZXYvbnVsbAogICAgaWYgW1sgLXIgJF9maWxlIF1dOyB0aGVuIHNvdXJjZSAiJF9maWxlIiB8fCB0cnVlOyBmaQogIGRvbmUKfQojIHNldHVwX2ZhaWxlZCBFWElUX0NPREUgUFJJTlRFRCBDT01NQU5ELi4uOiBlbmRzIHdpdGggQ09NTUFORCBhbmQgd2hpY2ggbGluZSBvZiBgc2V0dXA6YCBpdCB3YXMuIGBfc2V0dXBfYXRgIGlzIHRoZSBzY3JpcHQncyBsaW5lIGJlZm9yZSBpdHMgZmlyc3QuCnNldHVwX2ZhaWxlZCgpIHsKICB0cmFwIC0gRVJSIEVYSVQKICAjIFRoZSBsaW5lIHRoYXQgdGhlIHdob2xlIHNjcmlwdCBjYW1lIHRvLCBhbHNvIHdoZXJlIHRoYXQgb25lIGhhcyBjYWxsZWQgYSBmdW5jdGlvbiBvciByZWFkIGEgZmlsZS4KICBsb2NhbCBfbGluZT0ke0JBU0hfTElORU5PWyR7I0JBU0hfTElORU5PW0BdfSAtIDJdfSBfdGV4dD0nJyBfd29yZHMKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF9saW5lPSR7X3NldHVwX2xpbmU6LTB9OyBmaQogIGlmICgoX2xpbmUgPiBfc2V0dXBfYXQpKTsgdGhlbiBfdGV4dD0kKHNlZCAtbiAiJF9saW5le3MvXiAqLy87cH0iICIke0JBU0hfU09VUkNFWyR7I0JBU0hfU09VUkNFW0BdfSAtIDFdfSIgMj4vZGV2L251bGwpIHx8IHRydWU7IGZpCiAgX3dvcmRzPSJsaW5lICQoKF9saW5lIC0gX3NldHVwX2F0KSkgb2Ygc2V0dXAgaW4gdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDE6ICRfdGV4dCIKICBpZiAoKF9saW5lIDw9IF9zZXR1cF9hdCkpOyB0aGVuIF93b3Jkcz0ic2V0dXAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSBmYWlsZWQgd2l0aCBleGl0IGNvZGUgJDEiOyBmaQogIGlmIFtbIC1uICQyIF1dOyB0aGVuIF93b3Jkcys9IiAoaXQgcHJpbnRlZDogJDIpIjsgZmkKICBpZiBbWyAkX3RleHQgPX4gKF58W15bOmFsbnVtOl1fLV0pKG1vZHVsZXxtbClbWzpzcGFjZTpdXSBdXSAmJiAhIHR5cGUgbW9kdWxlID4vZGV2L251bGwgMj4mMTsgdGhlbgogICAgX3dvcmRzKz0nOyBubyBmaWxlIGluIHRoZSB1c3VhbCBwbGFjZXMgZGVmaW5lcyBtb2R1bGU6IGFkZCBhIGxpbmUgYmVmb3JlIHRoaXMgb25lIHRoYXQgc291cmNlcyB0aGUgZmlsZSB3aGljaCBkb2VzJwogIGZpCiAgIiR7QDozfSIgIiRfd29yZHMiCn0KCiMgYHNldHVwOmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgYXMgaXRzIGF1dGhvciB3cm90ZSBpdC4gQSBiYXRjaCBzY3JpcHQgbWF5IGhhdmUgcnVuIGl0IGJlZm9yZSB0aGUgY29udGFpbmVyLgppZiBbWyAteiAke0xBVU5DSEVSX1NFVFVQX0RPTkU6LX0gXV07IHRoZW4KICBzZXQgK3UKICBfc2V0dXBfYXQ9JExJTkVOTzsgdHJhcCAnKChMSU5FTk8gPiBfc2V0dXBfYXQpKSAmJiBfc2V0dXBfbGluZT0kTElORU5PJyBERUJVRzsgdHJhcCAnc2V0dXBfZmFpbGVkICQ/ICIiIGRpZScgRVJSIEVYSVQKICBweXRob24zIC1jICdpbXBvcnQgbGF1bmNoZXInIDI+L2Rldi9udWxsIHx8IFBJUF9CUkVBS19TWVNURU1fUEFDS0FHRVM9MSBweXRob24zIC1tIHBpcCBpbnN0YWxsIC0tcXVpZXQgL3dvcmtzcGFjZS93aGVlbHMvbGF1bmNoZXItKi53aGwKICB0cmFwIC0gRVJSIEVYSVQgREVCVUcKICBzZXQgLXUKZmkKCiMgQSBHUFUgdGhhdCBmZWxsIG9mZiB0aGUgYnVzIGlzIGNoZWFwZXIgdG8gZmluZCBoZXJlIHRoYW4gaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuCmlmIGNvbW1hbmQgLXYgbnZpZGlhLXNtaSA+L2Rldi9udWxsOyB0aGVuCiAgX2dwdXM9JChudmlkaWEtc21pIC1MIDI+L2Rldi9udWxsIHwgZ3JlcCAtY0UgJ14oR1BVfCAgTUlHKScgfHwgdHJ1ZSkKICAoKF9ncHVzID49IDgpKSB8fCB1bmZpdCAidGhpcyBub2RlIHNob3dzICRfZ3B1cyBHUFVzLCB0aGUgam9iIG5lZWRzICI4CmVsaWYgISBjb21tYW5kIC12IHJvY20tc21pID4vZGV2L251bGwgJiYgISBjb21wZ2VuIC1HICcvZGV2L252aWRpYVswLTldKicgPi9kZXYvbnVsbDsgdGhlbgogICMgVHJhaW5pbmcgd291bGQgZ28gb24gb24gdGhlIENQVSwgc2lsZW50bHkgYW5kIGZvciBldmVyLgogIHVuZml0ICJubyBHUFUgb24gdGhpcyBub2RlOiBuZWl0aGVyIG52aWRpYS1zbWksIHJvY20tc21pIG5vciAvZGV2L252aWRpYTAgaXMgaGVyZTsgR1BVcyBwZXIgbm9kZSBvZiB0aGUgam9iOiAiOApmaQoKIyBBcyBtYW55IG9wZW4gZmlsZXMgYXMgdGhpcyBob3N0IGFsbG93cywgc2luY2UgRGF0YUxvYWRlciB3b3JrZXJzIGFuZCBOQ0NMIG5lZWQgdGhlbSwgYW5kIGFzIG11Y2ggbG9ja2VkIG1lbW9yeS4KX3NvZnQ9JCh1bGltaXQgLVMgLW4pIF9oYXJkPSQodWxpbWl0IC1IIC1uKQppZiBbWyAkX2hhcmQgPT0gdW5saW1pdGVkIF1dIHx8ICgoX2hhcmQgPiAxMDQ4NTc2KSk7IHRoZW4gX2hhcmQ9MTA0ODU3NjsgZmkKaWYgW1sgJF9zb2Z0ICE9IHVubGltaXRlZCBdXSAmJiAoKF9zb2Z0IDwgX2hhcmQpKTsgdGhlbiB1bGltaXQgLVMgLW4gIiRfaGFyZCIgfHwgdHJ1ZTsgZmkKdWxpbWl0IC1TIC1sICIkKHVsaW1pdCAtSCAtbCkiIDI+L2Rldi9udWxsIHx8IHRydWUKaWYgW1sgJCh1bGltaXQgLWwpICE9IHVubGltaXRlZCBdXSAmJiBjb21wZ2VuIC1HICcvZGV2L2luZmluaWJhbmQvdXZlcmJzKicgPi9kZXYvbnVsbDsgdGhlbgogIGVjaG8gImxhdW5jaGVyOiBsb2NrZWQgbWVtb3J5IGlzIGxpbWl0ZWQgdG8gJCh1bGltaXQgLWwpIEtpQiBoZXJlICh1bGltaXQgLWwpLCBhbmQgSW5maW5pQmFuZCBuZWVkcyBtb3JlOiBnaXZlIHNsdXJtZCBMaW1pdE1FTUxPQ0s9aW5maW5pdHksIG9yIG1lbmQgbGltaXRzLmNvbmYiID4mMgpmaQoKIyBTZXZlcmFsIG5vZGVzOiBuZXZlciBmYWxsIGJhY2sgdG8gbG9jYWxob3N0LCB3aGVyZSBlYWNoIG5vZGUgd291bGQgd2FpdCBmb3IgaXRzZWxmLgpfaG9zdD0ke0xBVU5DSEVSX1JFTkRFWlZPVVNfSE9TVDotfSBfcG9ydD0ke0xBVU5DSEVSX1JFTkRFWlZPVVNfUE9SVDotfSBfbm9kZV9yYW5rPSR7TEFVTkNIRVJfTk9ERV9SQU5LOi19CltbIC1uICRfaG9zdCAmJiAtbiAkX3BvcnQgJiYgLW4gJF9ub2RlX3JhbmsgXV0gfHwKICBkaWUgIm5vIHJlbmRlenZvdXM6IExBVU5DSEVSX1JFTkRFWlZPVVNfSE9TVCBpcyAnJF9ob3N0JywgTEFVTkNIRVJfUkVOREVaVk9VU19QT1JUICckX3BvcnQnLCBMQVVOQ0hFUl9OT0RFX1JBTksgJyRfbm9kZV9yYW5rJyIKIyBUaGUgYWRkcmVzcyBhbmQgaW50ZXJmYWNlIGJ5IHdoaWNoIHRoaXMgbm9kZSByZWFjaGVzIHRoZSBmaXJzdCBvbmU6IG5hbWVzIG1heSBub3QgcmVzb2x2ZSwgb3IgdG8gMTI3LjAuMS4xLgpfZm91bmQ9JCgiJF9weXRob24iIC1jICdmcm9tIGxhdW5jaGVyLnN1cGVydmlzZS5pbnRlcmZhY2UgaW1wb3J0IG1haW47IG1haW4oKScgIiRfaG9zdCIgIiRfcG9ydCIpIHx8IGRpZSAiY2Fubm90IHJlYWNoIHRoZSBmaXJzdCBub2RlIGF0ICckX2hvc3QnIgpyZWFkIC1yIF9sb2NhbF9hZGRyIF9nbG9vIF9uY2NsIDw8PCIkX2ZvdW5kIgpbWyAkX2xvY2FsX2FkZHIgIT0gMTI3LiogJiYgJF9sb2NhbF9hZGRyICE9IDo6MSBdXSB8fCBkaWUgInRoZSBmaXJzdCBub2RlJ3MgYWRkcmVzcyAnJF9ob3N0JyBpcyBhIGxvb3BiYWNrIGFkZHJlc3MgaGVyZTogb3RoZXIgbm9kZXMgY2Fubm90IHJlYWNoIGl0IgojIGdsb28gd291bGQgdGVsbCB0aGUgb3RoZXJzIHRoZSBhZGRyZXNzIG9mIHRoaXMgaG9zdCdzIG93biBuYW1lLCBhbmQgTkNDTCB0aGF0IG9mIGl0cyBmaXJzdCBpbnRlcmZhY2UuCmlmIFtbIC16ICR7R0xPT19TT0NLRVRfSUZOQU1FOi19ICYmICRfZ2xvbyAhPSAtIF1dOyB0aGVuIGV4cG9ydCBHTE9PX1NPQ0tFVF9JRk5BTUU9JF9nbG9vOyBmaQppZiBbWyAteiAke05DQ0xfU09DS0VUX0lGTkFNRTotfSAmJiAkX25jY2wgIT0gLSBdXTsgdGhlbiBleHBvcnQgTkNDTF9TT0NLRVRfSUZOQU1FPSRfbmNjbDsgZmkKX2lzX2hvc3Q9ZmFsc2UKaWYgW1sgJF9ub2RlX3JhbmsgPT0gMCBdXTsgdGhlbiBfaXNfaG9zdD10cnVlOyBmaQppZiBbWyAkX2hvc3QgPT0gKjoqIF1dOyB0aGVuIF9ob3N0PSJbJF9ob3N0XSI7IGZpCl9yZW5kZXp2b3VzPSgtLW5ub2RlcyAyIC0tcmR6di1lbmRwb2ludCAiJF9ob3N0OiRfcG9ydCIgLS1sb2NhbC1hZGRyICIkX2xvY2FsX2FkZHIiKQppZiBbWyAtbiAke0xBVU5DSEVSX0FQQVJUOi19IF1dOyB0aGVuCiAgIyBIb3N0cyB0aGF0IHNoYXJlIG5vIGZvbGRlciBoYXZlIHRoZSBmaWxlcyBvZiB0aGVpciBvd24gcmFua3M6IHJhbmtzIGZvbGxvdyB0aGUgbm9kZXMuIGMxMGQgc29ydHMgYWRkcmVzc2VzLgogIF9yZW5kZXp2b3VzKz0oLS1yZHp2LWJhY2tlbmQgc3RhdGljIC0tbm9kZS1yYW5rICIkX25vZGVfcmFuayIpCmVsc2UKICAjIFNhaWQgb3V0cmlnaHQ6IHRvcmNocnVuIHdvdWxkIGNvbXBhcmUgaG9zdCBuYW1lcyB0byBmaW5kIG91dCwgYW5kIHdhaXQgZm9yIGV2ZXIgd2hlbiB0aGV5IGRvIG5vdCBtYXRjaC4KICBfcmVuZGV6dm91cys9KC0tcmR6di1iYWNrZW5kIGMxMGQgLS1yZHp2LWNvbmYgImlzX2hvc3Q9JF9pc19ob3N0IikKZmkKCiMgV2hhdCBldmVyeSByYW5rIHJ1bnMuIGxhdW5jaGVyJ3Mgd29ya2VyIGZpbGxzIHBsYWNlaG9sZGVycyBzdWNoIGFzIHttaWNyb19iYXRjaF9zaXplfSBmb3IgZWFjaCBhdHRlbXB0LgpfYXJndj0oJ3B5dGhvbicgJ3RyYWluIGl0LnB5JyAnLS1iYXRjaD17bWljcm9fYmF0Y2hfc2l6ZX0nICctLW5vdGU9YGlkYDsgcm0gLXJmICIkSE9NRSIgJ1wnJ3gnXCcnIFwgKicgJ3sibHIiOiAxZS00LCAiY29zdCI6ICIkJDUsICR7bG9jYWxfcmFua30ifScgJ3R3bwpsaW5lcycgJycgJyVqLCMxLCF4JykKX3dvcmtlcj0oLW0gbGF1bmNoZXIuc3VwZXJ2aXNlLndvcmtlciAtLSAiJHtfYXJndltAXX0iKQojIHRvcmNocnVuIHRha2VzICQkIGFuZCAke2xvY2FsX3Jhbmt9IGluIGFyZ3VtZW50cyBmb3IgaXRzIG93bjogd2l0aCBldmVyeSAkIGRvdWJsZWQgdGhleSBhcnJpdmUgYXMgd3JpdHRlbi4KX3R3bz0nJCQnCl93b3JrZXI9KCIke193b3JrZXJbQF0vL1skXS8kX3R3b30iKQojIEVycm9yIGZpbGVzIG9mIHRvcmNocnVuOiBvbiB0aGUgcnVuIGRpcmVjdG9yeSwgbm90IGluIGEgdGVtcG9yYXJ5IGZvbGRlciB0aGF0IGlzIGxvc3Qgd2l0aCB0aGUgbm9kZS4KX2xvZ19kaXI9JExBVU5DSEVSX1JVTl9ESVIvYXR0ZW1wdHMvJChwcmludGYgJyUwM2QnICIkTEFVTkNIRVJfQVRURU1QVCIpL3RvcmNocnVuL25vZGUtJHtMQVVOQ0hFUl9OT0RFX1JBTks6LTB9Cm1rZGlyIC1wICIkX2xvZ19kaXIiIHx8IHRydWUKX3RvcmNocnVuPSgKICAtLW5wcm9jLXBlci1ub2RlIDggLS1tYXgtcmVzdGFydHMgMCAtLWxvZy1kaXIgIiRfbG9nX2RpciIKICAtLXJkenYtaWQgIiRMQVVOQ0hFUl9SVU5fSUQtJExBVU5DSEVSX0FUVEVNUFQiCiAgIiR7X3JlbmRlenZvdXNbQF19IgopCgpjZCAnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9mYzU1ZWNlMjZkM2ZiOWIwOTU4ZCcgfHwgdW5maXQgJ3RoZSB3b3JraW5nIGRpcmVjdG9yeSBvZiB0aGUgam9iIGRvZXMgbm90IGV4aXN0IG9uIHRoaXMgbm9kZTogJycvd29ya3NwYWNlLy5sYXVuY2hlci9jb2RlL2ZjNTVlY2UyNmQzZmI5YjA5NThkJwoKIyBTZWNyZXRzOiB2YWx1ZXMgY29tZSBmcm9tIHRoZSBzdXBlcnZpc29yLCBvciBmcm9tIHdoZXJlIHRoZSBqb2Igc2F5cy4gVGhleSBzdGFuZCBpbiBubyBmaWxlIGhlcmUuCmlmIFtbICEgLXYgTEFVTkNIRVJfRU5WX0hGX1RPS0VOIF1dOyB0aGVuCiAgaWYgW1sgLXYgSEZfVE9LRU4gXV07IHRoZW4gTEFVTkNIRVJfRU5WX0hGX1RPS0VOPSRIRl9UT0tFTjsgZmkKZmkKW1sgLXYgTEFVTkNIRVJfRU5WX0hGX1RPS0VOIF1dIHx8IGRpZSAnc2VjcmV0ICcnSEZfVE9LRU4nJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgTEFVTkNIRVJfRU5WX0hGX1RPS0VOCmlmIFtbICEgLXYgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkgXV07IHRoZW4KICBpZiBbWyAtdiBXQU5EQl9BUElfS0VZIF1dOyB0aGVuIExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZPSRXQU5EQl9BUElfS0VZOyBmaQpmaQpbWyAtdiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWSBdXSB8fCBkaWUgJ3NlY3JldCAnJ1dBTkRCX0FQSV9LRVknJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGpvYi4gVGhlIHdvcmtlciB0YWtlcyBMQVVOQ0hFUl9FTlZfIG9mZiBmb3IgdGhlIHJhbms6IG5vdGhpbmcgYmVmb3JlIGl0IHJ1bnMgdW5kZXIgdGhlc2UgdmFsdWVzLgpleHBvcnQgTEFVTkNIRVJfRU5WX0dSRUVUSU5HPSdpdCdcJydzICRIT01FLAp0aGVuIGBpZGAgJiAibW9yZSIgIzEnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfRU1QVFk9JycKZXhwb3J0IExBVU5DSEVSX0VOVl9PTVBfTlVNX1RIUkVBRFM9JzQnCgppZiBbWyAteiAke1BZVE9SQ0hfQ1VEQV9BTExPQ19DT05GOi19JHtQWVRPUkNIX0FMTE9DX0NPTkY6LX0gXV07IHRoZW4KICBleHBvcnQgUFlUT1JDSF9DVURBX0FMTE9DX0NPTkY9J2V4cGFuZGFibGVfc2VnbWVudHM6VHJ1ZScKZmkKCiMgRXhhbWluZSB0aGlzIG5vZGUgaW4gdGhlIGVudmlyb25tZW50IG9mIHRoZSByYW5rczogYGNoZWNrczogZG9jdG9yYCBvZiB0aGUgY2x1c3RlciBwcm9maWxlLCBvciB0aGUgc3VwZXJ2aXNvciBhc2tzIGZvcgojIGl0IGFmdGVyIGFuIGF0dGVtcHQgdGhhdCB0aGUgY2x1c3RlciBtYXkgaGF2ZSBlbmRlZC4KX2NoZWNrcz0KaWYgW1sgLW4gJF9jaGVja3Mke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV07IHRoZW4KICBfc2FpZD0kKCIkX3B5dGhvbiIgLW0gbGF1bmNoZXIuZG9jdG9yKSAmJiBfcmM9MCB8fCBfcmM9JD8KICBpZiAoKF9yYyA9PSAzKSk7IHRoZW4KICAgIHVuZml0ICJub2RlICR7TEFVTkNIRVJfTk9ERV9SQU5LOi0wfSAoJChob3N0bmFtZSkpIGZhaWxzIHRoZSBkb2N0b3IncyBjaGVja3M6ICRfc2FpZCIKICBlbGlmICgoX3JjKSk7IHRoZW4KICAgIGVjaG8gImxhdW5jaGVyOiB0aGUgZG9jdG9yJ3MgY2hlY2tzIGVuZGVkIHdpdGggZXhpdCBjb2RlICRfcmM6IGdvaW5nIG9uIHdpdGhvdXQgdGhlbSIgPiYyCiAgZmkKZmkKaWYgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuIGV4aXQgMDsgZmkKCiMgQXMgYHB5dGhvbiAtbSB0b3JjaC5kaXN0cmlidXRlZC5ydW5gLCBidXQgdGhhdCBub2JvZHkgbG9va3MgZm9yIGdhcmJhZ2Ugd2hpbGUgdG9yY2ggaXMgaW1wb3J0ZWQ6IGEgc2l4dGggb2YgdGhlIHRpbWUuCl9ydW5fdG9yY2hydW49J2ltcG9ydCBnYzsgZ2MuZGlzYWJsZSgpOyBmcm9tIHRvcmNoLmRpc3RyaWJ1dGVkLnJ1biBpbXBvcnQgbWFpbjsgZ2MuZW5hYmxlKCk7IG1haW4oKScKZXhlYyAiJF9weXRob24iIC1jICIkX3J1bl90b3JjaHJ1biIgIiR7X3RvcmNocnVuW0BdfSIgLS1uby1weXRob24gIiRfcHl0aG9uIiAiJHtfd29ya2VyW0BdfSIK || return 1
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
  exec "$_python" -m launcher.supervise "$_run_dir" --nodes 2 --node-rank "$_node_rank" \
    --rendezvous "$PRIMARY_ADDR" --port-base 61000 --stop-file "$_stop"
}

# call METHOD PATH: answer on standard output, then the status as its last line. The key is in no argument.
call() {
  if command -v curl >/dev/null; then
    printf 'header = "Authorization: Bearer %s"\n' "${RUNPOD_API_KEY:-}" |
      curl -sS --max-time 30 -K - -X "$1" -w '\n%{http_code}\n' "$_api$2"
  else
    "$(command -v python3 || command -v python || echo "$_python")" -c '
import os, sys, urllib.error, urllib.request
headers = {"Authorization": "Bearer " + os.environ.get("RUNPOD_API_KEY", "")}
try:
    answer = urllib.request.urlopen(urllib.request.Request(sys.argv[2], None, headers, method=sys.argv[1]), timeout=30)
except urllib.error.HTTPError as error:
    answer = error
print(answer.read().decode(errors="replace"))
print(answer.status)
' "$1" "$_api$2"
  fi
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
  # The first node ends the cluster; the others give it time to, and the first gives them time to finish.
  if [[ $_node_rank == 0 ]]; then sleep 30; else sleep 600; fi
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
_me=$(cluster_id) || _me=${PRIMARY_ADDR:-$_pod}
_claim=$_run_dir/runpod-submission-$_submission
(set -o noclobber && printf '%s\n' "$_me" >"$_claim") 2>/dev/null
for _ in 1 2 3 4 5; do
  _owner=$(cat "$_claim" 2>/dev/null)
  if [[ -n $_owner ]]; then break; fi
  sleep 1
done
for _file in "$_run_dir"/runpod-submission-*; do
  _number=${_file##*-}
  if [[ $_number =~ ^[0-9]+$ ]] && ((_number > _submission)); then _owner=$(<"$_file"); fi
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
if [[ $_latest =~ ^[0-9]+$ ]] && ((_latest < _now + _limit)); then _limit=$((_latest - _now)); fi
(set -o noclobber && printf '%s\n' "$((_now + _limit))" >"$_deadline_file") 2>/dev/null
_deadline=$(cat "$_deadline_file" 2>/dev/null)
# Killed between making the file and writing it, or the volume is full.
[[ $_deadline =~ ^[0-9]+$ ]] || _deadline=$(($(date -r "$_deadline_file" +%s || date +%s) + _limit))
printf '%s\n' "$_now" >>"$_starts_file"
_starts=()
mapfile -t _starts <"$_starts_file"
_limit=$((_deadline - _now))
if ((_limit <= 0)); then
  give_up time-limit 'the time of the pod (max_hours, or what the budget pays for) was over when its start script began'
fi
if ((${#_starts[@]} > _most_restarts + 1)); then
  give_up unknown "the pod's start script was killed or its container crashed $((${#_starts[@]} - 1)) times"
fi
# First the run is asked to stop, with time for a checkpoint, then it is ended.
{
  sleep "$((_limit > _grace ? _limit - _grace : 0))"
  printf 'time-limit\n' >"$_stop"
} &
_timer=$!
exec 9> >(tee -a "$_run_dir/pod-node-${_node_rank:-unknown}.log")
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
    _number=${_file##*-}
    _other=$(cat "$_file" 2>/dev/null)
    if [[ ! $_number =~ ^[0-9]+$ || -z $_other || $_other == "$_me" || -e $_run_dir/pod-$_other.done ]]; then continue; fi
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
  _reason=$(sed -n 's/^\[launcher\] //p' "$_run_dir/pod-node-$_node_rank.log" 2>/dev/null | tail -n 1)
  judge "$_failure" "${_reason:-the supervisor left no record of its end} (exit code $_rc)"
fi
printf '%s\n' "$_rc" >"$_done_mark"
end_pod
