"""The POSIX shell of one round trip: write local changes of run directories, run a script, fetch changes."""

from __future__ import annotations

import posixpath
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote

from launcher.rundir.file_table import COPIED_NAMES, GROWING, LOG_FOLDERS, NOT_COPIED_FOLDERS
from launcher.schedulers.over_ssh.rsh import unpack
from launcher.schedulers.wanted_files import Wanted

PART = 4 * 2**20
"Maximum bytes that one round trip fetches. More data takes further round trips."
LARGEST_LOG = 2**30
LARGEST_RECORD = 4 * 2**20
"Maximum bytes of a file that is replaced whole."
UNSEEN = "new"
"Stands for the inode of a file that was sent and not yet seen on the host."

_NEWER = "newer"
"Why changes are refused: the host has changed one of the files, too."
_FOLDERS = (*NOT_COPIED_FOLDERS, ".*")
_GROWS = "|".join(suffix[1:] for suffix in GROWING)
_FORMAT = "%i %s %T@"


@dataclass(frozen=True)
class SyncedFile:
    """A file that is equal on both sides: inode, bytes and time on the host, time of the local copy (ns)."""

    inode: str
    size: int
    time: str
    local_time: int

    @property
    def fingerprint(self) -> str:
        return f"{self.inode} {self.size} {self.time}"


@dataclass
class Changes:
    """What was written locally since the last round trip. Paths begin with the run's id."""

    new: list[str] = field(default_factory=list)
    "Runs that the host does not have. Each appears there whole or not at all."
    grown: dict[str, int] = field(default_factory=dict)
    "Path -> size up to which both sides are equal."
    written: dict[str, SyncedFile | None] = field(default_factory=dict)
    "Path -> the version that it replaces on the host."
    removed: dict[str, SyncedFile] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.new or self.grown or self.written or self.removed)


@dataclass(frozen=True)
class Piece:
    """A change of one file. `kind`: same (as sent), end (from `offset` on), whole, gone, folder."""

    kind: str
    inode: str
    size: int
    time: str
    offset: int
    path: str
    data: bytes


@dataclass
class RoundTrip:
    """The result of a round trip."""

    answer: subprocess.CompletedProcess[bytes]
    pieces: list[Piece]
    lost: set[str]
    "Runs that do not exist on the host."
    refused: str | None = None
    "Why the local changes could not be written. In this case, nothing else was done."
    changed_there: bool = False
    "Whether the reason is that the host has changed one of the files, too."
    more: bool = False
    "Whether there is more to fetch than fits in one round trip."


class IncompleteAnswerError(Exception):
    """The answer is incomplete."""


def shell_text(
    mark: str,
    root: str,
    first: str,
    changes: Changes,
    parcel: int,
    script: str,
    runs: Sequence[str],
    synced: Mapping[str, SyncedFile],
    wanted: Wanted,
    strict: bool,
) -> str:
    """Return the shell of one round trip.

    `first` must succeed before anything else is done. stdin holds a tar of `parcel` bytes, then the input of
    `script`.
    """
    lines = [
        f"m={mark} had=",
        'refuse() { printf "%s refused %s\\n" $m "${1-}"; rm -rf ".in-$m"; exit 74; }',
        *([f"{{ {first}\n}} >&2 || refuse"] if first else []),
        *(_write_changes(root, changes, parcel, strict) if changes else [f"cd {quote(root)} 2>/dev/null"]),
        "printf '%s began\\n' $m",
        f"(\n{script}\n)",
        "printf '%s code %s\\n' $m $?",
        *_fetch_changes(mark, root, runs, synced, wanted),
        "printf '%s end\\n' $m",
    ]
    return "\n".join(lines) + "\n"


def _write_changes(root: str, changes: Changes, parcel: int, strict: bool) -> list[str]:
    """Return shell that writes the local changes, but replaces no file that has changed on the host.

    If `strict`, such a file stops the whole round trip.
    """
    lines = [
        f'mkdir -p {quote(root)} && cd {quote(root)} && mkdir ".in-$m" || refuse',
        unpack(parcel, '".in-$m"') + " || refuse",
        f"seen() {{ find \"$1\" -maxdepth 0 -printf '{_FORMAT}' 2>/dev/null; }}",
        'place() { mv ".in-$m/$1" "$1" || refuse; }',
        f'append() {{ LC_ALL=C awk \'{_NOT_THERE}\' part=1 "./$1" part=2 ".in-$m/$1" >>"./$1" || refuse; }}',
    ]
    for run in map(quote, changes.new):
        # The run exists already if only the last answer was lost.
        lines.append(f'if [ -d {run} ]; then had="$had {run} "; else place {run}; fi')
    for path, synced in changes.written.items():
        file, folder = quote(path), quote(posixpath.dirname(path))
        if synced is None:
            lines.append(f"[ -e {file} ] || {{ mkdir -p {folder} || refuse; place {file}; }}")
        else:
            newer = f'{{ echo "the host has changed this file, too:" {file} >&2; refuse {_NEWER}; }}'
            otherwise = newer if strict else ":"
            lines.append(
                f'if [ "$(seen {file})" = {quote(synced.fingerprint)} ]; then place {file}; '
                f"else {otherwise}; fi"
            )
    for path, synced in changes.removed.items():
        lines.append(
            f'[ "$(seen {quote(path)})" != {quote(synced.fingerprint)} ] || rm -f {quote(path)} || refuse'
        )
    # Last, because appending cannot be undone. Lines are there already if only the last answer was lost.
    lines += [f"append {quote(path)}" for path in changes.grown]
    return [*lines, 'rm -rf ".in-$m"']


_NOT_THERE = "part == 1 { there[$0]; next } !($0 in there)"
"awk that prints the lines of its second file that are not in its first."

_PICK = r"""
function say(kind, offset, count) {
  printf "%s %s %.0f %s %.0f %.0f %s\n", kind, $1, bytes, $3, offset, count, path
}
{ path = substr($0, length($1 $2 $3) + 4); bytes = $2 + 0 }
part == 1 && index(had, " " substr(path, 1, index(path, "/") - 1) " ") { next }
part == 1 { inode[path] = $1; size[path] = bytes; time[path] = $3; next }
{
  seen[path] = 1
  grows = path ~ "[.](" growing ")$"
  sent = inode[path] == "new"
  if (sent && bytes == size[path]) { say("same", 0, 0); next }
  if (inode[path] == $1 && bytes == size[path] && (grows || time[path] == $3)) next
  if (bytes > (grows ? log_limit : record_limit)) next
  offset = grows && (sent || inode[path] == $1) && bytes > size[path] ? size[path] : 0
  count = bytes - offset
  if (count > left) { more = 1; if (!grows || left <= 0) next; count = left }
  left -= count
  say(grows ? "end" : "whole", offset, count)
}
END {
  if (rest) for (p in inode) if (!(p in seen) && p !~ /^[^\/]*\/state\.json$/) print "gone - 0 - 0 0 " p
  if (more) print "more - 0 - 0 0 -"
}
"""


_LOOK = r"""
if ! cd "$root" 2>/dev/null; then
  for r; do printf '%s lost %s\n' $m "$r"; done
  set --
fi
for r; do
  [ -d "$r" ] || printf '%s lost %s\n' $m "$r"
  for d in "$r"/checkpoints/step-*; do
    [ ! -d "$d" ] || printf '%s piece folder - 0 - 0 0 %s\n' $m "$d"
  done
done
t=$(mktemp) || exit 70
trap 'rm -f "$t"' EXIT
"""

# Processes per file would dominate the time for a thousand runs. perl, if installed, needs none.
_SEND = r"""
send() {
  if command -v perl >/dev/null; then
    perl -e '
      my $m = shift; binmode STDOUT;
      while (my $line = <STDIN>) {
        print "$m piece $line"; chomp $line;
        my (undef, undef, undef, undef, $offset, $count, $path) = split / /, $line, 7;
        next if !$count || !open(my $file, "<", $path);
        binmode $file; seek $file, $offset, 0;
        while ($count > 0 && (my $read = read $file, my $block, $count < 65536 ? $count : 65536)) {
          print $block; $count -= $read;
        }
      }' $m
    return
  fi
  while read -r kind inode size time offset count path; do
    printf '%s piece %s %s %s %s %s %s %s\n' $m $kind $inode $size $time $offset $count "$path"
    [ "$count" = 0 ] ||
      dd if="$path" iflag=skip_bytes,count_bytes skip="$offset" count="$count" bs=64K 2>/dev/null
  done
}
"""


def _fetch_changes(
    mark: str, root: str, runs: Sequence[str], synced: Mapping[str, SyncedFile], wanted: Wanted
) -> list[str]:
    """Return shell that fetches the runs' changes.

    state.json comes first: if it reports the end of the run, all files read later are final.
    """
    if not runs:
        return []
    table = (
        f"{file.fingerprint} {path}" for path, file in synced.items() if wanted.covers(path.partition("/")[2])
    )
    pruned = " -o ".join(f"-name '{name}'" for name in (*_FOLDERS, *(() if wanted.logs else LOG_FOLDERS)))
    names = " -o ".join(f"-name '{name}'" for name in COPIED_NAMES)
    limits = f"-v left={PART} -v log_limit={LARGEST_LOG} -v record_limit={LARGEST_RECORD}"
    limits += f" -v growing='{_GROWS}'"
    return [
        f"root={quote(root)}",
        f"set -- {' '.join(map(quote, runs))}",
        _LOOK,
        f"cat >\"$t\" <<'{mark}'",
        *table,
        mark,
        f'pick() {{ LC_ALL=C awk {limits} -v had="$had" -v rest=$1 \'{_PICK}\' part=1 "$t" part=2 -; }}',
        _SEND,
        "if [ $# != 0 ]; then",
        f"find \"$@\" -maxdepth 1 -name state.json -printf '{_FORMAT} %p\\n' 2>/dev/null | pick 0 | send",
        f'find "$@" -mindepth 1 -type d \\( {pruned} \\) -prune -o -type f \\',
        f"  ! -name '.*' ! -name state.json \\( {names} \\) {wanted.condition} \\",
        f"  -printf '{_FORMAT} %p\\n' 2>/dev/null | pick 1 | send",
        "fi",
    ]


def parse(done: subprocess.CompletedProcess[bytes], mark: str) -> RoundTrip:
    """Parse the answer of a round trip. Raises IncompleteAnswerError."""
    result = RoundTrip(subprocess.CompletedProcess(done.args, 70, b"", done.stderr), [], set())
    ended = False
    for chunk in done.stdout.split(mark.encode() + b" ")[1:]:
        head, _, data = chunk.partition(b"\n")
        word, _, value = head.decode(errors="surrogateescape").partition(" ")
        if word == "refused":
            result.refused, result.changed_there = _last_line(done.stderr), value == _NEWER
            return result
        if word == "began":
            result.answer.stdout = data
        elif word == "code":
            result.answer.returncode = int(value)
        elif word == "lost":
            result.lost.add(value)
        elif word == "end":
            ended = True
        elif word == "piece":
            kind, inode, size, time, offset, _, path = value.split(" ", 6)
            if kind == "more":
                result.more = True
            else:
                result.pieces.append(Piece(kind, inode, int(size), time, int(offset), path, data))
    if not ended:
        raise IncompleteAnswerError(_last_line(done.stderr))
    return result


def _last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if not line.startswith("tar: Exiting with failure status")]
    return errors[-1] if errors else "the answer is incomplete"
