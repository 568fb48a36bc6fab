"""Check that a shell template uses `{{ values }}` only where a quoted word is safe.

A value is written as a quoted word. In some places these quotes mean nothing (double quotes, a comment, a
here-document), and in others bash evaluates the word a second time (arithmetic, subscripts, `eval`). There a
value could run a command, so such a template is refused. `| number` and `| name` write a whole number or a
variable name, which are safe everywhere.
"""

from __future__ import annotations

import jinja2
from jinja2 import nodes

from launcher.render.bash import COMMENT_FILTERS, COMMENTS_ONLY, MARKERS, Script
from launcher.render.flow import RefusedError

# The tags allowed in `{% %}`. Any other tag writes text that is neither quoted nor checked.
_TAGS = frozenset(
    {"if", "elif", "else", "endif", "for", "endfor", "set", "endset", "block", "endblock"}
    | {"macro", "endmacro", "include", "extends", "import", "from"}
)
_OPENING = frozenset({"if", "for", "block", "macro"})
_TAKES_TEXT = frozenset({"block", "include"})
# Mappings of words of launcher's own, without a special character.
_CONSTANTS = frozenset({"events", "exit_codes"})
# Tag that opened it, what was open then, and the words of the command so far.
_Branch = tuple[str, list[object], list[str]]


def check_shell_template(environment: jinja2.Environment, source: str, filename: str) -> None:
    """Raise TemplateSyntaxError (with the line) for a value where its quotes do not protect it."""
    tree = environment.parse(source, filename, filename)  # raises syntax errors with their message and line
    script, expression = Script(), list[tuple[str, str]]()
    branches: list[_Branch] = []
    inside = False
    try:
        _check_names(tree)
        for line, token, value in environment.lex(source):
            script.flow.line = line
            if token == "data":
                if MARKERS.search(value):
                    raise RefusedError("a control character: write it as $'\\1'")
                script.read(value)
            elif token in ("variable_begin", "block_begin"):
                inside, expression = True, []
            elif token == "variable_end":
                inside = False
                script.value(_applied_filter(environment, "".join(text for _, text in expression)))
            elif token == "block_end":
                inside = False
                _check_tag(script, [part for part in expression if part[0] != "whitespace"], branches)
            elif inside:
                expression.append((token, value))
        script.end()
    except RefusedError as refused:
        raise jinja2.TemplateSyntaxError(
            refused.problem, refused.line or script.flow.line, filename, filename
        ) from None


def _check_names(tree: nodes.Template) -> None:
    """Refuse a template that gives the name of one of launcher's own mappings to something else."""
    for node in tree.find_all((nodes.Name, nodes.Import, nodes.FromImport)):
        bound = [node.name] if isinstance(node, nodes.Name) and node.ctx != "load" else []
        if isinstance(node, nodes.Import):
            bound = [node.target]
        elif isinstance(node, nodes.FromImport):
            bound = [name if isinstance(name, str) else name[1] for name in node.names]
        for name in _CONSTANTS.intersection(bound):
            raise RefusedError(f"`{name}` is a name of launcher's own: choose another", node.lineno)


def _check_tag(script: Script, expression: list[tuple[str, str]], branches: list[_Branch]) -> None:
    tag = expression[0][1] if expression else ""
    if any(token == "name" and value in COMMENT_FILTERS for token, value in expression):
        raise RefusedError(COMMENTS_ONLY)
    if tag not in _TAGS:
        raise RefusedError(f"the tag `{tag}` is not for templates of scripts: what it writes is not quoted")
    top = script.top
    if tag in _TAKES_TEXT and script.in_command:
        raise RefusedError(f"`{tag}` includes other text: put it where a command begins")
    if tag == "for":
        script.repeats()
    if tag in _OPENING:
        branches.append((tag, script.open(), [part for part in (*top.words, top.word) if part]))
    elif tag in ("else", "elif") or tag.removeprefix("end") in _OPENING:
        if branches and (branches[-1][1] != script.open() or script.escaped):
            raise RefusedError(
                f"quotes, parentheses or braces that open between `{branches[-1][0]}` and `{tag}` must close"
                " there"
            )
        if branches:  # if this branch is not taken, the command before it continues
            top.words[:0] = branches[-1][2]
        if branches and tag.startswith("end"):
            branches.pop()


def _applied_filter(environment: jinja2.Environment, expression: str) -> str:
    """The filter that applies to the whole of an output expression, or "".

    `a ~ b | number` filters only b, so the expression is parsed instead of searching its last words.
    """
    output = environment.parse(
        f"{environment.variable_start_string} {expression} {environment.variable_end_string}"
    ).body[0]
    filters = {_outer_filter(node) for node in output.iter_child_nodes()}
    applied = filters.pop() if len(filters) == 1 else ""
    inner = {node.name for node in output.find_all(nodes.Filter)}
    if applied not in COMMENT_FILTERS and inner & COMMENT_FILTERS:
        raise RefusedError(
            "`| comment` and `| sbatch` apply to a part of this value only: put the whole in parentheses, "
            "as in `(a ~ b) | comment`"
        )
    return applied


def _outer_filter(node: nodes.Node) -> str:
    """The filter that an expression ends with. A word of launcher's own counts as a name."""
    if isinstance(node, nodes.CondExpr):
        filters = {_outer_filter(branch) for branch in (node.expr1, node.expr2) if branch is not None}
        return filters.pop() if len(filters) == 1 else ""
    if isinstance(node, nodes.Getattr | nodes.Getitem) and isinstance(node.node, nodes.Name):
        return "name" if node.node.name in _CONSTANTS else ""
    return node.name if isinstance(node, nodes.Filter) else ""
