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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBob3N0OiBvbmUgbGF1bmNoZXIgd29ya2VyIHBlciByYW5rLgojIEpvYiB0aW55LWdwdCwgcnVuIHRhc2stMjAyNjExMjEtMDg1NDAxLiBSZW5kZXJlZCBieSBsYXVuY2hlciAwLjEuMC4KIyBUaGUgc3VwZXJ2aXNvciBydW5zIGl0OyBgYmFzaCBzdGFydC5zaGAgYnkgaGFuZCBydW5zIGF0dGVtcHQgMCBvZiB0aGUgc2FtZSBydW4uCiMgc2hlbGxjaGVjayBkaXNhYmxlPVNDMjAxNiAjIHZhbHVlcyBzdGFuZCBpbiBzaW5nbGUgcXVvdGVzLCB3aGVyZSBub3RoaW5nIGluIHRoZW0gaXMgZXhwYW5kZWQKc2V0IC1ldW8gcGlwZWZhaWwKCmRpZSgpIHsKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgNzgKfQojIHVuZml0IFdIWTogdGhlIGZhdWx0IGlzIHRoaXMgbm9kZSdzLiBCZXR3ZWVuIHR3byBhdHRlbXB0cyB0aGUgc3VwZXJ2aXNvciB3YW50cyB0byBrbm93Lgp1bmZpdCgpIHsKICBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV0gfHwgZGllICIkKiIKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgMwp9CgpfcHl0aG9uPSdweXRob24zJwoKaWYgW1sgLXogJHtMQVVOQ0hFUl9BVFRFTVBUOi19IF1dOyB0aGVuCiAgZWNobyAnbGF1bmNoZXI6IHN0YXJ0ZWQgYnkgaGFuZDogdGhpcyBpcyBhdHRlbXB0IDAsIGFuZCBubyBzdXBlcnZpc29yIGp1ZGdlcyBvciByZXN0YXJ0cyBpdCcgPiYyCiAgdW5zZXQgIiR7IUxBVU5DSEVSX0VOVl9AfSIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MApmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgpleHBvcnQgTkNDTF9ERUJVRz0nV0FSTicKCiMgT24gbWFueSBzaXRlcyBvbmx5IGEgbG9naW4gc2hlbGwgaGFzIHRoZSBmdW5jdGlvbiBgbW9kdWxlYDogdGhlIGZpbGUgdGhhdCBkZWZpbmVzIGl0IGlzIHJlYWQgaGVyZS4KZmluZF9tb2R1bGVfY29tbWFuZCgpIHsKICBsb2NhbCBfZmlsZQogIGZvciBfZmlsZSBpbiAke01PRFVMRVNIT01FOisiJE1PRFVMRVNIT01FL2luaXQvYmFzaCJ9ICR7TE1PRF9QS0c6KyIkTE1PRF9QS0cvaW5pdC9iYXNoIn0gXAogICAgL2V0Yy9wcm9maWxlLmQvKm1vZHVsZXMuc2ggL2V0Yy9wcm9maWxlLmQvKmxtb2Quc2ggL3Vzci9zaGFyZS97bW9kdWxlcyxNb2R1bGVzLGxtb2QvbG1vZH0vaW5pdC9iYXNoOyBkbwogICAgaWYgdHlwZSBtb2R1bGUgPi9kZXYvbnVsbCAyPiYxOyB0aGVuIHJldHVybiAwOyBmaQogICAgIyBzaGVsbGNoZWNrIHNvdXJjZT0vZGV2L251bGwKICAgIGlmIFtbIC1yICRfZmlsZSBdXTsgdGhlbiBzb3VyY2UgIiRfZmlsZSIgfHwgdHJ1ZTsgZmkKICBkb25lCn0KIyBzZXR1cF9mYWlsZWQgRVhJVF9DT0RFIFBSSU5URUQgQ09NTUFORC4uLjogZW5kcyB3aXRoIENPTU1BTkQgYW5kIHdoaWNoIGxpbmUgb2YgYHNldHVwOmAgaXQgd2FzLiBgX3NldHVwX2F0YCBpcyB0aGUgc2NyaXB0J3MgbGluZSBiZWZvcmUgaXRzIGZpcnN0LgpzZXR1cF9mYWlsZWQoKSB7CiAgdHJhcCAtIEVSUiBFWElUCiAgIyBUaGUgbGluZSB0aGF0IHRoZSB3aG9sZSBzY3JpcHQgY2FtZSB0bywgYWxzbyB3aGVyZSB0aGF0IG9uZSBoYXMgY2FsbGVkIGEgZnVuY3Rpb24gb3IgcmVhZCBhIGZpbGUuCiAgbG9jYWwgX2xpbmU9JHtCQVNIX0xJTkVOT1skeyNCQVNIX0xJTkVOT1tAXX0gLSAyXX0gX3RleHQ9JycgX3dvcmRzCiAgaWYgKChfbGluZSA8PSBfc2V0dXBfYXQpKTsgdGhlbiBfbGluZT0ke19zZXR1cF9saW5lOi0wfTsgZmkKICBpZiAoKF9saW5lID4gX3NldHVwX2F0KSk7IHRoZW4gX3RleHQ9JChzZWQgLW4gIiRfbGluZXtzL14gKi8vO3B9IiAiJHtCQVNIX1NPVVJDRVskeyNCQVNIX1NPVVJDRVtAXX0gLSAxXX0iIDI+L2Rldi9udWxsKSB8fCB0cnVlOyBmaQogIF93b3Jkcz0ibGluZSAkKChfbGluZSAtIF9zZXR1cF9hdCkpIG9mIHNldHVwIGluIHRoZSBjbHVzdGVyIHByb2ZpbGUgZmFpbGVkIHdpdGggZXhpdCBjb2RlICQxOiAkX3RleHQiCiAgaWYgKChfbGluZSA8PSBfc2V0dXBfYXQpKTsgdGhlbiBfd29yZHM9InNldHVwIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUgZmFpbGVkIHdpdGggZXhpdCBjb2RlICQxIjsgZmkKICBpZiBbWyAtbiAkMiBdXTsgdGhlbiBfd29yZHMrPSIgKGl0IHByaW50ZWQ6ICQyKSI7IGZpCiAgaWYgW1sgJF90ZXh0ID1+IChefFteWzphbG51bTpdXy1dKShtb2R1bGV8bWwpW1s6c3BhY2U6XV0gXV0gJiYgISB0eXBlIG1vZHVsZSA+L2Rldi9udWxsIDI+JjE7IHRoZW4KICAgIF93b3Jkcys9Jzsgbm8gZmlsZSBpbiB0aGUgdXN1YWwgcGxhY2VzIGRlZmluZXMgbW9kdWxlOiBhZGQgYSBsaW5lIGJlZm9yZSB0aGlzIG9uZSB0aGF0IHNvdXJjZXMgdGhlIGZpbGUgd2hpY2ggZG9lcycKICBmaQogICIke0A6M30iICIkX3dvcmRzIgp9CgojIGBzZXR1cDpgIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUsIGFzIGl0cyBhdXRob3Igd3JvdGUgaXQuIEEgYmF0Y2ggc2NyaXB0IG1heSBoYXZlIHJ1biBpdCBiZWZvcmUgdGhlIGNvbnRhaW5lci4KaWYgW1sgLXogJHtMQVVOQ0hFUl9TRVRVUF9ET05FOi19IF1dOyB0aGVuCiAgc2V0ICt1CiAgX3NldHVwX2F0PSRMSU5FTk87IHRyYXAgJygoTElORU5PID4gX3NldHVwX2F0KSkgJiYgX3NldHVwX2xpbmU9JExJTkVOTycgREVCVUc7IHRyYXAgJ3NldHVwX2ZhaWxlZCAkPyAiIiBkaWUnIEVSUiBFWElUCiAgcHl0aG9uMyAtYyAnaW1wb3J0IGxhdW5jaGVyJyAyPi9kZXYvbnVsbCB8fCBQSVBfQlJFQUtfU1lTVEVNX1BBQ0tBR0VTPTEgcHl0aG9uMyAtbSBwaXAgaW5zdGFsbCAtLXF1aWV0IC93b3Jrc3BhY2Uvd2hlZWxzL2dwdV9sYXVuY2hlci0qLndobAogIHRyYXAgLSBFUlIgRVhJVCBERUJVRwogIHNldCAtdQpmaQoKIyBBIEdQVSB0aGF0IGZlbGwgb2ZmIHRoZSBidXMgaXMgY2hlYXBlciB0byBmaW5kIGhlcmUgdGhhbiBpbiB0aGUgZmlyc3QgY29sbGVjdGl2ZS4gV2hlcmUgdGhlIGRyaXZlciBoYW5ncywgbnZpZGlhLXNtaQojIG1heSBub3QgZXZlbiBlbmQgYnkgU0lHS0lMTDogb25seSBpdHMgYW5zd2VyIGlzIHdhaXRlZCBmb3IuIFdpdGhvdXQgcGVyc2lzdGVuY2UgbW9kZSwgdGhlIGRyaXZlciBzdGFydHMgZmlyc3QuCl9wYXRpZW5jZT02MAppZiBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV07IHRoZW4gX3BhdGllbmNlPTIwOyBmaSAjIHRoZSBzdXBlcnZpc29yIHdhaXRzIG5vIGxvbmdlciB0aGFuIDMwIHMKaWYgY29tbWFuZCAtdiBudmlkaWEtc21pID4vZGV2L251bGw7IHRoZW4KICByZWFkIC1yIC10ICIkX3BhdGllbmNlIiBfZ3B1cyA8IDwoZXhlYyAyPi9kZXYvbnVsbDsgbnZpZGlhLXNtaSAtTCB8IGdyZXAgLWNFICdeKEdQVXwgIE1JRyknKSB8fAogICAgdW5maXQgIm52aWRpYS1zbWkgZ2l2ZXMgbm8gYW5zd2VyIHdpdGhpbiAkX3BhdGllbmNlIHMgb24gJChob3N0bmFtZSk6IHRoZSBkcml2ZXIgb2YgaXRzIEdQVXMgaGFuZ3MuIExvb2sgYXQgZG1lc2cgKFhpZCksIGFuZCByZXN0YXJ0IHRoZSBub2RlIG9yIGxlYXZlIGl0IG91dCIKICAoKF9ncHVzID49IDgpKSB8fCB1bmZpdCAidGhpcyBub2RlIHNob3dzICRfZ3B1cyBHUFVzLCB0aGUgam9iIG5lZWRzICI4CmVsaWYgISBjb21tYW5kIC12IHJvY20tc21pID4vZGV2L251bGwgJiYgISBjb21wZ2VuIC1HICcvZGV2L252aWRpYVswLTldKicgPi9kZXYvbnVsbDsgdGhlbgogICMgVHJhaW5pbmcgd291bGQgZ28gb24gb24gdGhlIENQVSwgc2lsZW50bHkgYW5kIGZvciBldmVyLgogIHVuZml0ICJubyBHUFUgb24gdGhpcyBub2RlOiBuZWl0aGVyIG52aWRpYS1zbWksIHJvY20tc21pIG5vciAvZGV2L252aWRpYTAgaXMgaGVyZTsgR1BVcyBwZXIgbm9kZSBvZiB0aGUgam9iOiAiOApmaQoKIyBBcyBtYW55IG9wZW4gZmlsZXMgYXMgdGhpcyBob3N0IGFsbG93cywgc2luY2UgRGF0YUxvYWRlciB3b3JrZXJzIGFuZCBOQ0NMIG5lZWQgdGhlbSwgYW5kIGFzIG11Y2ggbG9ja2VkIG1lbW9yeS4KX3NvZnQ9JCh1bGltaXQgLVMgLW4pIF9oYXJkPSQodWxpbWl0IC1IIC1uKQppZiBbWyAkX2hhcmQgPT0gdW5saW1pdGVkIF1dIHx8ICgoX2hhcmQgPiAxMDQ4NTc2KSk7IHRoZW4gX2hhcmQ9MTA0ODU3NjsgZmkKaWYgW1sgJF9zb2Z0ICE9IHVubGltaXRlZCBdXSAmJiAoKF9zb2Z0IDwgX2hhcmQpKTsgdGhlbiB1bGltaXQgLVMgLW4gIiRfaGFyZCIgfHwgdHJ1ZTsgZmkKdWxpbWl0IC1TIC1sICIkKHVsaW1pdCAtSCAtbCkiIDI+L2Rldi9udWxsIHx8IHRydWUKCgojIFdoYXQgZXZlcnkgcmFuayBydW5zLiBsYXVuY2hlcidzIHdvcmtlciBmaWxscyBwbGFjZWhvbGRlcnMgc3VjaCBhcyB7bWljcm9fYmF0Y2hfc2l6ZX0gZm9yIGVhY2ggYXR0ZW1wdC4KX2FyZ3Y9KCdweXRob24zJyAnLW0nICdsYXVuY2hlci50cmFpbicpCgpjZCAnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9mYzU1ZWNlMjZkM2ZiOWIwOTU4ZCcgfHwgdW5maXQgJ3RoZSB3b3JraW5nIGRpcmVjdG9yeSBvZiB0aGUgam9iIGRvZXMgbm90IGV4aXN0IG9uIHRoaXMgbm9kZTogJycvd29ya3NwYWNlLy5sYXVuY2hlci9jb2RlL2ZjNTVlY2UyNmQzZmI5YjA5NThkJwoKIyBTZWNyZXRzOiB2YWx1ZXMgY29tZSBmcm9tIHRoZSBzdXBlcnZpc29yLCBvciBmcm9tIHdoZXJlIHRoZSBqb2Igc2F5cy4gVGhleSBzdGFuZCBpbiBubyBmaWxlIGhlcmUuCmlmIFtbICEgLXYgTEFVTkNIRVJfRU5WX0hGX1RPS0VOIF1dOyB0aGVuCiAgaWYgW1sgLXYgSEZfVE9LRU4gXV07IHRoZW4gTEFVTkNIRVJfRU5WX0hGX1RPS0VOPSRIRl9UT0tFTjsgZmkKZmkKW1sgLXYgTEFVTkNIRVJfRU5WX0hGX1RPS0VOIF1dIHx8IGRpZSAnc2VjcmV0ICcnSEZfVE9LRU4nJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgTEFVTkNIRVJfRU5WX0hGX1RPS0VOCmlmIFtbICEgLXYgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkgXV07IHRoZW4KICBpZiBbWyAtdiBXQU5EQl9BUElfS0VZIF1dOyB0aGVuIExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZPSRXQU5EQl9BUElfS0VZOyBmaQpmaQpbWyAtdiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWSBdXSB8fCBkaWUgJ3NlY3JldCAnJ1dBTkRCX0FQSV9LRVknJyBoYXMgbm8gdmFsdWUgb24gdGhpcyBub2RlJwpleHBvcnQgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkKCmlmIFtbIC16ICR7UFlUT1JDSF9DVURBX0FMTE9DX0NPTkY6LX0ke1BZVE9SQ0hfQUxMT0NfQ09ORjotfSBdXTsgdGhlbgogIGV4cG9ydCBQWVRPUkNIX0NVREFfQUxMT0NfQ09ORj0nZXhwYW5kYWJsZV9zZWdtZW50czpUcnVlJwpmaQoKIyBFeGFtaW5lIHRoaXMgbm9kZSBpbiB0aGUgZW52aXJvbm1lbnQgb2YgdGhlIHJhbmtzOiBgY2hlY2tzOiBkb2N0b3JgIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUsIG9yIHRoZSBzdXBlcnZpc29yIGFza3MgZm9yCiMgaXQgYWZ0ZXIgYW4gYXR0ZW1wdCB0aGF0IHRoZSBjbHVzdGVyIG1heSBoYXZlIGVuZGVkLgpfY2hlY2tzPQppZiBbWyAtbiAkX2NoZWNrcyR7TEFVTkNIRVJfT05MWV9DSEVDSzotfSBdXTsgdGhlbgogIF9zYWlkPSQoIiRfcHl0aG9uIiAtbSBsYXVuY2hlci5kb2N0b3IpICYmIF9yYz0wIHx8IF9yYz0kPwogIGlmICgoX3JjID09IDMpKTsgdGhlbgogICAgdW5maXQgIm5vZGUgJHtMQVVOQ0hFUl9OT0RFX1JBTks6LTB9ICgkKGhvc3RuYW1lKSkgZmFpbHMgdGhlIGRvY3RvcidzIGNoZWNrczogJF9zYWlkIgogIGVsaWYgKChfcmMpKTsgdGhlbgogICAgZWNobyAibGF1bmNoZXI6IHRoZSBkb2N0b3IncyBjaGVja3MgZW5kZWQgd2l0aCBleGl0IGNvZGUgJF9yYzogZ29pbmcgb24gd2l0aG91dCB0aGVtIiA+JjIKICBmaQpmaQppZiBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV07IHRoZW4gZXhpdCAwOyBmaQoKIyBPbmUgaG9zdDogdGhlcmUgaXMgbm8gdG9yY2hydW4sIGFuZCBlYWNoIHJhbmsgZ2V0cyB0aGUgdmFyaWFibGVzIHRoYXQgb25lIHdvdWxkIHNldCAoUkFOSywgV09STERfU0laRSBhbmQgc28gb24pLgpleGVjICIkX3B5dGhvbiIgLW0gbGF1bmNoZXIuc3VwZXJ2aXNlLmxvY2FsX3JhbmtzIDggLS0gIiR7X2FyZ3ZbQF19Igo= || return 1
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
  event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-8xh100:'"$_owner")"
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
    event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-8xh100:'"$_owner")"
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
