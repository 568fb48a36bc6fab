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
  put 'scripts/start.sh' '755' IyEvdXNyL2Jpbi9lbnYgYmFzaAojIFN0YXJ0cyB0aGUgcmFua3Mgb2Ygb25lIGF0dGVtcHQgb24gdGhpcyBob3N0OiBvbmUgbGF1bmNoZXIgd29ya2VyIHBlciByYW5rLgojIEpvYiB0aW55LWdwdCwgcnVuIHRhc2stMjAyNjExMjEtMDg1NDAxLiBSZW5kZXJlZCBieSBsYXVuY2hlciAwLjEuMC4KIyBUaGUgc3VwZXJ2aXNvciBydW5zIGl0OyBgYmFzaCBzdGFydC5zaGAgYnkgaGFuZCBydW5zIGF0dGVtcHQgMCBvZiB0aGUgc2FtZSBydW4uCiMgc2hlbGxjaGVjayBkaXNhYmxlPVNDMjAxNiAjIHZhbHVlcyBhcmUgaW4gc2luZ2xlIHF1b3Rlcywgc28gdGhhdCBub3RoaW5nIGluIHRoZW0gaXMgZXhwYW5kZWQKc2V0IC1ldW8gcGlwZWZhaWwKCmRpZSgpIHsKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgNzgKfQojIHVuZml0IFdIWTogZW5kIHdpdGggYSBmYXVsdCBvZiB0aGlzIG5vZGUuIEJldHdlZW4gdHdvIGF0dGVtcHRzLCBhIHNwZWNpYWwgZXhpdCBjb2RlIHRlbGxzIHRoZSBzdXBlcnZpc29yLgp1bmZpdCgpIHsKICBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV0gfHwgZGllICIkKiIKICBwcmludGYgJ2xhdW5jaGVyOiAlc1xuJyAiJCoiID4mMgogIGV4aXQgMwp9CgpfcHl0aG9uPSdweXRob24zJwoKaWYgW1sgLXogJHtMQVVOQ0hFUl9BVFRFTVBUOi19IF1dOyB0aGVuCiAgZWNobyAnbGF1bmNoZXI6IHN0YXJ0ZWQgYnkgaGFuZDogdGhpcyBpcyBhdHRlbXB0IDAsIGFuZCBubyBzdXBlcnZpc29yIGp1ZGdlcyBvciByZXN0YXJ0cyBpdCcgPiYyCiAgdW5zZXQgIiR7IUxBVU5DSEVSX0VOVl9AfSIKICBleHBvcnQgTEFVTkNIRVJfQVRURU1QVD0wCiAgZXhwb3J0IExBVU5DSEVSX1JVTl9ESVI9Jy93b3Jrc3BhY2UvcnVucy90YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfUlVOX0lEPSd0YXNrLTIwMjYxMTIxLTA4NTQwMScKICBleHBvcnQgTEFVTkNIRVJfU1RPUF9GSUxFPSIkTEFVTkNIRVJfUlVOX0RJUi9hdHRlbXB0cy8wMDAvc3RvcCIKICBleHBvcnQgTEFVTkNIRVJfU0VDUkVUUz0nSEZfVE9LRU4sV0FOREJfQVBJX0tFWScKICBleHBvcnQgTEFVTkNIRVJfTk9ERVM9MQogIGV4cG9ydCBMQVVOQ0hFUl9OT0RFX1JBTks9MApmaQpbWyAtbiAke0xBVU5DSEVSX1JVTl9ESVI6LX0gJiYgLW4gJHtMQVVOQ0hFUl9SVU5fSUQ6LX0gXV0gfHwgZGllICdMQVVOQ0hFUl9BVFRFTVBUIGlzIHNldCwgYnV0IG5vdCBMQVVOQ0hFUl9SVU5fRElSIGFuZCBMQVVOQ0hFUl9SVU5fSUQnCgojIEVudmlyb25tZW50IG9mIHRoZSBjbHVzdGVyLgpleHBvcnQgTkNDTF9ERUJVRz0nV0FSTicKCiMgU291cmNlIHRoZSBmaWxlIHRoYXQgZGVmaW5lcyB0aGUgZnVuY3Rpb24gYG1vZHVsZWAuIE9uIG1hbnkgc2l0ZXMgb25seSBsb2dpbiBzaGVsbHMgaGF2ZSBpdC4KZmluZF9tb2R1bGVfY29tbWFuZCgpIHsKICBsb2NhbCBfZmlsZQogIGZvciBfZmlsZSBpbiAke01PRFVMRVNIT01FOisiJE1PRFVMRVNIT01FL2luaXQvYmFzaCJ9ICR7TE1PRF9QS0c6KyIkTE1PRF9QS0cvaW5pdC9iYXNoIn0gXAogICAgL2V0Yy9wcm9maWxlLmQvKm1vZHVsZXMuc2ggL2V0Yy9wcm9maWxlLmQvKmxtb2Quc2ggL3Vzci9zaGFyZS97bW9kdWxlcyxNb2R1bGVzLGxtb2QvbG1vZH0vaW5pdC9iYXNoOyBkbwogICAgaWYgdHlwZSBtb2R1bGUgPi9kZXYvbnVsbCAyPiYxOyB0aGVuIHJldHVybiAwOyBmaQogICAgIyBzaGVsbGNoZWNrIHNvdXJjZT0vZGV2L251bGwKICAgIGlmIFtbIC1yICRfZmlsZSBdXTsgdGhlbiBzb3VyY2UgIiRfZmlsZSIgfHwgdHJ1ZTsgZmkKICBkb25lCn0KIyBzZXR1cF9mYWlsZWQgRVhJVF9DT0RFIFBSSU5URUQgQ09NTUFORC4uLjogY2FsbCBDT01NQU5EIHdpdGggYSBtZXNzYWdlIHRoYXQgbmFtZXMgdGhlIGZhaWxlZCBsaW5lIG9mIGBzZXR1cDpgLgojIGBfc2V0dXBfYXRgIGlzIHRoZSBudW1iZXIgb2YgdGhlIHNjcmlwdCdzIGxpbmUgYmVmb3JlIHRoZSBmaXJzdCBvZiB0aGVtLgpzZXR1cF9mYWlsZWQoKSB7CiAgdHJhcCAtIEVSUiBFWElUCiAgIyBUaGUgbGluZSBvZiB0aGUgc2NyaXB0IGl0c2VsZiwgZXZlbiBpZiB0aGUgZXJyb3Igd2FzIGluIGEgZnVuY3Rpb24gb3IgaW4gYSBzb3VyY2VkIGZpbGUuCiAgbG9jYWwgX2xpbmU9JHtCQVNIX0xJTkVOT1skeyNCQVNIX0xJTkVOT1tAXX0gLSAyXX0gX3RleHQ9JycgX3dvcmRzCiAgaWYgKChfbGluZSA8PSBfc2V0dXBfYXQpKTsgdGhlbiBfbGluZT0ke19zZXR1cF9saW5lOi0wfTsgZmkKICBpZiAoKF9saW5lID4gX3NldHVwX2F0KSk7IHRoZW4gX3RleHQ9JChzZWQgLW4gIiRfbGluZXtzL14gKi8vO3B9IiAiJHtCQVNIX1NPVVJDRVskeyNCQVNIX1NPVVJDRVtAXX0gLSAxXX0iIDI+L2Rldi9udWxsKSB8fCB0cnVlOyBmaQogIF93b3Jkcz0ibGluZSAkKChfbGluZSAtIF9zZXR1cF9hdCkpIG9mIHNldHVwIGluIHRoZSBjbHVzdGVyIHByb2ZpbGUgZmFpbGVkIHdpdGggZXhpdCBjb2RlICQxOiAkX3RleHQiCiAgaWYgKChfbGluZSA8PSBfc2V0dXBfYXQpKTsgdGhlbiBfd29yZHM9InNldHVwIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUgZmFpbGVkIHdpdGggZXhpdCBjb2RlICQxIjsgZmkKICBpZiBbWyAtbiAkMiBdXTsgdGhlbiBfd29yZHMrPSIgKGl0IHByaW50ZWQ6ICQyKSI7IGZpCiAgaWYgW1sgJF90ZXh0ID1+IChefFteWzphbG51bTpdXy1dKShtb2R1bGV8bWwpW1s6c3BhY2U6XV0gXV0gJiYgISB0eXBlIG1vZHVsZSA+L2Rldi9udWxsIDI+JjE7IHRoZW4KICAgIF93b3Jkcys9Jzsgbm8gZmlsZSBpbiB0aGUgdXN1YWwgcGxhY2VzIGRlZmluZXMgbW9kdWxlOiBhZGQgYSBsaW5lIGJlZm9yZSB0aGlzIG9uZSB0aGF0IHNvdXJjZXMgdGhlIGZpbGUgd2hpY2ggZG9lcycKICBmaQogICIke0A6M30iICIkX3dvcmRzIgp9CgojIGBzZXR1cDpgIG9mIHRoZSBjbHVzdGVyIHByb2ZpbGUsIHVuY2hhbmdlZC4gQSBiYXRjaCBzY3JpcHQgbWF5IGhhdmUgcnVuIGl0IGJlZm9yZSBpdCBzdGFydGVkIHRoZSBjb250YWluZXIuCmlmIFtbIC16ICR7TEFVTkNIRVJfU0VUVVBfRE9ORTotfSBdXTsgdGhlbgogIHNldCArdQogIF9zZXR1cF9hdD0kTElORU5POyB0cmFwICcoKExJTkVOTyA+IF9zZXR1cF9hdCkpICYmIF9zZXR1cF9saW5lPSRMSU5FTk8nIERFQlVHOyB0cmFwICdzZXR1cF9mYWlsZWQgJD8gIiIgZGllJyBFUlIgRVhJVAogIHB5dGhvbjMgLWMgJ2ltcG9ydCBsYXVuY2hlcicgMj4vZGV2L251bGwgfHwgUElQX0JSRUFLX1NZU1RFTV9QQUNLQUdFUz0xIHB5dGhvbjMgLW0gcGlwIGluc3RhbGwgLS1xdWlldCAvd29ya3NwYWNlL3doZWVscy9ncHVfbGF1bmNoZXItKi53aGwKICB0cmFwIC0gRVJSIEVYSVQgREVCVUcKICBzZXQgLXUKZmkKCiMgRmluZCBsb3N0IEdQVXMgaGVyZSwgbm90IGluIHRoZSBmaXJzdCBjb2xsZWN0aXZlLiBJZiB0aGUgZHJpdmVyIGhhbmdzLCBldmVuIFNJR0tJTEwgbWF5IG5vdCBlbmQgbnZpZGlhLXNtaTogd2FpdCBvbmx5CiMgZm9yIGl0cyBhbnN3ZXIuIFdpdGhvdXQgcGVyc2lzdGVuY2UgbW9kZSwgdGhlIGRyaXZlciBtdXN0IGZpcnN0IHN0YXJ0LgpfcGF0aWVuY2U9NjAKaWYgW1sgLW4gJHtMQVVOQ0hFUl9PTkxZX0NIRUNLOi19IF1dOyB0aGVuIF9wYXRpZW5jZT0yMDsgZmkgIyB0aGUgc3VwZXJ2aXNvciB3YWl0cyBmb3IgYXQgbW9zdCAzMCBzCmlmIGNvbW1hbmQgLXYgbnZpZGlhLXNtaSA+L2Rldi9udWxsOyB0aGVuCiAgcmVhZCAtciAtdCAiJF9wYXRpZW5jZSIgX2dwdXMgPCA8KGV4ZWMgMj4vZGV2L251bGw7IG52aWRpYS1zbWkgLUwgfCBncmVwIC1jRSAnXihHUFV8ICBNSUcpJykgfHwKICAgIHVuZml0ICJudmlkaWEtc21pIGdpdmVzIG5vIGFuc3dlciB3aXRoaW4gJF9wYXRpZW5jZSBzIG9uICQoaG9zdG5hbWUpOiB0aGUgZHJpdmVyIG9mIGl0cyBHUFVzIGhhbmdzLiBMb29rIGF0IGRtZXNnIChYaWQpLCBhbmQgcmVzdGFydCB0aGUgbm9kZSBvciBsZWF2ZSBpdCBvdXQiCiAgKChfZ3B1cyA+PSA4KSkgfHwgdW5maXQgInRoaXMgbm9kZSBzaG93cyAkX2dwdXMgR1BVcywgdGhlIGpvYiBuZWVkcyAiOAplbGlmICEgY29tbWFuZCAtdiByb2NtLXNtaSA+L2Rldi9udWxsICYmICEgY29tcGdlbiAtRyAnL2Rldi9udmlkaWFbMC05XSonID4vZGV2L251bGw7IHRoZW4KICAjIE90aGVyd2lzZSB0aGUgam9iIHdvdWxkIHNpbGVudGx5IHRyYWluIG9uIHRoZSBDUFUuCiAgdW5maXQgIm5vIEdQVSBvbiB0aGlzIG5vZGU6IG5laXRoZXIgbnZpZGlhLXNtaSwgcm9jbS1zbWkgbm9yIC9kZXYvbnZpZGlhMCBpcyBoZXJlOyBHUFVzIHBlciBub2RlIG9mIHRoZSBqb2I6ICI4CmZpCgojIFJhaXNlIHRoZSBsaW1pdHMgb2Ygb3BlbiBmaWxlcyAoRGF0YUxvYWRlciB3b3JrZXJzIGFuZCBOQ0NMIG5lZWQgbWFueSkgYW5kIG9mIGxvY2tlZCBtZW1vcnkgYXMgZmFyIGFzIGFsbG93ZWQuCl9zb2Z0PSQodWxpbWl0IC1TIC1uKSBfaGFyZD0kKHVsaW1pdCAtSCAtbikKaWYgW1sgJF9oYXJkID09IHVubGltaXRlZCBdXSB8fCAoKF9oYXJkID4gMTA0ODU3NikpOyB0aGVuIF9oYXJkPTEwNDg1NzY7IGZpCmlmIFtbICRfc29mdCAhPSB1bmxpbWl0ZWQgXV0gJiYgKChfc29mdCA8IF9oYXJkKSk7IHRoZW4gdWxpbWl0IC1TIC1uICIkX2hhcmQiIHx8IHRydWU7IGZpCnVsaW1pdCAtUyAtbCAiJCh1bGltaXQgLUggLWwpIiAyPi9kZXYvbnVsbCB8fCB0cnVlCgoKIyBUaGUgY29tbWFuZCBvZiBldmVyeSByYW5rLiBsYXVuY2hlcidzIHdvcmtlciBmaWxscyBpbiBwbGFjZWhvbGRlcnMgc3VjaCBhcyB7bWljcm9fYmF0Y2hfc2l6ZX0gZm9yIGVhY2ggYXR0ZW1wdC4KX2FyZ3Y9KCdweXRob24zJyAnLW0nICdsYXVuY2hlci50cmFpbicpCgpjZCAnL3dvcmtzcGFjZS8ubGF1bmNoZXIvY29kZS9mYzU1ZWNlMjZkM2ZiOWIwOTU4ZCcgfHwgdW5maXQgJ3RoZSB3b3JraW5nIGRpcmVjdG9yeSBvZiB0aGUgam9iIGRvZXMgbm90IGV4aXN0IG9uIHRoaXMgbm9kZTogJycvd29ya3NwYWNlLy5sYXVuY2hlci9jb2RlL2ZjNTVlY2UyNmQzZmI5YjA5NThkJwoKIyBTZWNyZXRzOiB0aGUgc3VwZXJ2aXNvciBwYXNzZXMgdGhlIHZhbHVlczsgb3RoZXJ3aXNlIHRoZXkgYXJlIHJlYWQgZnJvbSB0aGUgc291cmNlIHRoYXQgdGhlIGpvYiBuYW1lcy4gVGhpcyBmaWxlIGRvZXMKIyBub3QgY29udGFpbiB0aGVtLgppZiBbWyAhIC12IExBVU5DSEVSX0VOVl9IRl9UT0tFTiBdXTsgdGhlbgogIGlmIFtbIC12IEhGX1RPS0VOIF1dOyB0aGVuIExBVU5DSEVSX0VOVl9IRl9UT0tFTj0kSEZfVE9LRU47IGZpCmZpCltbIC12IExBVU5DSEVSX0VOVl9IRl9UT0tFTiBdXSB8fCBkaWUgJ3NlY3JldCAnJ0hGX1RPS0VOJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IExBVU5DSEVSX0VOVl9IRl9UT0tFTgppZiBbWyAhIC12IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZIF1dOyB0aGVuCiAgaWYgW1sgLXYgV0FOREJfQVBJX0tFWSBdXTsgdGhlbiBMQVVOQ0hFUl9FTlZfV0FOREJfQVBJX0tFWT0kV0FOREJfQVBJX0tFWTsgZmkKZmkKW1sgLXYgTEFVTkNIRVJfRU5WX1dBTkRCX0FQSV9LRVkgXV0gfHwgZGllICdzZWNyZXQgJydXQU5EQl9BUElfS0VZJycgaGFzIG5vIHZhbHVlIG9uIHRoaXMgbm9kZScKZXhwb3J0IExBVU5DSEVSX0VOVl9XQU5EQl9BUElfS0VZCgppZiBbWyAteiAke1BZVE9SQ0hfQ1VEQV9BTExPQ19DT05GOi19JHtQWVRPUkNIX0FMTE9DX0NPTkY6LX0gXV07IHRoZW4KICBleHBvcnQgUFlUT1JDSF9DVURBX0FMTE9DX0NPTkY9J2V4cGFuZGFibGVfc2VnbWVudHM6VHJ1ZScKZmkKCiMgQ2hlY2sgdGhpcyBub2RlIGluIHRoZSBlbnZpcm9ubWVudCBvZiB0aGUgcmFua3MsIGlmIHRoZSBwcm9maWxlIGhhcyBgY2hlY2tzOiBkb2N0b3JgLCBvciBpZiB0aGUgc3VwZXJ2aXNvciBhc2tzIGZvciBpdAojIGFmdGVyIGFuIGF0dGVtcHQgdGhhdCBtYXkgaGF2ZSBmYWlsZWQgYmVjYXVzZSBvZiB0aGUgY2x1c3Rlci4KX2NoZWNrcz0KaWYgW1sgLW4gJF9jaGVja3Mke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV07IHRoZW4KICBfc2FpZD0kKCIkX3B5dGhvbiIgLW0gbGF1bmNoZXIuZG9jdG9yKSAmJiBfcmM9MCB8fCBfcmM9JD8KICBpZiAoKF9yYyA9PSAzKSk7IHRoZW4KICAgIHVuZml0ICJub2RlICR7TEFVTkNIRVJfTk9ERV9SQU5LOi0wfSAoJChob3N0bmFtZSkpIGZhaWxzIHRoZSBkb2N0b3IncyBjaGVja3M6ICRfc2FpZCIKICBlbGlmICgoX3JjKSk7IHRoZW4KICAgIGVjaG8gImxhdW5jaGVyOiB0aGUgZG9jdG9yJ3MgY2hlY2tzIGVuZGVkIHdpdGggZXhpdCBjb2RlICRfcmM6IGNvbnRpbnVpbmcgd2l0aG91dCB0aGVtIiA+JjIKICBmaQpmaQppZiBbWyAtbiAke0xBVU5DSEVSX09OTFlfQ0hFQ0s6LX0gXV07IHRoZW4gZXhpdCAwOyBmaQoKIyBPbmUgaG9zdCwgd2l0aG91dCB0b3JjaHJ1bjogZWFjaCByYW5rIGdldHMgdGhlIHZhcmlhYmxlcyB0aGF0IHRvcmNocnVuIHdvdWxkIHNldCwgc3VjaCBhcyBSQU5LIGFuZCBXT1JMRF9TSVpFLgpleGVjICIkX3B5dGhvbiIgLW0gbGF1bmNoZXIuc3VwZXJ2aXNlLmxvY2FsX3JhbmtzIDggLS0gIiR7X2FyZ3ZbQF19Igo= || return 1
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
  event twin '"pod": '"$(json "$_me")"', "handle": '"$(json 'runpod:runpod-8xh100:'"$_owner")"
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
