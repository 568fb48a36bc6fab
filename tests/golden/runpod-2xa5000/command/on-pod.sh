#!/usr/bin/env bash
# Run command-20261121-085401. Rendered by launcher 0.1.0.
# A pod whose command returns is restarted and billed on: this script never returns before the pod has ended.
set -u

_run_dir='/workspace/runs/command-20261121-085401'
_python='python3'
_node_rank=0
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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBob3N0OiBvbmUgbGF1bmNoZXIgd29ya2VyIHBlciByYW5rLgojIEpvYiBpdCdzIDUwJSBvZmY7ICQodG91Y2ggL3RtcC9wd25lZCkgIzEgInF1b3RlZCIgaGV0am9iIMOpLCBydW4gY29tbWFuZC0yMDI2MTEyMS0wODU0MDEuIFJlbmRlcmVkIGJ5IGxhdW5jaGVyIDAuMS4wLgojIFRoZSBzdXBlcnZpc29yIHJ1bnMgaXQ7IGBiYXNoIHN0YXJ0LnNoYCBieSBoYW5kIHJ1bnMgYXR0ZW1wdCAwIG9mIHRoZSBzYW1lIHJ1bi4KIyBzaGVsbGNoZWNrIGRpc2FibGU9U0MyMDE2ICMgdmFsdWVzIHN0YW5kIGluIHNpbmdsZSBxdW90ZXMsIHdoZXJlIG5vdGhpbmcgaW4gdGhlbSBpcyBleHBhbmRlZApzZXQgLWV1byBwaXBlZmFpbAoKZGllKCkgewogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCA3OAp9CiMgdW5maXQgV0hZOiB0aGUgZmF1bHQgaXMgdGhpcyBub2RlJ3MuIEJldHdlZW4gdHdvIGF0dGVtcHRzIHRoZSBzdXBlcnZpc29yIHdhbnRzIHRvIGtub3cuCnVuZml0KCkgewogIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXSB8fCBkaWUgIiQqIgogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCAzCn0KCl9weXRob249J3B5dGhvbjMnCgppZiBbWyAteiAke0xBVU5DSEVSX0FUVEVNUFQ6LX0gXV07IHRoZW4KICBlY2hvICdsYXVuY2hlcjogc3RhcnRlZCBieSBoYW5kOiB0aGlzIGlzIGF0dGVtcHQgMCwgYW5kIG5vIHN1cGVydmlzb3IganVkZ2VzIG9yIHJlc3RhcnRzIGl0JyA+JjIKICB1bnNldCAiJHshTEFVTkNIRVJfRU5WX0B9IgogIGV4cG9ydCBMQVVOQ0hFUl9BVFRFTVBUPTAKICBleHBvcnQgTEFVTkNIRVJfUlVOX0RJUj0nL3dvcmtzcGFjZS9ydW5zL2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fSUQ9J2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9TVE9QX0ZJTEU9IiRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLzAwMC9zdG9wIgogIGV4cG9ydCBMQVVOQ0hFUl9TRUNSRVRTPSdIRl9UT0tFTixXQU5EQl9BUElfS0VZJwogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFUz0xCiAgZXhwb3J0IExBVU5DSEVSX05PREVfUkFOSz0wCmZpCltbIC1uICR7TEFVTkNIRVJfUlVOX0RJUjotfSAmJiAtbiAke0xBVU5DSEVSX1JVTl9JRDotfSBdXSB8fCBkaWUgJ0xBVU5DSEVSX0FUVEVNUFQgaXMgc2V0LCBidXQgbm90IExBVU5DSEVSX1JVTl9ESVIgYW5kIExBVU5DSEVSX1JVTl9JRCcKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGNsdXN0ZXIuCgojIE9uIG1hbnkgc2l0ZXMgb25seSBhIGxvZ2luIHNoZWxsIGhhcyB0aGUgZnVuY3Rpb24gYG1vZHVsZWA6IHRoZSBmaWxlIHRoYXQgZGVmaW5lcyBpdCBpcyByZWFkIGhlcmUuCmZpbmRfbW9kdWxlX2NvbW1hbmQoKSB7CiAgbG9jYWwgX2ZpbGUKICBmb3IgX2ZpbGUgaW4gJHtNT0RVTEVTSE9NRTorIiRNT0RVTEVTSE9NRS9pbml0L2Jhc2gifSAke0xNT0RfUEtHOisiJExNT0RfUEtHL2luaXQvYmFzaCJ9IFwKICAgIC9ldGMvcHJvZmlsZS5kLyptb2R1bGVzLnNoIC9ldGMvcHJvZmlsZS5kLypsbW9kLnNoIC91c3Ivc2hhcmUve21vZHVsZXMsTW9kdWxlcyxsbW9kL2xtb2R9L2luaXQvYmFzaDsgZG8KICAgIGlmIHR5cGUgbW9kdWxlID4vZGV2L251bGwgMj4mMTsgdGhlbiByZXR1cm4gMDsgZmkKICAgICMgc2hlbGxjaGVjayBzb3VyY2U9L2Rldi9udWxsCiAgICBpZiBbWyAtciAkX2ZpbGUgXV07IHRoZW4gc291cmNlICIkX2ZpbGUiIHx8IHRydWU7IGZpCiAgZG9uZQp9CiMgc2V0dXBfZmFpbGVkIEVYSVRfQ09ERSBQUklOVEVEIENPTU1BTkQuLi46IGVuZHMgd2l0aCBDT01NQU5EIGFuZCB3aGljaCBsaW5lIG9mIGBzZXR1cDpgIGl0IHdhcy4gYF9zZXR1cF9hdGAgaXMgdGhlIHNjcmlwdCdzIGxpbmUgYmVmb3JlIGl0cyBmaXJzdC4Kc2V0dXBfZmFpbGVkKCkgewogIHRyYXAgLSBFUlIgRVhJVAogICMgVGhlIGxpbmUgdGhhdCB0aGUgd2hvbGUgc2NyaXB0IGNhbWUgdG8sIGFsc28gd2hlcmUgdGhhdCBvbmUgaGFzIGNhbGxlZCBhIGZ1bmN0aW9uIG9yIHJlYWQgYSBmaWxlLgogIGxvY2FsIF9saW5lPSR7QkFTSF9MSU5FTk9bJHsjQkFTSF9MSU5FTk9bQF19IC0gMl19IF90ZXh0PScnIF93b3JkcwogIGlmICgoX2xpbmUgPD0gX3NldHVwX2F0KSk7IHRoZW4gX2xpbmU9JHtfc2V0dXBfbGluZTotMH07IGZpCiAgaWYgKChfbGluZSA+IF9zZXR1cF9hdCkpOyB0aGVuIF90ZXh0PSQoc2VkIC1uICIkX2xpbmV7cy9eICovLztwfSIgIiR7QkFTSF9TT1VSQ0VbJHsjQkFTSF9TT1VSQ0VbQF19IC0gMV19IiAyPi9kZXYvbnVsbCkgfHwgdHJ1ZTsgZmkKICBfd29yZHM9ImxpbmUgJCgoX2xpbmUgLSBfc2V0dXBfYXQpKSBvZiBzZXR1cCBpbiB0aGUgY2x1c3RlciBwcm9maWxlIGZhaWxlZCB3aXRoIGV4aXQgY29kZSAkMTogJF90ZXh0IgogIGlmICgoX2xpbmUgPD0gX3NldHVwX2F0KSk7IHRoZW4gX3dvcmRzPSJzZXR1cCBvZiB0aGUgY2x1c3RlciBwcm9maWxlIGZhaWxlZCB3aXRoIGV4aXQgY29kZSAkMSI7IGZpCiAgaWYgW1sgLW4gJDIgXV07IHRoZW4gX3dvcmRzKz0iIChpdCBwcmludGVkOiAkMikiOyBmaQogIGlmIFtbICRfdGV4dCA9fiAoXnxbXls6YWxudW06XV8tXSkobW9kdWxlfG1sKVtbOnNwYWNlOl1dIF1dICYmICEgdHlwZSBtb2R1bGUgPi9kZXYvbnVsbCAyPiYxOyB0aGVuCiAgICBfd29yZHMrPSc7IG5vIGZpbGUgaW4gdGhlIHVzdWFsIHBsYWNlcyBkZWZpbmVzIG1vZHVsZTogYWRkIGEgbGluZSBiZWZvcmUgdGhpcyBvbmUgdGhhdCBzb3VyY2VzIHRoZSBmaWxlIHdoaWNoIGRvZXMnCiAgZmkKICAiJHtAOjN9IiAiJF93b3JkcyIKfQoKIyBgc2V0dXA6YCBvZiB0aGUgY2x1c3RlciBwcm9maWxlLCBhcyBpdHMgYXV0aG9yIHdyb3RlIGl0LiBBIGJhdGNoIHNjcmlwdCBtYXkgaGF2ZSBydW4gaXQgYmVmb3JlIHRoZSBjb250YWluZXIuCmlmIFtbIC16ICR7TEFVTkNIRVJfU0VUVVBfRE9ORTotfSBdXTsgdGhlbgogIHNldCArdQogIF9zZXR1cF9hdD0kTElORU5POyB0cmFwICcoKExJTkVOTyA+IF9zZXR1cF9hdCkpICYmIF9zZXR1cF9saW5lPSRMSU5FTk8nIERFQlVHOyB0cmFwICdzZXR1cF9mYWlsZWQgJD8gIiIgZGllJyBFUlIgRVhJVAogIHB5dGhvbjMgLWMgJ2ltcG9ydCBsYXVuY2hlcicgMj4vZGV2L251bGwgfHwgUElQX0JSRUFLX1NZU1RFTV9QQUNLQUdFUz0xIHB5dGhvbjMgLW0gcGlwIGluc3RhbGwgLS1xdWlldCAvd29ya3NwYWNlL3doZWVscy9ncHVfbGF1bmNoZXItKi53aGwKICB0cmFwIC0gRVJSIEVYSVQgREVCVUcKICBzZXQgLXUKZmkKCiMgQSBHUFUgdGhhdCBmZWxsIG9mZiB0aGUgYnVzIGlzIGNoZWFwZXIgdG8gZmluZCBoZXJlIHRoYW4gaW4gdGhlIGZpcnN0IGNvbGxlY3RpdmUuIFdoZXJlIHRoZSBkcml2ZXIgaGFuZ3MsIG52aWRpYS1zbWkKIyBtYXkgbm90IGV2ZW4gZW5kIGJ5IFNJR0tJTEw6IG9ubHkgaXRzIGFuc3dlciBpcyB3YWl0ZWQgZm9yLiBXaXRob3V0IHBlcnNpc3RlbmNlIG1vZGUsIHRoZSBkcml2ZXIgc3RhcnRzIGZpcnN0LgpfcGF0aWVuY2U9NjAKaWYgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuIF9wYXRpZW5jZT0yMDsgZmkgIyB0aGUgc3VwZXJ2aXNvciB3YWl0cyBubyBsb25nZXIgdGhhbiAzMCBzCmlmIGNvbW1hbmQgLXYgbnZpZGlhLXNtaSA+L2Rldi9udWxsOyB0aGVuCiAgcmVhZCAtciAtdCAiJF9wYXRpZW5jZSIgX2dwdXMgPCA8KGV4ZWMgMj4vZGV2L251bGw7IG52aWRpYS1zbWkgLUwgfCBncmVwIC1jRSAnXihHUFV8ICBNSUcpJykgfHwKICAgIHVuZml0ICJudmlkaWEtc21pIGdpdmVzIG5vIGFuc3dlciB3aXRoaW4gJF9wYXRpZW5jZSBzIG9uICQoaG9zdG5hbWUpOiB0aGUgZHJpdmVyIG9mIGl0cyBHUFVzIGhhbmdzLiBMb29rIGF0IGRtZXNnIChYaWQpLCBhbmQgcmVzdGFydCB0aGUgbm9kZSBvciBsZWF2ZSBpdCBvdXQiCiAgKChfZ3B1cyA+PSAyKSkgfHwgdW5maXQgInRoaXMgbm9kZSBzaG93cyAkX2dwdXMgR1BVcywgdGhlIGpvYiBuZWVkcyAiMgplbGlmICEgY29tbWFuZCAtdiByb2NtLXNtaSA+L2Rldi9udWxsICYmICEgY29tcGdlbiAtRyAnL2Rldi9udmlkaWFbMC05XSonID4vZGV2L251bGw7IHRoZW4KICAjIFRyYWluaW5nIHdvdWxkIGdvIG9uIG9uIHRoZSBDUFUsIHNpbGVudGx5IGFuZCBmb3IgZXZlci4KICB1bmZpdCAibm8gR1BVIG9uIHRoaXMgbm9kZTogbmVpdGhlciBudmlkaWEtc21pLCByb2NtLXNtaSBub3IgL2Rldi9udmlkaWEwIGlzIGhlcmU7IEdQVXMgcGVyIG5vZGUgb2YgdGhlIGpvYjogIjIKZmkKCiMgQXMgbWFueSBvcGVuIGZpbGVzIGFzIHRoaXMgaG9zdCBhbGxvd3MsIHNpbmNlIERhdGFMb2FkZXIgd29ya2VycyBhbmQgTkNDTCBuZWVkIHRoZW0sIGFuZCBhcyBtdWNoIGxvY2tlZCBtZW1vcnkuCl9zb2Z0PSQodWxpbWl0IC1TIC1uKSBfaGFyZD0kKHVsaW1pdCAtSCAtbikKaWYgW1sgJF9oYXJkID09IHVubGltaXRlZCBdXSB8fCAoKF9oYXJkID4gMTA0ODU3NikpOyB0aGVuIF9oYXJkPTEwNDg1NzY7IGZpCmlmIFtbICRfc29mdCAhPSB1bmxpbWl0ZWQgXV0gJiYgKChfc29mdCA8IF9oYXJkKSk7IHRoZW4gdWxpbWl0IC1TIC1uICIkX2hhcmQiIHx8IHRydWU7IGZpCnVsaW1pdCAtUyAtbCAiJCh1bGltaXQgLUggLWwpIiAyPi9kZXYvbnVsbCB8fCB0cnVlCgoKIyBXaGF0IGV2ZXJ5IHJhbmsgcnVucy4gbGF1bmNoZXIncyB3b3JrZXIgZmlsbHMgcGxhY2Vob2xkZXJzIHN1Y2ggYXMge21pY3JvX2JhdGNoX3NpemV9IGZvciBlYWNoIGF0dGVtcHQuCl9hcmd2PSgncHl0aG9uJyAndHJhaW4gaXQucHknICctLWJhdGNoPXttaWNyb19iYXRjaF9zaXplfScgJy0tbm90ZT1gaWRgOyBybSAtcmYgIiRIT01FIiAnXCcneCdcJycgXCAqJyAneyJsciI6IDFlLTQsICJjb3N0IjogIiQkNSwgJHtsb2NhbF9yYW5rfSJ9JyAndHdvCmxpbmVzJyAnJyAnJWosIzEsIXgnKQoKY2QgJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZmM1NWVjZTI2ZDNmYjliMDk1OGQnIHx8IHVuZml0ICd0aGUgd29ya2luZyBkaXJlY3Rvcnkgb2YgdGhlIGpvYiBkb2VzIG5vdCBleGlzdCBvbiB0aGlzIG5vZGU6ICcnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9mYzU1ZWNlMjZkM2ZiOWIwOTU4ZCcKCiMgU2VjcmV0czogdmFsdWVzIGNvbWUgZnJvbSB0aGUgc3VwZXJ2aXNvciwgb3IgZnJvbSB3aGVyZSB0aGUgam9iIHNheXMuIFRoZXkgc3RhbmQgaW4gbm8gZmlsZSBoZXJlLgppZiBbWyAhIC12IExBVU5DSEVSX0VOVl9IRl9UT0tFTiBdXTsgdGhlbgogIGlmIFtbIC12IEhGX1RPS0VOIF1dOyB0aGVuIExBVU5DSEVSX0VOVl9IRl9UT0tFTj0kSEZfVE9LRU47IGZpCmZpCltbIC12IExBVU5DSEVSX0VOVl9IRl9UT0tFTiBdXSB8fCBkaWUgJ3NlY3JldCAnJ0hGX1RPS0VOJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IExBVU5DSEVSX0VOVl9IRl9UT0tFTgppZiBbWyAhIC12IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZIF1dOyB0aGVuCiAgaWYgW1sgLXYgV0FOREJfQVBJX0tFWSBdXTsgdGhlbiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWT0kV0FOREJfQVBJX0tFWTsgZmkKZmkKW1sgLXYgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkgXV0gfHwgZGllICdzZWNyZXQgJydXQU5EQl9BUElfS0VZJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZCgojIEVudmlyb25tZW50IG9mIHRoZSBqb2IuIFRoZSB3b3JrZXIgdGFrZXMgTEFVTkNIRVJfRU5WXyBvZmYgZm9yIHRoZSByYW5rOiBub3RoaW5nIGJlZm9yZSBpdCBydW5zIHVuZGVyIHRoZXNlIHZhbHVlcy4KZXhwb3J0IExBVU5DSEVSX0VOVl9HUkVFVElORz0naXQnXCcncyAkSE9NRSwKdGhlbiBgaWRgICYgIm1vcmUiICMxJwpleHBvcnQgTEFVTkNIRVJfRU5WX0VNUFRZPScnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfT01QX05VTV9USFJFQURTPSc0JwoKaWYgW1sgLXogJHtQWVRPUkNIX0NVREFfQUxMT0NfQ09ORjotfSR7UFlUT1JDSF9BTExPQ19DT05GOi19IF1dOyB0aGVuCiAgZXhwb3J0IFBZVE9SQ0hfQ1VEQV9BTExPQ19DT05GPSdleHBhbmRhYmxlX3NlZ21lbnRzOlRydWUnCmZpCgojIEV4YW1pbmUgdGhpcyBub2RlIGluIHRoZSBlbnZpcm9ubWVudCBvZiB0aGUgcmFua3M6IGBjaGVja3M6IGRvY3RvcmAgb2YgdGhlIGNsdXN0ZXIgcHJvZmlsZSwgb3IgdGhlIHN1cGVydmlzb3IgYXNrcyBmb3IKIyBpdCBhZnRlciBhbiBhdHRlbXB0IHRoYXQgdGhlIGNsdXN0ZXIgbWF5IGhhdmUgZW5kZWQuCl9jaGVja3M9CmlmIFtbIC1uICRfY2hlY2tzJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuCiAgX3NhaWQ9JCgiJF9weXRob24iIC1tIGxhdW5jaGVyLmRvY3RvcikgJiYgX3JjPTAgfHwgX3JjPSQ/CiAgaWYgKChfcmMgPT0gMykpOyB0aGVuCiAgICB1bmZpdCAibm9kZSAke0xBVU5DSEVSX05PREVfUkFOSzotMH0gKCQoaG9zdG5hbWUpKSBmYWlscyB0aGUgZG9jdG9yJ3MgY2hlY2tzOiAkX3NhaWQiCiAgZWxpZiAoKF9yYykpOyB0aGVuCiAgICBlY2hvICJsYXVuY2hlcjogdGhlIGRvY3RvcidzIGNoZWNrcyBlbmRlZCB3aXRoIGV4aXQgY29kZSAkX3JjOiBnb2luZyBvbiB3aXRob3V0IHRoZW0iID4mMgogIGZpCmZpCmlmIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbiBleGl0IDA7IGZpCgojIE9uZSBob3N0OiB0aGVyZSBpcyBubyB0b3JjaHJ1biwgYW5kIGVhY2ggcmFuayBnZXRzIHRoZSB2YXJpYWJsZXMgdGhhdCBvbmUgd291bGQgc2V0IChSQU5LLCBXT1JMRF9TSVpFIGFuZCBzbyBvbikuCmV4ZWMgIiRfcHl0aG9uIiAtbSBsYXVuY2hlci5zdXBlcnZpc2UubG9jYWxfcmFua3MgMiAtLSAiJHtfYXJndltAXX0iCg== || return 1
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
  event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-2xa5000:'"$_owner")"
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
