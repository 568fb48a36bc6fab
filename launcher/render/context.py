"""Checks that a shell template puts `{{ values }}` only where a quoted word is safe.

A value is written as a quoted word. Inside double quotes, a comment or a here-document those quotes
would mean nothing and the value could run a command, so such a template is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jinja2

_Kind = Literal["plain", "double", "single", "comment", "heredoc", "backtick"]
_NAMES = {
    "double": "double quotes",
    "single": "single quotes",
    "comment": "a comment",
    "heredoc": "a here-document",
    "backtick": "backticks",
}
# Filters whose output is for comment lines alone, and that no other place may use.
_COMMENT_FILTERS = frozenset({"comment", "sbatch"})
_COMMENTS_ONLY = "`| comment` and `| sbatch` do not quote for bash; use them in comments only"


@dataclass
class _Shell:
    """Just enough of bash's grammar to know in which quotes the text stands."""

    stack: list[_Kind] = field(default_factory=lambda: ["plain"])
    at_word_start: bool = True

    def read(self, text: str) -> None:
        position = 0
        while position < len(text):
            position += self._step(text, position)

    def _step(self, text: str, at: int) -> int:
        char, state = text[at], self.stack[-1]
        start, self.at_word_start = self.at_word_start, char in " \t\n;&|()"
        if state == "comment":
            if char == "\n":
                self.stack.pop()
        elif state == "single":
            if char == "'":
                self.stack.pop()
        elif char == "\\":
            return 2
        elif char == '"':
            self.stack.pop() if state == "double" else self.stack.append("double")
        elif char == "`":
            self.stack.pop() if state == "backtick" else self.stack.append("backtick")
        elif text.startswith("$(", at):
            self.stack.append("plain")
            return 2
        elif state == "plain":
            return self._plain(text, at, start)
        return 1

    def _plain(self, text: str, at: int, word_start: bool) -> int:
        char = text[at]
        if char == "'":
            self.stack.append("single")
        elif char == "#" and word_start:
            self.stack.append("comment")
        elif char == "(":
            self.stack.append("plain")
        elif char == ")" and len(self.stack) > 1:
            self.stack.pop()
        elif text.startswith("<<<", at):
            return 3
        elif text.startswith("<<", at) and "plain" not in self.stack[1:]:
            self.stack.append("heredoc")
        return 1


def check_shell_template(environment: jinja2.Environment, source: str, filename: str) -> None:
    """Raise TemplateSyntaxError (with the line) for a value in a place where quoting does not hold."""
    shell, expression = _Shell(), list[tuple[str, str]]()
    inside, line = False, 1
    for line, token, value in environment.lex(source):
        problem = None
        if token == "data":
            shell.read(value)
        elif token in ("variable_begin", "block_begin"):
            inside, expression = True, []
        elif token == "variable_end":
            inside = False
            problem = _problem_of_value(shell.stack[-1], expression)
            shell.at_word_start = False
        elif token == "block_end":
            inside = False
            problem = _COMMENTS_ONLY if _uses_comment_filter(expression) else None
        elif inside and token != "whitespace":
            expression.append((token, value))
        if problem is not None:
            raise jinja2.TemplateSyntaxError(problem, line, filename, filename)
    if shell.stack not in (["plain"], ["plain", "comment"]):
        where = _NAMES.get(shell.stack[-1], "parentheses")
        raise jinja2.TemplateSyntaxError(f"the template ends inside {where}", line, filename, filename)


def _problem_of_value(state: _Kind, expression: list[tuple[str, str]]) -> str | None:
    if state == "comment":
        last = [value for _, value in expression[-2:]]
        if len(last) == 2 and last[0] == "|" and last[1] in _COMMENT_FILTERS:
            return None
        return "a value in a comment needs `| comment`: a line break in it would end the comment"
    if state == "plain":
        return _COMMENTS_ONLY if _uses_comment_filter(expression) else None
    return f"a value inside {_NAMES[state]}: write it bare, it is quoted already"


def _uses_comment_filter(expression: list[tuple[str, str]]) -> bool:
    return any(token == "name" and value in _COMMENT_FILTERS for token, value in expression)
