"""Collect the decisive lines of a program's output as they arrive, in bounded memory.

A line is compared with the patterns only once per shape. The shape is the line without its digits: a training
prints few shapes, millions of times. That costs 0.15 microseconds per line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from launcher.diagnosis.clue import MEMORY_OF, Clue, Kind, Strength, order_of
from launcher.diagnosis.lines import Line, normalise, printable, rank_at_end
from launcher.diagnosis.literals import needed
from launcher.diagnosis.patterns import PATTERNS, UNLESS, Pattern
from launcher.diagnosis.users_patterns import UserPattern

MAX_TEXT, MAX_END = 1000, 200
"""Maximum characters of a clue's text, and how many of them are from its end, which has the exit code of a
command."""
MAX_CONTEXT = 200
"Maximum characters of each line around a clue."
BEFORE, AFTER = 3, 8
"Number of lines kept around a clue."
MAX_FRAMES = 1000
"Maximum lines of a traceback before its exception. After that the exception is no longer expected."
MAX_HOSTS = 10_000
"Maximum number of hosts whose names are removed from their lines."
MAX_SHAPES = 10_000
"Maximum number of remembered shapes. When it is reached, all are forgotten."

_DIGITS = b"0123456789"
_NUMBERED = re.compile(rb"code|status|rror|ignal|Xid|XID|exit|after|SIG|loss scale")
"In lines with these words the number matters, so their shapes are not remembered."
_SOURCE = re.compile(
    r"\s*(?:except\b|raise\b|import\b|from\b.*\bimport\b|(?:el)?if\b.*:$|return\b|assert\b|def\b|class\b.*:$|"
    r"#|//|[*-] |\w+ = |[*-]\s*[\w.]+$|"
    r"(?!(?:message|msg|err(?:or)?|reason|details?)\b)[a-z]\w*: [\[{'\"])"
)
"Beginnings of lines of source code, of a configuration or of a list."
_HEAD = "Traceback (most recent call last)"
_HOST = re.compile(
    r"(?![\w.]*(?:Error|Exception|Interrupt|Exit): )"  # frames in an exception's message
    r'([\w.-]{1,60}): (?:\[[^\[\]]{1,20}\]: ?)?(?=  File "[^"]*", line \d)'
)
"A word before a frame of a traceback: the name of a host, which pdsh prints before each of its lines."
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|error|timeout|gaierror|herror)(?:\([\w.]+\))?(?:: .*|:?$)"
)
NAMED = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit)(?:\(\w+\))?"
    r"(?::(?! [\d.e+-]+$)(?: .*|$)|$)"
)
_ENDS = re.compile(rf"(?:{NAMED.pattern})\Z|what\(\): ")
"Indented lines that end an open traceback, or that another rank's C++ runtime writes into it."
_NETWORK: frozenset[Kind] = frozenset({"nccl-timeout", "rendezvous-failed"})
_CHECKED: frozenset[Kind] = frozenset({"numerical", "desync"})
"What a program finds by its own checks. It may then end itself with an exception of _CHECK."
_OTHER_NETWORK = re.compile(
    r"(?:requests|urllib3?|http\w*|aiohttp|huggingface_hub|wandb|boto\w*|google|openai|redis|grpc|ssl)\.|"
    r"(?:\w+\.)*(?:HTTPError|URLError|ConnectionError|ConnectTimeout|ReadTimeout|MaxRetryError|NewConnectionError|"
    r"LocalEntryNotFoundError|CommError|ServerDisconnectedError)\b"
)
"Exceptions of the program's own connections, as opposed to the network between ranks."
_CHAINED = re.compile(r"another exception occurred:|direct cause of the following exception:")
_NOISE = re.compile(
    r"Exception ignored|Error in atexit|Error in sys\.excepthook|--- Logging error ---|never retrieved|"
    r"Could not load bitsandbytes native library|Jax plugin configuration error"
)
"The traceback after such a line does not show why the program ended."
_TASK_FAILED = re.compile(r"srun: error: \S+: tasks? \S+: (?:Exited with exit code|Segmentation|Aborted)")
"srun's report of a task that failed. After it, somebody may cancel the rest of the job."
_THREAD = re.compile(r"Exception in thread")
_RERAISED = re.compile(r"\bCaught (\w+) in (?:DataLoader worker|replica|pin memory thread)\b")
"Torch's exception that re-raises one of a worker or thread. Its `Original Traceback` follows."
_RETRIED = re.compile(
    r"(?i)\b(?:re-?trying with|retrying batch|trying again|(?:re-?)?try(?:ing)? (?:again )?with|going on\b|"
    r"halving|trying (?:a )?(?:smaller |lower )?batch|skipping (?:this |the )?batch|fall(?:ing)? back|"
    r"next batch size|does(?: not|n't) fit\b|"
    r"(?:reduc|decreas|lower)ing (?:the )?(?:micro-?)?batch|batch size \d+ (?:failed|succeeded))"
)
"Words of a program that continues after a failure."
_FRAME = re.compile(r'\s*(?:File "([^"]*)", line \d+, in (\S+)|(\S+\.py):\d+(?: in (\S+))?$)')
"A frame of a traceback: its file and function, as Python prints them or as a box of Rich shows them."
_OUTERMOST = frozenset({"<module>", "_run_module_as_main", "_bootstrap", "_bootstrap_inner", "_wrap"})
"Functions of a traceback's first frame if nothing in the program could catch the exception."
_SHARED = re.compile(r"(?:multiprocessing|loky/backend)/(?:synchronize|queues|shared_memory)\.py$")
"Python's files that make semaphores and shared memory. Both exist only in /dev/shm."
_RENDEZVOUS = re.compile(r"torch/distributed/(?:elastic/)?rendezvous(?:/\w+)?\.py$")
"Torch's files in which the ranks meet at the start."
_PRINTING = re.compile(rb"\bprint\(|\bsys\.std|(?:\blogging/__init__|\btqdm/\w+)\.py")
"Source code and files of frames that print."
_OWN_FAULT = re.compile(
    r"(?:Key|Index|Type|Value|Attribute|Name|UnboundLocal|Import|ModuleNotFound|FileNotFound|Permission|"
    r"IsADirectory|NotADirectory|FileExists|ZeroDivision|Assertion|NotImplemented|UnicodeDecode|Recursion|"
    r"Syntax|Indentation)Error\b"
)
"Exceptions that show an error of the program itself, never an earlier failure of something else."
_MISSING = re.compile(r"(?:UnboundLocal|Name)Error\b|\w+Error: .*\bNoneType\b")
"Exceptions that show a missing value. Directly after a failure that was caught, they follow from it."
_CHECK = re.compile(r"(?:Assertion|Value|ZeroDivision)Error\b")
_BAR = re.compile(r"\d%\||\bit/s|s/it\b")
"A progress bar. It is printed to stderr, which is not buffered."
_FATAL = ("what():", "terminate called")
"C++ messages about an exception that ends the process. Steps printed after them are another rank's."
_USAGE = "usage: "
"The line that argparse prints before the one that says which argument is wrong."
_COUNTER = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?|epoch|batch|update)s?\b['\"\s:=#\[(/]{0,12}(\d+(?:\.\d+)?)|"
    r"\b(\d+)/\d+ \[|(\d+)it \["
)
_OTHER_COUNTER = re.compile(r"(?i)\b(?:writ|sav|load|download|upload|shard|checkpoint|merg|convert|token)")
_DONE = re.compile(
    r"(?i)\b(?:step|iteration|epoch) \d+ (?:is )?(?:done|finished|complete)\b(?! with)|"
    r"\b(?:batch(?: size)?|bs|micro-?batch)\D{0,3}\d+\b.{0,12}\b(?:ok|fits|succeeded|works|passed)\b|"
    r"^\W*fits \d+"
)
"Words of a program that has finished something after a failure."
_MEASURE = re.compile(
    r"(?i)\b(?:loss|acc\w*|ppl|lr|reward|tok\w*/s|samples/s|throughput|ms/step)\b|it/s|s/it"
)


def shortened(text: str) -> str:
    """Return at most MAX_TEXT characters of a text, without its middle if it is longer."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - MAX_END - 3]}...{text[-MAX_END:]}"


class _Row:
    """A pattern that is compiled on first use."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.words = needed(pattern.expression)
        self._expression: re.Pattern[str] | None = None
        self._unless: list[re.Pattern[str]] = []

    def matches(self, text: str) -> bool:
        if self._expression is None:  # few of the rows are ever used
            self._expression = re.compile(self.pattern.expression)
            unless = (self.pattern.unless, UNLESS.get(self.pattern.kind, ""))
            self._unless = [re.compile(expression) for expression in unless if expression]
        if self._expression.search(text) is None:
            return False
        return not any(expression.search(text) for expression in self._unless)


@cache
def _rows() -> tuple[_Row, ...]:
    return tuple(map(_Row, sorted(PATTERNS, key=lambda pattern: pattern.weak)))


@cache
def _rows_by_part() -> tuple[dict[str, list[tuple[str, int]]], list[int]]:
    """Return the words with their rows, by three characters of each word, and the rows that need no word."""
    rows, by_part = _rows(), dict[str, list[tuple[str, int]]]()
    words = [(word, number) for number, row in enumerate(rows) for word in row.words]
    often = Counter(part for word, _ in words for part in _parts(word))
    for word, number in words:
        rarest = min(sorted(_parts(word)), key=often.__getitem__)
        by_part.setdefault(rarest, []).append((word, number))
    return by_part, [number for number, row in enumerate(rows) if not row.words]


def _parts(text: str) -> set[str]:
    """Every three characters that follow each other."""
    return {text[start : start + 3] for start in range(len(text) - 2)}


@lru_cache(maxsize=16)  # a line is looked at again before the next one
def pattern_of(text: str) -> Pattern | None:
    """Return the first pattern of the table that matches a line without its prefixes.

    Lines of source code and of lists of hints never match, because they say nothing about this run.
    """
    if _SOURCE.match(text):
        return None
    low, rows = text.lower(), _rows()
    by_part, always = _rows_by_part()  # to search for each of 900 words takes five times as long
    found = {number for part in by_part.keys() & _parts(low) for word, number in by_part[part] if word in low}
    for number in sorted(found.union(always)):
        if rows[number].matches(text):
            return rows[number].pattern
    return None


class _Reader:
    """The state of parsing the lines of one rank in one stream."""

    def __init__(self) -> None:
        self.frames = 0
        "Lines since the head of a traceback whose exception has not come yet; 0 if none is open."
        self.noise = ""
        "`beside` if that traceback does not show why the program ended; `thread` if it is of a thread."
        self.outermost = ""
        "The function of that traceback's first frame."
        self.innermost = ""
        "The file of that traceback's latest frame."
        self.chained = False
        "Whether the exception of that traceback results from the one before it."
        self.above: Sequence[bytes] = ()
        "The lines above that traceback."
        self.wrapper: Clue | None = None
        "Torch's exception that re-raises the one of that traceback."
        self.progress = 0
        "Line where the program's counter last increased after a failure; 0 if it has not since."
        self.growing: Clue | None = None
        "The latest clue, while the lines after it are still collected."


_EMPTY = hash(b"")


class Collector:
    """Collects the first and the last clue of each kind in a program's output.

        collector = Collector()
        collector.feed("err", b"RuntimeError: CUDA out of memory. Tried to ...\\n", 17, time.time())
        collector.clues()

    `extra` holds the patterns of the job and the cluster profile with their kinds. They precede the table.
    """

    def __init__(self, extra: Sequence[tuple[str, Kind]] = ()) -> None:
        self._extra = [UserPattern(expression, kind) for expression, kind in extra]
        self._clues: dict[tuple[Kind, Strength], list[Clue]] = {}
        self._readers: dict[tuple[str, str], _Reader] = {}
        self._busy: set[str] = set()
        "Streams with an open traceback, or with a clue whose following lines are still collected."
        self._tail: dict[str, list[bytes]] = {}
        self._hosts: set[str] = set()
        "Names of hosts that were seen before a frame of a traceback."
        self._harmless = {_EMPTY}
        "Hashes of the shapes that matched nothing."
        self._usual = b"\n"
        "The latest of these shapes, with its newline."
        self._counters: dict[str, float] | None = None
        """The program's own counters since the latest clue, by the text before them; None while they are not
        watched."""
        self._own_ends: dict[str, Clue] = {}
        "Label of a rank -> the rank's own exception that ended it, if known."

    def feed(self, stream: str, lines: bytes, first: int, time: float = 0.0) -> None:
        """Read complete lines, each ending in a newline.

        `first` is the number of the first one in its file.
        """
        tail = self._tail.get(stream, [])
        watched = stream in self._busy or self._counters is not None
        bare = lines.translate(None, _DIGITS)
        # Most chunks repeat one shape. Removing it leaves nothing, at a third of the cost of a split.
        shapes = bare[:-1].split(b"\n") if watched or bare.replace(self._usual, b"") else []
        own_may_match = any(pattern.may_match(lines) for pattern in self._extra)
        hashes = [hash(shape) for shape in shapes]
        if own_may_match and not shapes:
            hashes = [hash(shape) for shape in bare[:-1].split(b"\n")]
        if watched or own_may_match or not self._harmless.issuperset(hashes):
            all_lines = [*tail, *lines[:-1].split(b"\n")]
            for number, shape in enumerate(hashes, len(tail)):
                if (
                    own_may_match
                    or stream in self._busy
                    or self._counters is not None
                    or shape not in self._harmless
                ):
                    self._read(stream, all_lines, number, shape, first + number - len(tail), time)
            self._tail[stream] = all_lines[-BEFORE:]
        else:
            self._usual = shapes[-1] + b"\n" if shapes else self._usual
            self._tail[stream] = [*tail, *lines[:-1].rsplit(b"\n", BEFORE)[-BEFORE:]][-BEFORE:]

    @property
    def given_up(self) -> list[str]:
        """The job's own patterns that took too long and are no longer searched for."""
        return [pattern.expression for pattern in self._extra if pattern.given_up]

    def clues(self) -> list[Clue]:
        """Return the clues; those that explain most come first."""
        kept = {(clue.stream, clue.line, clue.kind): clue for clues in self._clues.values() for clue in clues}
        told = {
            (clue.stream, clue.label)
            for clue in self._clues.get(("user-error", "words"), ())
            if not clue.text.startswith(_USAGE)
        }
        return sorted(
            (
                clue
                for clue in kept.values()
                if not clue.text.startswith(_USAGE) or (clue.stream, clue.label) not in told
            ),
            key=lambda clue: (order_of(clue.kind), clue.time, clue.line),
        )

    def _read(
        self, stream: str, lines: Sequence[bytes], index: int, shape: int, number: int, time: float
    ) -> None:
        line = self._without_host(stream, normalise(lines[index]))
        reader = self._readers.setdefault((stream, line.label), _Reader())
        if self._counters is not None and self._advanced(line.text):
            self._survive(reader, line, number, buffered=not stream)
        before = lines[max(0, index - BEFORE) : index]
        start, head, _ = line.text.partition(_HEAD)
        if head:
            start, label = rank_at_end(start)
            raw = start.encode()
            result = self._kind_of(reader, line._replace(text=start), raw, hash(raw), before)
            if result is not None and start.strip(" +|"):
                clue = Clue(
                    result[0], shortened(start.strip()), stream, number, time, result[1],
                    own=self._is_own(result[0], start.strip()), label=line.label,
                )  # fmt: skip
                self._keep(reader, clue)
            above = reader.growing if start.strip(" +|") == "Original" else None
            if label:  # the lines of the traceback have it too
                reader = self._readers.setdefault((stream, line.label + label), _Reader())
            self._open_traceback(reader, before)
            reader.wrapper = above if above is not None and _RERAISED.search(above.text) else None
        elif reader.frames and (frame := _FRAME.match(line.text)):  # a collector may remove its indentation
            reader.innermost = frame[1] or frame[3] or ""
            reader.outermost = reader.outermost or frame[2] or frame[4] or "?"
            reader.frames = (reader.frames + 1) % MAX_FRAMES
        elif not reader.frames or line.text[:1] not in ("", " ", "\t") or _ENDS.match(line.text.strip()):
            open_before = bool(reader.frames)
            result = self._kind_of(reader, line, lines[index], shape, before)
            plain = result is None and not reader.frames  # else a frame's code, whose indentation was taken
            if reader.growing is not None and (plain or _RETRIED.search(line.text)):
                self._add_line(reader, line)
            if result is not None:
                # The lines that explain it, such as the output of a program that failed, precede the
                # traceback.
                follows = open_before and result[0] == "consequence"
                around = (reader.above if follows else ()) or before
                context = tuple(printable(raw_line)[:MAX_CONTEXT] for raw_line in around)
                clue = Clue(
                    result[0], shortened(line.text.strip()), stream, number, time, result[1],
                    uncaught=open_before and not reader.frames and self._ends_process(reader),
                    own=self._is_own(result[0], line.text.strip()),
                    label=line.label, before=context,
                )  # fmt: skip
                if open_before and not reader.frames and reader.wrapper is not None:
                    clue = self._without_wrapper(clue, reader.wrapper)
                self._keep(reader, clue)
        elif reader.frames < MAX_FRAMES:  # a frame shows source code, which says nothing about this run
            reader.frames += 1
        else:
            reader.frames = 0
        if any(other.frames or other.growing for (name, _), other in self._readers.items() if name == stream):
            self._busy.add(stream)
        else:
            self._busy.discard(stream)

    def _without_host(self, stream: str, line: Line) -> Line:
        """Return the line with the host name at its start, if any, moved into its label."""
        name, colon, rest = line.text.partition(": ")
        new = name not in self._hosts and len(self._hosts) < MAX_HOSTS and _HOST.match(line.text) is not None
        if new:
            self._hosts.add(name)
        if not colon or name not in self._hosts:
            return line
        inner = normalise(rest)
        label = f"{line.label}{name}:{inner.label}"
        if new and (stream, line.label) in self._readers:  # this reader has read the head of the traceback
            self._readers[stream, label] = self._readers.pop((stream, line.label))
        return inner._replace(label=label)

    def _open_traceback(self, reader: _Reader, above: Sequence[bytes]) -> None:
        texts = [normalise(raw_line).text for raw_line in above]
        chained = any(_CHAINED.search(text) for text in texts)
        if any(_NOISE.search(text) for text in texts):
            reader.noise = "beside"
        elif any(_THREAD.search(text) for text in texts):
            reader.noise = "thread"
        elif not chained:
            reader.noise = ""
        reader.frames = 1
        reader.outermost, reader.innermost, reader.chained, reader.above = "", "", chained, above

    @staticmethod
    def _ends_process(reader: _Reader) -> bool:
        """Whether the exception of the traceback that was just read ends its process."""
        return reader.outermost in _OUTERMOST and not reader.noise

    def _is_own(self, kind: Kind, text: str) -> bool:
        """Return whether a pattern of the job or the profile gave the line its kind."""
        return any(own.kind == kind and own.matches(text) for own in self._extra)

    def _kind_of(
        self, reader: _Reader, line: Line, raw: bytes, shape: int, before: Sequence[bytes]
    ) -> tuple[Kind, Strength] | None:
        """Return what the line shows, and how reliably."""
        text = line.text.strip()
        raised = bool(reader.frames) and _EXCEPTION.fullmatch(text) is not None
        named = raised or NAMED.fullmatch(text) is not None
        if raised:
            reader.frames = 0
        for user_pattern in self._extra:
            if user_pattern.matches(text):
                return user_pattern.kind, "words"
        if not named and shape in self._harmless:
            return None
        pattern = pattern_of(text)
        if named:
            kind, strength = _kind_of_exception(text, line, pattern, reader.noise if raised else None)
            return _kind_in(reader.innermost, before, kind, text) if raised else kind, strength
        if pattern is None or pattern.weak:
            pattern = _wrapped(text, before) or pattern
        if pattern is not None:
            if pattern.record:
                return pattern.kind, "record"
            mild = pattern.weak or _mild(line, pattern.kind) or _RETRIED.search(text) is not None
            return pattern.kind, "weak" if mild else "words"
        if line.severe and not line.text[:1].isspace() and _SOURCE.match(text) is None:
            return "user-error", "weak"
        self._learn_harmless(raw, shape)
        return None

    def _learn_harmless(self, raw: bytes, shape: int) -> None:
        """Remember that lines of this shape match nothing."""
        if len(self._harmless) >= MAX_SHAPES:
            self._harmless = {_EMPTY}
        if not _NUMBERED.search(raw):
            self._harmless.add(shape)

    def _keep(self, reader: _Reader, clue: Clue) -> None:
        failed = reader.growing
        if (
            failed is not None
            and failed.kind in MEMORY_OF
            and len(failed.after) < 3
            and _MISSING.match(clue.text)
            and not clue.own
        ):
            clue = clue._replace(kind="consequence")
        if (clue.kind, clue.strength) == ("cancelled", "record") and self._a_task_failed():
            clue = clue._replace(strength="weak")  # who cancels a job that has failed did not end it
        if clue.kind != "consequence" and clue.kind not in _NETWORK and clue.strength == "words":
            self._mark_survived(reader, clue)
        end = self._own_ends.get(clue.label)
        if end is not None and clue.stream and _only_printed(clue, end):
            clue = clue._replace(survived=True)  # held back in a buffer until the program had ended
        clues = self._clues.setdefault((clue.kind, clue.strength), [])
        if len(clues) >= 2 or (clues and clues[0].survived):
            clues.pop()
        clues.append(clue)
        reader.growing = clue
        if clue.kind != "consequence":
            self._counters = self._counters or {}
            self._advanced(clue.text)  # a progress bar may be on the same line

    def _a_task_failed(self) -> bool:
        """Whether srun has reported a task that failed."""
        return any(_TASK_FAILED.match(clue.text) for clue in self._clues.get(("consequence", "words"), ()))

    def _without_wrapper(self, clue: Clue, wrapper: Clue) -> Clue:
        """Forget `wrapper` if it re-raises this exception, and return the clue with its effect."""
        caught = _RERAISED.search(wrapper.text)
        if caught is None or re.match(rf"(?:\w+\.)*{caught[1]}\b", clue.text) is None:
            return clue  # another rank's, or torchrun's: the output was cut
        for clues in self._clues.values():
            clues[:] = [c for c in clues if (c.stream, c.line) != (wrapper.stream, wrapper.line)]
        self._own_ends.pop(clue.label, None)
        return clue._replace(uncaught=wrapper.uncaught)

    def _add_line(self, reader: _Reader, line: Line) -> None:
        """Add a line after a clue."""
        old = reader.growing
        assert old is not None
        retried = old.strength == "words" and len(old.after) < 3 and _RETRIED.search(line.text) is not None
        after = (*old.after, line.text[:MAX_CONTEXT])
        new = old._replace(after=after, strength="weak" if retried else old.strength)
        clues = self._clues[old.kind, old.strength]
        clues[:] = [new if clue is old else clue for clue in clues]
        if retried:
            caught = [clue for clue in clues if clue is new or (_by(clue) == _by(new) and not clue.uncaught)]
            clues[:] = [clue for clue in clues if clue not in caught]
            weak = self._clues.setdefault((new.kind, "weak"), [])
            weak += [clue._replace(strength="weak") for clue in caught]
            del weak[1:-1]  # the first and the last
        reader.growing = new if len(new.after) < AFTER else None

    def _advanced(self, text: str) -> bool:
        """Whether the program's own counter has increased since the latest clue, so that it continues."""
        assert self._counters is not None
        if _DONE.search(text):
            return True
        if _MEASURE.search(text) is None:
            return False
        advanced = False
        for index, match in enumerate(_COUNTER.finditer(text)):  # an epoch and a step, for example
            if _OTHER_COUNTER.search(text[: match.end()]):
                break
            value = float(next(group for group in match.groups() if group is not None))
            key = f"{index} {re.sub(r'[^A-Za-z]', '', text[: match.end()])[:40]}"
            advanced |= value > self._counters.setdefault(key, value)
        return advanced

    def _survive(self, reader: _Reader, line: Line, number: int, *, buffered: bool) -> None:
        """Mark the failures so far as survived, because the rank of this line continues.

        An exception that ends the process is exempt: Python writes buffered stdout to a file after the
        traceback. `buffered`: whether the output may have been buffered.
        """
        delayed = buffered and not line.stamped and _BAR.search(line.text) is None
        label = line.label

        def is_survived(clue: Clue) -> bool:
            if clue.text.startswith(_FATAL) or (clue.kind, clue.strength) == ("time-limit", "record"):
                return False
            return not (delayed and clue.uncaught and clue.strength != "weak")

        self._own_ends.pop(label, None)
        self._mark(label, is_survived)
        reader.progress = number
        for other in self._readers.values():
            other.growing = None
        self._counters = None

    def _mark_survived(self, reader: _Reader, new: Clue) -> None:
        """Mark earlier failures as survived, because the program has failed again.

        It survived exceptions if its counter has increased since. If its own error ends it now, it survived
        everything that it printed before, unless that may have ended another process.
        """
        if reader.progress:
            until = reader.progress
            self._mark(
                new.label,
                lambda clue: (
                    clue.stream == new.stream and clue.line < until and not clue.text.startswith(_FATAL)
                ),
            )
            reader.progress = 0
        if new.uncaught and not reader.chained and _OWN_FAULT.match(new.text):
            self._own_ends[new.label] = new
            self._mark(new.label, lambda clue: _only_printed(clue, new))

    def _mark(self, label: str, survived: Callable[[Clue], bool]) -> None:
        for clues in self._clues.values():
            clues[:] = [
                clue._replace(survived=clue.survived or survived(clue)) if clue.label == label else clue
                for clue in clues
            ]


def _by(clue: Clue) -> tuple[str, str]:
    """Return what tells whose words a clue is."""
    return clue.stream, clue.label


def _kind_of_exception(
    text: str, line: Line, pattern: Pattern | None, noise: str | None
) -> tuple[Kind, Strength]:
    """Return what the line of an exception shows. `noise`: of its traceback; None if it has none."""
    kind = pattern.kind if pattern is not None else "exception"
    if kind in _NETWORK and _OTHER_NETWORK.match(text):
        kind = "exception"
    if noise == "beside" and kind not in MEMORY_OF:
        return "consequence", "words"
    if noise == "thread" and kind not in MEMORY_OF:
        return kind, "weak"
    if pattern is not None and pattern.record:
        return kind, "record"
    if pattern is not None and pattern.weak and kind not in MEMORY_OF:
        return "exception", "words"
    retried = noise is None and _RETRIED.search(text) is not None
    return kind, "weak" if retried or _mild(line, kind) else "words"


def _kind_in(file: str, before: Sequence[bytes], kind: Kind, text: str) -> Kind:
    """Return what an exception raised in this file shows. `before`: the lines above it, its last frame's."""
    if "[Errno 5]" in text and any(_PRINTING.search(line) for line in before):
        return "exception"  # the terminal was closed; else a file system fails
    if kind == "disk-full" and _SHARED.search(file):
        return "shared-memory"
    lost = kind == "nccl-timeout" or (kind == "exception" and "connect" in text.lower())
    return "rendezvous-failed" if lost and _RENDEZVOUS.search(file) else kind


def _mild(line: Line, kind: Kind) -> bool:
    return (line.warning or line.minor) and kind not in MEMORY_OF


def _only_printed(clue: Clue, end: Clue) -> bool:
    """Whether the program merely printed the clue, and then its own error ended it."""
    checked = _CHECK.match(end.text) is not None and clue.kind in _CHECKED
    return not _may_end_process(clue) and not checked


def _may_end_process(clue: Clue) -> bool:
    """Whether the line may have ended a process, as opposed to the program merely printing it."""
    if clue.uncaught or clue.text.startswith(_FATAL):
        return True
    below = clue.before[-1].strip() if clue.before else ""
    cut = NAMED.fullmatch(clue.text) is not None and below.startswith(("File ", "│", "╰", "~", "^", "["))
    return cut or (clue.strength == "record" and not clue.stream)  # a rank's streams hold only its own output


def _wrapped(text: str, before: Sequence[bytes]) -> Pattern | None:
    """Return the pattern of a sentence that a collector has wrapped after the previous line."""
    if not before or len(before[-1]) < 40 or text.startswith("#"):
        return None
    start = normalise(before[-1]).text.strip()
    if pattern_of(start) is not None:
        return None
    return pattern_of(f"{start} {text}") or pattern_of(f"{start}{text}")
