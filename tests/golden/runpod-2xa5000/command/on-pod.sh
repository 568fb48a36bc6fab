#!/usr/bin/env bash
# Run command-20261121-085401. Rendered by launcher 0.1.0.
# RunPod restarts, and bills, a pod whose command returns: this script does not return before the pod has ended.
set -u

_run_dir='/workspace/runs/command-20261121-085401'
_python='python3'
_node_rank=0
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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBob3N0OiBvbmUgbGF1bmNoZXIgd29ya2VyIHBlciByYW5rLgojIEpvYiBpdCdzIDUwJSBvZmY7ICQodG91Y2ggL3RtcC9wd25lZCkgIzEgInF1b3RlZCIgaGV0am9iIMOpLCBydW4gY29tbWFuZC0yMDI2MTEyMS0wODU0MDEuIFJlbmRlcmVkIGJ5IGxhdW5jaGVyIDAuMS4wLgojIFRoZSBzdXBlcnZpc29yIHJ1bnMgaXQ7IGBiYXNoIHN0YXJ0LnNoYCBieSBoYW5kIHJ1bnMgYXR0ZW1wdCAwIG9mIHRoZSBzYW1lIHJ1bi4KIyBzaGVsbGNoZWNrIGRpc2FibGU9U0MyMDE2ICMgdmFsdWVzIGFyZSBpbiBzaW5nbGUgcXVvdGVzLCBzbyB0aGF0IG5vdGhpbmcgaW4gdGhlbSBpcyBleHBhbmRlZApzZXQgLWV1byBwaXBlZmFpbAoKZGllKCkgewogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCA3OAp9CiMgdW5maXQgV0hZOiBlbmQgd2l0aCBhIGZhdWx0IG9mIHRoaXMgbm9kZS4gQmV0d2VlbiB0d28gYXR0ZW1wdHMsIGEgc3BlY2lhbCBleGl0IGNvZGUgdGVsbHMgdGhlIHN1cGVydmlzb3IuCnVuZml0KCkgewogIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXSB8fCBkaWUgIiQqIgogIHByaW50ZiAnbGF1bmNoZXI6ICVzXG4nICIkKiIgPiYyCiAgZXhpdCAzCn0KCl9weXRob249J3B5dGhvbjMnCgppZiBbWyAteiAke0xBVU5DSEVSX0FUVEVNUFQ6LX0gXV07IHRoZW4KICBlY2hvICdsYXVuY2hlcjogc3RhcnRlZCBieSBoYW5kOiB0aGlzIGlzIGF0dGVtcHQgMCwgYW5kIG5vIHN1cGVydmlzb3IganVkZ2VzIG9yIHJlc3RhcnRzIGl0JyA+JjIKICB1bnNldCAiJHshTEFVTkNIRVJfRU5WX0B9IgogIGV4cG9ydCBMQVVOQ0hFUl9BVFRFTVBUPTAKICBleHBvcnQgTEFVTkNIRVJfUlVOX0RJUj0nL3dvcmtzcGFjZS9ydW5zL2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9SVU5fSUQ9J2NvbW1hbmQtMjAyNjExMjEtMDg1NDAxJwogIGV4cG9ydCBMQVVOQ0hFUl9TVE9QX0ZJTEU9IiRMQVVOQ0hFUl9SVU5fRElSL2F0dGVtcHRzLzAwMC9zdG9wIgogIGV4cG9ydCBMQVVOQ0hFUl9TRUNSRVRTPSdIRl9UT0tFTixXQU5EQl9BUElfS0VZJwogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFUz0xCiAgZXhwb3J0IExBVU5DSEVSX05PREVfUkFOSz0wCmZpCltbIC1uICR7TEFVTkNIRVJfUlVOX0RJUjotfSAmJiAtbiAke0xBVU5DSEVSX1JVTl9JRDotfSBdXSB8fCBkaWUgJ0xBVU5DSEVSX0FUVEVNUFQgaXMgc2V0LCBidXQgbm90IExBVU5DSEVSX1JVTl9ESVIgYW5kIExBVU5DSEVSX1JVTl9JRCcKCiMgRW52aXJvbm1lbnQgb2YgdGhlIGNsdXN0ZXIuCgojIFNvdXJjZSB0aGUgZmlsZSB0aGF0IGRlZmluZXMgdGhlIGZ1bmN0aW9uIGBtb2R1bGVgLiBPbiBtYW55IHNpdGVzIG9ubHkgbG9naW4gc2hlbGxzIGhhdmUgaXQuCmZpbmRfbW9kdWxlX2NvbW1hbmQoKSB7CiAgbG9jYWwgX2ZpbGUKICBmb3IgX2ZpbGUgaW4gJHtNT0RVTEVTSE9NRTorIiRNT0RVTEVTSE9NRS9pbml0L2Jhc2gifSAke0xNT0RfUEtHOisiJExNT0RfUEtHL2luaXQvYmFzaCJ9IFwKICAgIC9ldGMvcHJvZmlsZS5kLyptb2R1bGVzLnNoIC9ldGMvcHJvZmlsZS5kLypsbW9kLnNoIC91c3Ivc2hhcmUve21vZHVsZXMsTW9kdWxlcyxsbW9kL2xtb2R9L2luaXQvYmFzaDsgZG8KICAgIGlmIHR5cGUgbW9kdWxlID4vZGV2L251bGwgMj4mMTsgdGhlbiByZXR1cm4gMDsgZmkKICAgICMgc2hlbGxjaGVjayBzb3VyY2U9L2Rldi9udWxsCiAgICBpZiBbWyAtciAkX2ZpbGUgXV07IHRoZW4gc291cmNlICIkX2ZpbGUiIHx8IHRydWU7IGZpCiAgZG9uZQp9CiMgc2V0dXBfZmFpbGVkIEVYSVRfQ09ERSBQUklOVEVEIENPTU1BTkQuLi46IGNhbGwgQ09NTUFORCB3aXRoIGEgbWVzc2FnZSB0aGF0IG5hbWVzIHRoZSBmYWlsZWQgbGluZSBvZiBgc2V0dXA6YC4KIyBgX3NldHVwX2F0YCBpcyB0aGUgbnVtYmVyIG9mIHRoZSBzY3JpcHQncyBsaW5lIGJlZm9yZSB0aGUgZmlyc3Qgb2YgdGhlbS4Kc2V0dXBfZmFpbGVkKCkgewogIHRyYXAgLSBFUlIgRVhJVAogICMgVGhlIGxpbmUgb2YgdGhlIHNjcmlwdCBpdHNlbGYsIGV2ZW4gaWYgdGhlIGVycm9yIHdhcyBpbiBhIGZ1bmN0aW9uIG9yIGluIGEgc291cmNlZCBmaWxlLgogIGxvY2FsIF9saW5lPSR7QkFTSF9MSU5FTk9bJHsjQkFTSF9MSU5FTk9bQF19IC0gMl19IF90ZXh0PScnIF93b3JkcwogIGlmICgoX2xpbmUgPD0gX3NldHVwX2F0KSk7IHRoZW4gX2xpbmU9JHtfc2V0dXBfbGluZTotMH07IGZpCiAgaWYgKChfbGluZSA+IF9zZXR1cF9hdCkpOyB0aGVuIF90ZXh0PSQoc2VkIC1uICIkX2xpbmV7cy9eICovLztwfSIgIiR7QkFTSF9TT1VSQ0VbJHsjQkFTSF9TT1VSQ0VbQF19IC0gMV19IiAyPi9kZXYvbnVsbCkgfHwgdHJ1ZTsgZmkKICBfd29yZHM9ImxpbmUgJCgoX2xpbmUgLSBfc2V0dXBfYXQpKSBvZiBzZXR1cCBpbiB0aGUgY2x1c3RlciBwcm9maWxlIGZhaWxlZCB3aXRoIGV4aXQgY29kZSAkMTogJF90ZXh0IgogIGlmICgoX2xpbmUgPD0gX3NldHVwX2F0KSk7IHRoZW4gX3dvcmRzPSJzZXR1cCBvZiB0aGUgY2x1c3RlciBwcm9maWxlIGZhaWxlZCB3aXRoIGV4aXQgY29kZSAkMSI7IGZpCiAgaWYgW1sgLW4gJDIgXV07IHRoZW4gX3dvcmRzKz0iIChpdCBwcmludGVkOiAkMikiOyBmaQogIGlmIFtbICRfdGV4dCA9fiAoXnxbXls6YWxudW06XV8tXSkobW9kdWxlfG1sKVtbOnNwYWNlOl1dIF1dICYmICEgdHlwZSBtb2R1bGUgPi9kZXYvbnVsbCAyPiYxOyB0aGVuCiAgICBfd29yZHMrPSc7IG5vIGZpbGUgaW4gdGhlIHVzdWFsIHBsYWNlcyBkZWZpbmVzIG1vZHVsZTogYWRkIGEgbGluZSBiZWZvcmUgdGhpcyBvbmUgdGhhdCBzb3VyY2VzIHRoZSBmaWxlIHdoaWNoIGRvZXMnCiAgZmkKICAiJHtAOjN9IiAiJF93b3JkcyIKfQoKIyBgc2V0dXA6YCBvZiB0aGUgY2x1c3RlciBwcm9maWxlLCB1bmNoYW5nZWQuIEEgYmF0Y2ggc2NyaXB0IG1heSBoYXZlIHJ1biBpdCBiZWZvcmUgaXQgc3RhcnRlZCB0aGUgY29udGFpbmVyLgppZiBbWyAteiAke0xBVU5DSEVSX1NFVFVQX0RPTkU6LX0gXV07IHRoZW4KICBzZXQgK3UKICBfc2V0dXBfYXQ9JExJTkVOTzsgdHJhcCAnKChMSU5FTk8gPiBfc2V0dXBfYXQpKSAmJiBfc2V0dXBfbGluZT0kTElORU5PJyBERUJVRzsgdHJhcCAnc2V0dXBfZmFpbGVkICQ/ICIiIGRpZScgRVJSIEVYSVQKICBweXRob24zIC1jICdpbXBvcnQgbGF1bmNoZXInIDI+L2Rldi9udWxsIHx8IFBJUF9CUkVBS19TWVNURU1fUEFDS0FHRVM9MSBweXRob24zIC1tIHBpcCBpbnN0YWxsIC0tcXVpZXQgL3dvcmtzcGFjZS93aGVlbHMvZ3B1X2xhdW5jaGVyLSoud2hsCiAgdHJhcCAtIEVSUiBFWElUIERFQlVHCiAgc2V0IC11CmZpCgojIEZpbmQgbG9zdCBHUFVzIGhlcmUsIG5vdCBpbiB0aGUgZmlyc3QgY29sbGVjdGl2ZS4gSWYgdGhlIGRyaXZlciBoYW5ncywgZXZlbiBTSUdLSUxMIG1heSBub3QgZW5kIG52aWRpYS1zbWk6IHdhaXQgb25seQojIGZvciBpdHMgYW5zd2VyLiBXaXRob3V0IHBlcnNpc3RlbmNlIG1vZGUsIHRoZSBkcml2ZXIgbXVzdCBmaXJzdCBzdGFydC4KX3BhdGllbmNlPTYwCmlmIFtbIC1uICR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbiBfcGF0aWVuY2U9MjA7IGZpICMgdGhlIHN1cGVydmlzb3Igd2FpdHMgZm9yIGF0IG1vc3QgMzAgcwppZiBjb21tYW5kIC12IG52aWRpYS1zbWkgPi9kZXYvbnVsbDsgdGhlbgogIHJlYWQgLXIgLXQgIiRfcGF0aWVuY2UiIF9ncHVzIDwgPChleGVjIDI+L2Rldi9udWxsOyBudmlkaWEtc21pIC1MIHwgZ3JlcCAtY0UgJ14oR1BVfCAgTUlHKScpIHx8CiAgICB1bmZpdCAibnZpZGlhLXNtaSBnaXZlcyBubyBhbnN3ZXIgd2l0aGluICRfcGF0aWVuY2UgcyBvbiAkKGhvc3RuYW1lKTogdGhlIGRyaXZlciBvZiBpdHMgR1BVcyBoYW5ncy4gTG9vayBhdCBkbWVzZyAoWGlkKSwgYW5kIHJlc3RhcnQgdGhlIG5vZGUgb3IgbGVhdmUgaXQgb3V0IgogICgoX2dwdXMgPj0gMikpIHx8IHVuZml0ICJ0aGlzIG5vZGUgc2hvd3MgJF9ncHVzIEdQVXMsIHRoZSBqb2IgbmVlZHMgIjIKZWxpZiAhIGNvbW1hbmQgLXYgcm9jbS1zbWkgPi9kZXYvbnVsbCAmJiAhIGNvbXBnZW4gLUcgJy9kZXYvbnZpZGlhWzAtOV0qJyA+L2Rldi9udWxsOyB0aGVuCiAgIyBPdGhlcndpc2UgdGhlIGpvYiB3b3VsZCBzaWxlbnRseSB0cmFpbiBvbiB0aGUgQ1BVLgogIHVuZml0ICJubyBHUFUgb24gdGhpcyBub2RlOiBuZWl0aGVyIG52aWRpYS1zbWksIHJvY20tc21pIG5vciAvZGV2L252aWRpYTAgaXMgaGVyZTsgR1BVcyBwZXIgbm9kZSBvZiB0aGUgam9iOiAiMgpmaQoKIyBSYWlzZSB0aGUgbGltaXRzIG9mIG9wZW4gZmlsZXMgKERhdGFMb2FkZXIgd29ya2VycyBhbmQgTkNDTCBuZWVkIG1hbnkpIGFuZCBvZiBsb2NrZWQgbWVtb3J5IGFzIGZhciBhcyBhbGxvd2VkLgpfc29mdD0kKHVsaW1pdCAtUyAtbikgX2hhcmQ9JCh1bGltaXQgLUggLW4pCmlmIFtbICRfaGFyZCA9PSB1bmxpbWl0ZWQgXV0gfHwgKChfaGFyZCA+IDEwNDg1NzYpKTsgdGhlbiBfaGFyZD0xMDQ4NTc2OyBmaQppZiBbWyAkX3NvZnQgIT0gdW5saW1pdGVkIF1dICYmICgoX3NvZnQgPCBfaGFyZCkpOyB0aGVuIHVsaW1pdCAtUyAtbiAiJF9oYXJkIiB8fCB0cnVlOyBmaQp1bGltaXQgLVMgLWwgIiQodWxpbWl0IC1IIC1sKSIgMj4vZGV2L251bGwgfHwgdHJ1ZQoKCiMgVGhlIGNvbW1hbmQgb2YgZXZlcnkgcmFuay4gbGF1bmNoZXIncyB3b3JrZXIgZmlsbHMgaW4gcGxhY2Vob2xkZXJzIHN1Y2ggYXMge21pY3JvX2JhdGNoX3NpemV9IGZvciBlYWNoIGF0dGVtcHQuCl9hcmd2PSgncHl0aG9uJyAndHJhaW4gaXQucHknICctLWJhdGNoPXttaWNyb19iYXRjaF9zaXplfScgJy0tbm90ZT1gaWRgOyBybSAtcmYgIiRIT01FIiAnXCcneCdcJycgXCAqJyAneyJsciI6IDFlLTQsICJjb3N0IjogIiQkNSwgJHtsb2NhbF9yYW5rfSJ9JyAndHdvCmxpbmVzJyAnJyAnJWosIzEsIXgnKQoKY2QgJy93b3Jrc3BhY2UvLmxhdW5jaGVyL2NvZGUvZmM1NWVjZTI2ZDNmYjliMDk1OGQnIHx8IHVuZml0ICd0aGUgd29ya2luZyBkaXJlY3Rvcnkgb2YgdGhlIGpvYiBkb2VzIG5vdCBleGlzdCBvbiB0aGlzIG5vZGU6ICcnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9mYzU1ZWNlMjZkM2ZiOWIwOTU4ZCcKCiMgU2VjcmV0czogdGhlIHN1cGVydmlzb3IgcGFzc2VzIHRoZSB2YWx1ZXM7IG90aGVyd2lzZSB0aGV5IGFyZSByZWFkIGZyb20gdGhlIHNvdXJjZSB0aGF0IHRoZSBqb2IgbmFtZXMuIFRoaXMgZmlsZSBkb2VzCiMgbm90IGNvbnRhaW4gdGhlbS4KaWYgW1sgISAtdiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4gXV07IHRoZW4KICBpZiBbWyAtdiBIRl9UT0tFTiBdXTsgdGhlbiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU49JEhGX1RPS0VOOyBmaQpmaQpbWyAtdiBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4gXV0gfHwgZGllICdzZWNyZXQgJydIRl9UT0tFTicnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfSEZfVE9LRU4KaWYgW1sgISAtdiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWSBdXTsgdGhlbgogIGlmIFtbIC12IFdBTkRCX0FQSV9LRVkgXV07IHRoZW4gTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVk9JFdBTkRCX0FQSV9LRVk7IGZpCmZpCltbIC12IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZIF1dIHx8IGRpZSAnc2VjcmV0ICcnV0FOREJfQVBJX0tFWScnIGhhcyBubyB2YWx1ZSBvbiB0aGlzIG5vZGUnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWQoKIyBFbnZpcm9ubWVudCBvZiB0aGUgam9iLiBUaGUgd29ya2VyIHJlbW92ZXMgdGhlIHByZWZpeCBMQVVOQ0hFUl9FTlZfLCBzbyB0aGF0IHRoZSB2YWx1ZXMgcmVhY2ggb25seSB0aGUgcmFuay4KZXhwb3J0IExBVU5DSEVSX0VOVl9HUkVFVElORz0naXQnXCcncyAkSE9NRSwKdGhlbiBgaWRgICYgIm1vcmUiICMxJwpleHBvcnQgTEFVTkNIRVJfRU5WX0VNUFRZPScnCmV4cG9ydCBMQVVOQ0hFUl9FTlZfT01QX05VTV9USFJFQURTPSc0JwoKaWYgW1sgLXogJHtQWVRPUkNIX0NVREFfQUxMT0NfQ09ORjotfSR7UFlUT1JDSF9BTExPQ19DT05GOi19IF1dOyB0aGVuCiAgZXhwb3J0IFBZVE9SQ0hfQ1VEQV9BTExPQ19DT05GPSdleHBhbmRhYmxlX3NlZ21lbnRzOlRydWUnCmZpCgojIENoZWNrIHRoaXMgbm9kZSBpbiB0aGUgZW52aXJvbm1lbnQgb2YgdGhlIHJhbmtzLCBpZiB0aGUgcHJvZmlsZSBoYXMgYGNoZWNrczogZG9jdG9yYCwgb3IgaWYgdGhlIHN1cGVydmlzb3IgYXNrcyBmb3IgaXQKIyBhZnRlciBhbiBhdHRlbXB0IHRoYXQgbWF5IGhhdmUgZmFpbGVkIGJlY2F1c2Ugb2YgdGhlIGNsdXN0ZXIuCl9jaGVja3M9CmlmIFtbIC1uICRfY2hlY2tzJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuCiAgX3NhaWQ9JCgiJF9weXRob24iIC1tIGxhdW5jaGVyLmRvY3RvcikgJiYgX3JjPTAgfHwgX3JjPSQ/CiAgaWYgKChfcmMgPT0gMykpOyB0aGVuCiAgICB1bmZpdCAibm9kZSAke0xBVU5DSEVSX05PREVfUkFOSzotMH0gKCQoaG9zdG5hbWUpKSBmYWlscyB0aGUgZG9jdG9yJ3MgY2hlY2tzOiAkX3NhaWQiCiAgZWxpZiAoKF9yYykpOyB0aGVuCiAgICBlY2hvICJsYXVuY2hlcjogdGhlIGRvY3RvcidzIGNoZWNrcyBlbmRlZCB3aXRoIGV4aXQgY29kZSAkX3JjOiBjb250aW51aW5nIHdpdGhvdXQgdGhlbSIgPiYyCiAgZmkKZmkKaWYgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuIGV4aXQgMDsgZmkKCiMgT25lIGhvc3QsIHdpdGhvdXQgdG9yY2hydW46IGVhY2ggcmFuayBnZXRzIHRoZSB2YXJpYWJsZXMgdGhhdCB0b3JjaHJ1biB3b3VsZCBzZXQsIHN1Y2ggYXMgUkFOSyBhbmQgV09STERfU0laRS4KZXhlYyAiJF9weXRob24iIC1tIGxhdW5jaGVyLnN1cGVydmlzZS5sb2NhbF9yYW5rcyAyIC0tICIke19hcmd2W0BdfSIK || return 1
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
