"""Keep the decisive lines of a program's output while they pass, in bounded memory.

A line is compared with the table of patterns once for its shape, which is the line without its digits: a
training prints few shapes, millions of times. That costs 0.15 microseconds per line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

from launcher.diagnosis.clue import MEMORY_OF, Clue, Kind, Strength, order_of
from launcher.diagnosis.lines import Line, normalise, printable
from launcher.diagnosis.literals import needed
from launcher.diagnosis.own_words import OwnWords
from launcher.diagnosis.patterns import PATTERNS, UNLESS, Pattern

MAX_TEXT = 1000
"Characters of a clue's text."
MAX_CONTEXT = 200
"Characters of each line around a clue."
BEFORE, AFTER = 3, 8
"Lines that are kept around a clue."
MAX_FRAMES = 1000
"Lines of a traceback, after which its exception is no longer waited for."
MAX_SHAPES = 10_000
"Shapes that are remembered; after so many they are forgotten, and begin anew."

_DIGITS = b"0123456789"
_NUMBERED = re.compile(rb"code|status|rror|ignal|Xid|XID|exit|after|SIG")
"The number decides on lines with these words: their shapes are not remembered."
_SOURCE = re.compile(
    r"\s*(?:except\b|raise\b|import\b|from\b.*\bimport\b|(?:el)?if\b.*:$|return\b|assert\b|def\b|class\b.*:$|"
    r"#|//|[*-] |\w+ = |[*-]\s*[\w.]+$|[a-z]\w*: [\[{'\"])"
)
"How a line of source code, of a configuration or of a list begins."
_HEAD = "Traceback (most recent call last)"
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|error|timeout|gaierror|herror)(?:\([\w.]+\))?(?:: .*|:?$)"
)
NAMED = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit)(?:\(\w+\))?"
    r"(?::(?! [\d.e+-]+$)(?: .*|$)|$)"
)
_NETWORK: frozenset[Kind] = frozenset({"nccl-timeout", "rendezvous-failed"})
_OTHER_NETWORK = re.compile(
    r"(?:requests|urllib3?|http\w*|aiohttp|huggingface_hub|wandb|boto\w*|google|openai|redis|grpc|ssl)\.|"
    r"(?:\w+\.)*(?:HTTPError|URLError|ConnectionError|ConnectTimeout|ReadTimeout|MaxRetryError|NewConnectionError|"
    r"LocalEntryNotFoundError|CommError|ServerDisconnectedError)\b"
)
"Exceptions of connections that the program makes itself, not of the network between ranks."
_CHAINED = re.compile(r"another exception occurred:|direct cause of the following exception:")
_NOISE = re.compile(
    r"Exception ignored|Error in atexit|Error in sys\.excepthook|--- Logging error ---|never retrieved"
)
"The traceback that follows is of something that happened beside the program's own end."
_THREAD = re.compile(r"Exception in thread")
_RETRIED = re.compile(
    r"(?i)\b(?:re-?trying with|retrying batch|trying again|(?:re-?)?try(?:ing)? (?:again )?with|going on\b|"
    r"halving|trying (?:a )?(?:smaller |lower )?batch|skipping (?:this |the )?batch|fall(?:ing)? back|"
    r"next batch size|does(?: not|n't) fit\b|"
    r"(?:reduc|decreas|lower)ing (?:the )?(?:micro-?)?batch|batch size \d+ (?:failed|succeeded))"
)
"Words of a program that goes on after a failure."
_FRAME = re.compile(r'\s*File "[^"]*", line \d+, in (\S+)')
_OUTERMOST = frozenset({"<module>", "_run_module_as_main", "_bootstrap", "_bootstrap_inner", "_wrap"})
"The function of the first frame where nothing of the program is left to catch the exception."
_OWN_FAULT = re.compile(
    r"(?:Key|Index|Type|Value|Attribute|Name|UnboundLocal|Import|ModuleNotFound|FileNotFound|Permission|"
    r"IsADirectory|NotADirectory|FileExists|ZeroDivision|Assertion|NotImplemented|UnicodeDecode|Recursion|"
    r"Syntax|Indentation)Error\b"
)
"Exceptions that say what their own program did wrong, never that something else failed before."
_BAR = re.compile(r"\d%\||\bit/s|s/it\b")
"A progress bar: it is printed to stderr, which is not buffered."
_FATAL = ("what():", "terminate called")
"C++ says this of an exception that ends the process; steps after it are another rank's."
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
"Words of a program that has done something after a failure."
_MEASURE = re.compile(
    r"(?i)\b(?:loss|acc\w*|ppl|lr|reward|tok\w*/s|samples/s|throughput|ms/step)\b|it/s|s/it"
)


class _Row:
    """A pattern, ready for use."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.words = needed(pattern.expression)
        self._expression: re.Pattern[str] | None = None
        self._unless: list[re.Pattern[str]] = []

    def matches(self, text: str) -> bool:
        if self._expression is None:  # few of the rows are ever needed
            self._expression = re.compile(self.pattern.expression)
            told = (self.pattern.unless, UNLESS.get(self.pattern.kind, ""))
            self._unless = [re.compile(one) for one in told if one]
        if self._expression.search(text) is None:
            return False
        return not any(one.search(text) for one in self._unless)


@cache
def _rows() -> tuple[_Row, ...]:
    return tuple(map(_Row, sorted(PATTERNS, key=lambda one: one.weak)))


def pattern_of(text: str) -> Pattern | None:
    """Return the first pattern of the table that matches a line without its prefixes.

    Source code, and items of a list of hints, tell nothing of this run.
    """
    if _SOURCE.match(text):
        return None
    low = text.lower()
    for row in _rows():
        for word in row.words:  # any() with a generator takes twice as long
            if word in low:
                break
        else:
            if row.words:
                continue
        if row.matches(text):
            return row.pattern
    return None


class _Reader:
    """What is under way in the lines of one rank of one stream."""

    def __init__(self) -> None:
        self.frames = 0
        "Lines since the head of a traceback whose exception has not come yet; 0: none is open."
        self.noise = ""
        "`beside`: that traceback is of something beside the program's own end; `thread`: of a thread."
        self.outermost = ""
        "The function of the first frame of that traceback."
        self.chained = False
        "That traceback tells what the exception before it led to."
        self.progress = 0
        "The line where the program's counter last went up after a failure; 0: it did not since."
        self.growing: Clue | None = None
        "The latest clue, while the lines after it are kept."


_EMPTY = hash(b"")


class Collector:
    """The clues in one program's output: of each kind the first one and the last one.

        collector = Collector()
        collector.feed("err", b"RuntimeError: CUDA out of memory. Tried to ...\\n", 17, time.time())
        collector.clues()

    `extra`: expressions of the job and of the cluster profile, each with its kind; they go before the table.
    """

    def __init__(self, extra: Sequence[tuple[str, Kind]] = ()) -> None:
        self._extra = [OwnWords(expression, kind) for expression, kind in extra]
        self._found: dict[tuple[Kind, Strength], list[Clue]] = {}
        self._readers: dict[tuple[str, str], _Reader] = {}
        self._busy: set[str] = set()
        "Streams in which a traceback is open, or lines after a clue are kept."
        self._tail: dict[str, list[bytes]] = {}
        self._harmless = {_EMPTY}
        "Hashes of the shapes of lines that tell nothing."
        self._usual = b"\n"
        "The latest of them, with its newline."
        self._counters: dict[str, float] | None = None
        "The program's own counters since the latest clue, by the text before them; None: not looked for."

    def feed(self, stream: str, lines: bytes, first: int, time: float = 0.0) -> None:
        """Read whole lines, each ending in a newline. `first`: the number of the first one in its file."""
        tail = self._tail.get(stream, [])
        watched = stream in self._busy or self._counters is not None
        bare = lines.translate(None, _DIGITS)
        # Most chunks repeat one shape: taking it out leaves nothing, at a third of the price of a split.
        shapes = bare[:-1].split(b"\n") if watched or bare.replace(self._usual, b"") else []
        own = any(one.may_match(lines) for one in self._extra)
        known = [hash(shape) for shape in shapes]
        if own and not shapes:
            known = [hash(shape) for shape in bare[:-1].split(b"\n")]
        if watched or own or not self._harmless.issuperset(known):
            many = [*tail, *lines[:-1].split(b"\n")]
            for number, shape in enumerate(known, len(tail)):
                if own or stream in self._busy or self._counters is not None or shape not in self._harmless:
                    self._read(stream, many, number, shape, first + number - len(tail), time)
            self._tail[stream] = many[-BEFORE:]
        else:
            self._usual = shapes[-1] + b"\n" if shapes else self._usual
            self._tail[stream] = [*tail, *lines[:-1].rsplit(b"\n", BEFORE)[-BEFORE:]][-BEFORE:]

    @property
    def given_up(self) -> list[str]:
        """The job's own expressions that took too long, and are not searched any more."""
        return [one.expression for one in self._extra if one.given_up]

    def clues(self) -> list[Clue]:
        """Return what was kept; what explains most goes first."""
        kept = {(clue.stream, clue.line, clue.kind): clue for clues in self._found.values() for clue in clues}
        return sorted(kept.values(), key=lambda clue: (order_of(clue.kind), clue.time, clue.line))

    def _read(
        self, stream: str, many: Sequence[bytes], index: int, known: int, number: int, time: float
    ) -> None:
        line = normalise(many[index])
        reader = self._readers.setdefault((stream, line.label), _Reader())
        if self._counters is not None and self._advanced(line.text):
            self._survive(reader, line, number, buffered=not stream)
        before = many[max(0, index - BEFORE) : index]
        start, head, _ = line.text.partition(_HEAD)
        if head:
            raw = start.encode()
            told = self._kind_of(reader, line._replace(text=start), raw, hash(raw), before)
            if told is not None and start.strip(" +|"):
                clue = Clue(
                    told[0], start.strip()[:MAX_TEXT], stream, number, time, told[1], label=line.label
                )
                self._keep(reader, clue)
            self._open_traceback(reader, [normalise(one).text for one in before])
        elif not reader.frames or line.text[:1] not in ("", " ", "\t") or NAMED.fullmatch(line.text.strip()):
            open_before = bool(reader.frames)
            told = self._kind_of(reader, line, many[index], known, before)
            if told is not None:
                context = tuple(printable(one)[:MAX_CONTEXT] for one in before)
                clue = Clue(
                    told[0], line.text.strip()[:MAX_TEXT], stream, number, time, told[1],
                    uncaught=open_before and not reader.frames and self._ends(reader),
                    label=line.label, before=context,
                )  # fmt: skip
                self._keep(reader, clue)
            elif reader.growing is not None:
                self._grow(reader, line)
        elif reader.frames < MAX_FRAMES:  # a frame shows source code, which tells nothing of this run
            if not reader.outermost and (frame := _FRAME.match(line.text)):
                reader.outermost = frame[1]
            reader.frames += 1
        else:
            reader.frames = 0
        if any(one.frames or one.growing for (of, _), one in self._readers.items() if of == stream):
            self._busy.add(stream)
        else:
            self._busy.discard(stream)

    def _open_traceback(self, reader: _Reader, before: Sequence[str]) -> None:
        chained = any(_CHAINED.search(text) for text in before)
        if any(_NOISE.search(text) for text in before):
            reader.noise = "beside"
        elif any(_THREAD.search(text) for text in before):
            reader.noise = "thread"
        elif not chained:
            reader.noise = ""
        reader.frames, reader.growing = 1, None
        reader.outermost, reader.chained = "", chained

    @staticmethod
    def _ends(reader: _Reader) -> bool:
        """Whether the exception of the traceback that was just read ends its process."""
        return reader.outermost in _OUTERMOST and not reader.noise

    def _kind_of(
        self, reader: _Reader, line: Line, raw: bytes, known: int, before: Sequence[bytes]
    ) -> tuple[Kind, Strength] | None:
        """Return what the line tells, and how strongly."""
        text = line.text.strip()
        raised = bool(reader.frames) and _EXCEPTION.fullmatch(text) is not None
        named = raised or NAMED.fullmatch(text) is not None
        if raised:
            reader.frames = 0
        for own in self._extra:
            if own.matches(text):
                return own.kind, "words"
        if not named and known in self._harmless:
            return None
        pattern = pattern_of(text)
        if not named and (pattern is None or pattern.weak):
            pattern = _wrapped(text, before) or pattern
        if pattern is None and not named and line.severe and _SOURCE.match(text) is None:
            return "user-error", "weak"
        if pattern is None and not named:
            if len(self._harmless) >= MAX_SHAPES:
                self._harmless = {_EMPTY}
            if not _NUMBERED.search(raw):
                self._harmless.add(known)
            return None
        kind = pattern.kind if pattern is not None else "exception"
        if named and kind in _NETWORK and _OTHER_NETWORK.match(text):
            kind = "exception"
        if raised and reader.noise == "beside" and kind not in MEMORY_OF:
            return "consequence", "words"
        if raised and reader.noise == "thread" and kind not in MEMORY_OF:
            return kind, "weak"
        if pattern is not None and pattern.record:
            return kind, "record"
        if named and pattern is not None and pattern.weak:
            return "exception", "words"
        mild = pattern is not None and pattern.weak
        mild = mild or ((line.warning or line.minor) and kind not in MEMORY_OF)
        mild = mild or (not raised and _RETRIED.search(text) is not None)
        return kind, "weak" if mild else "words"

    def _keep(self, reader: _Reader, clue: Clue) -> None:
        if clue.kind != "consequence" and clue.kind not in _NETWORK and clue.strength == "words":
            self._outlived(reader, clue)
        found = self._found.setdefault((clue.kind, clue.strength), [])
        if len(found) >= 2 or (found and found[0].survived):
            found.pop()
        found.append(clue)
        reader.growing = clue
        if clue.kind != "consequence":
            self._counters = {}
            self._advanced(clue.text)  # where a progress bar stood in the same line

    def _grow(self, reader: _Reader, line: Line) -> None:
        """Keep a line after a clue."""
        old = reader.growing
        assert old is not None
        retried = old.strength == "words" and len(old.after) < 3 and _RETRIED.search(line.text) is not None
        after = (*old.after, line.text[:MAX_CONTEXT])
        new = old._replace(after=after, strength="weak" if retried else old.strength)
        found = self._found[old.kind, old.strength]
        if retried:
            found.remove(old)
            self._found.setdefault((new.kind, new.strength), []).append(new)
        else:
            found[:] = [new if clue is old else clue for clue in found]
        reader.growing = new if len(new.after) < AFTER else None

    def _advanced(self, text: str) -> bool:
        """Whether the program's own counter went up since the latest clue: it goes on."""
        assert self._counters is not None
        if _DONE.search(text):
            return True
        found = _COUNTER.search(text)
        if found is None or _MEASURE.search(text) is None or _OTHER_COUNTER.search(text[: found.end()]):
            return False
        value = float(next(group for group in found.groups() if group is not None))
        key = re.sub(r"\W|\d|_", "", text[: found.end()])[:40]
        return value > self._counters.setdefault(key, value)

    def _survive(self, reader: _Reader, line: Line, number: int, *, buffered: bool) -> None:
        """The rank of this line goes on, except after an exception that ended it: what Python's stdout held
        back in a file is written after the traceback. `buffered`: nobody knows whether it was."""
        delayed = buffered and not line.stamped and _BAR.search(line.text) is None
        label = line.label

        def goes_on(clue: Clue) -> bool:
            if clue.text.startswith(_FATAL):
                return False
            return not (delayed and clue.uncaught and clue.strength != "weak")

        self._mark(label, goes_on)
        reader.progress = number
        for one in self._readers.values():
            one.growing = None
        self._counters = None

    def _outlived(self, reader: _Reader, new: Clue) -> None:
        """A program that fails again was not ended by what it printed before: by an exception where its
        counter went up since, or by memory that ran out where its own fault ends it in the end."""
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
            self._mark(
                new.label,
                lambda clue: clue.kind in MEMORY_OF and clue.stream == new.stream and not _ended(clue),
            )

    def _mark(self, label: str, survived: Callable[[Clue], bool]) -> None:
        for clues in self._found.values():
            clues[:] = [
                clue._replace(survived=clue.survived or survived(clue)) if clue.label == label else clue
                for clue in clues
            ]


def _ended(clue: Clue) -> bool:
    """Whether the line may have ended a process: not where the program printed it by itself."""
    if clue.uncaught or clue.text.startswith(_FATAL):
        return True
    below = clue.before[-1].strip() if clue.before else ""
    cut = NAMED.fullmatch(clue.text) is not None and below.startswith(("File ", "│", "╰", "~", "^", "["))
    return cut or clue.strength == "record"


def _wrapped(text: str, before: Sequence[bytes]) -> Pattern | None:
    """Return the pattern of a sentence that a collector has wrapped at the end of the line before."""
    if not before or len(before[-1]) < 40 or text.startswith("#"):
        return None
    start = normalise(before[-1]).text.strip()
    if pattern_of(start) is not None:
        return None
    return pattern_of(f"{start} {text}") or pattern_of(f"{start}{text}")
