"""Values that break scripts, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = [
    *" '\"`$\\#%,:;&|<>(){}[]*?!~=^@-\t\r\n",
    *[
        "$(touch PWNED)",
        "`touch PWNED`",
        "; touch PWNED",
        "'; touch PWNED; '",
        '"; touch PWNED; "',
        "${HOME}",
        "$$",
    ],
    *[
        "${local_rank}",
        "{{ 1 + 1 }}",
        "{% raw %}",
        "{# ",
        "rm -rf",
        "EOF",
        "hetjob",
        "%j",
        "é",
        "日本",
        "\u2028",
        "a",
    ],
    *["\x01", "\x7f", "\x1b[0m", "--", "-n", "\\n", "{micro_batch_size}"],
]
_chars = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.text(_chars, max_size=12),
)
"Any text a process can receive."
names = texts.filter(lambda text: 0 < len(text) <= 100)
"Of a job; the specification refuses control characters."
folders = texts.filter(
    lambda text: text not in ("", ".", "..") and "/" not in text and len(text.encode()) <= 80
)
"One component of a path."
variables = st.one_of(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
    st.sampled_from(
        ["PATH", "LC_ALL", "CDPATH", "GLOBIGNORE", "PS4", "TMPDIR", "BASH_ENV", "UID", "IFS", "_"]
    ),
)
