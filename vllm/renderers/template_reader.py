# SPDX-License-Identifier: Apache-2.0
"""What a chat template does with the content of a message and with the arguments of its tool calls.

The template's syntax tree is walked as if it rendered a message of one role: values carry the names of what they may
be, conditions on the role and on types are decided, and where a condition is not, both branches are walked. What is
found is what the template would do to the value: loop over it, or use it as text.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Tags = frozenset[str]
Form = Literal["text", "list"]
_NONE: Tags = frozenset()
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_"))
_TO_ELEMENT = {"content": "part", "messages": "message", "call": "call"}
_MAX_DEPTH = 6


class _Generation(Extension):
    """The block that marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - so declared by its base

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)


class _Reader:
    """Reads a template for messages of ``role`` whose content is ``text``, a ``list`` or ``none`` and whose tool calls
    have arguments that are an ``object`` or ``text``.

    ``uses``: ``list`` where the text of parts is read, ``text`` where content (or a part) is text itself, ``joined``
    where that fails without content, ``object`` and ``json`` what arguments are used as.
    """

    def __init__(self, role: str, content: str, arguments: str, tools: bool) -> None:
        self.role, self.content, self.arguments, self.tools = role, content, arguments, tools
        self.uses: set[str] = set()
        self.names: dict[str, Tags] = {name: frozenset({name}) for name in ("messages", "tools")}
        self.macros: dict[str, nodes.Macro] = {}
        self.depth = 0

    # --- values ---------------------------------------------------------------------------------------------------

    def value(self, node: nodes.Node | None) -> Tags:
        """What ``node`` may be; what it does on the way is noted."""
        if node is None:
            return _NONE
        visit = getattr(self, f"_{type(node).__name__.lower()}", None)
        if visit is not None:
            return visit(node)
        for child in node.iter_child_nodes():
            self.value(child)
        return _NONE

    def _as_text(self, tags: Tags) -> None:
        if "content" in tags or ("part" in tags and self.content == "list"):
            self.uses.add("text")
        if "arguments" in tags:
            self.uses.add("json")

    def _name(self, node: nodes.Name) -> Tags:
        return self.names.get(node.name, _NONE)

    def _getattr(self, node: nodes.Getattr) -> Tags:
        if isinstance(node.node, nodes.Name) and f"{node.node.name}.{node.attr}" in self.names:
            return self.names[f"{node.node.name}.{node.attr}"]
        return self._member(self.value(node.node), node.attr)

    def _getitem(self, node: nodes.Getitem) -> Tags:
        base, key = self.value(node.node), node.arg
        if isinstance(key, nodes.Const) and isinstance(key.value, str):
            return self._member(base, key.value)
        self.value(key)
        if isinstance(key, nodes.Slice):
            self._as_text(base)
            return base & {"messages", "call"}
        if "arguments" in base:
            self.uses.add("object")
        first = isinstance(key, nodes.Const) and key.value == 0
        return frozenset(
            "neighbour" if tag == "messages" and not first else _TO_ELEMENT[tag] for tag in base if tag in _TO_ELEMENT
        )

    def _member(self, base: Tags, name: str) -> Tags:
        out: set[str] = set()
        if base & {"message", "neighbour"}:
            if name in ("content", "tool_calls", "function_call"):
                out.add("content" if name == "content" else "call")
            elif name == "role" and "message" in base:
                out.add("role")
        if "call" in base:
            out.add("arguments" if name == "arguments" else "call")
        if "part" in base and name == "text":
            self.uses.add("list")
        if "content" in base and name in _STR_METHODS:
            self.uses |= {"text", "joined"}
        if "arguments" in base:
            self.uses.add("json" if name in _STR_METHODS else "object")
        return frozenset(out)

    def _call(self, node: nodes.Call) -> Tags:
        called, arguments = node.node, [self.value(argument) for argument in node.args]
        named = {keyword.key: self.value(keyword.value) for keyword in node.kwargs}
        if isinstance(called, nodes.Name) and called.name in self.macros:
            self._run(self.macros[called.name], arguments, named)
            return _NONE
        if isinstance(called, nodes.Getattr) and called.attr == "get" and node.args:
            key = node.args[0]
            if isinstance(key, nodes.Const) and isinstance(key.value, str):
                return self._member(self.value(called.node), key.value).union(*arguments[1:])
        self.value(called)
        return _NONE

    def _run(self, macro: nodes.Macro, arguments: list[Tags], named: dict[str, Tags]) -> None:
        if self.depth == _MAX_DEPTH:
            return
        outside, self.depth = dict(self.names), self.depth + 1
        for i, parameter in enumerate(macro.args):
            given = arguments[i] if i < len(arguments) else named.get(parameter.name, _NONE)
            self.names[parameter.name] = given
        self.run(macro.body)
        self.depth -= 1
        self._leave(outside)

    def _filter(self, node: nodes.Filter) -> Tags:
        base, name = self.value(node.node), node.name
        others = _NONE.union(*(self.value(argument) for argument in node.args))
        reads = next((keyword.value for keyword in node.kwargs if keyword.key == "attribute"), None)
        if name in ("default", "d"):
            return base | others
        if name in ("length", "count"):
            return _NONE
        if name in ("map", "selectattr", "rejectattr", "select", "reject", "groupby", "items", "dictsort"):
            if "arguments" in base:
                self.uses.add("object")
            if name != "map":
                return base - {"arguments"}
            if "content" in base and isinstance(reads, nodes.Const) and reads.value == "text":
                self.uses.add("list")
            return _NONE
        if name in ("first", "last", "random"):
            first = name == "first"
            return frozenset(
                "neighbour" if t == "messages" and not first else _TO_ELEMENT[t] for t in base if t in _TO_ELEMENT
            )
        if name in ("list", "reverse", "sort", "unique", "join"):
            return base
        if name == "tojson" and "arguments" in base:
            self.uses.add("object")
            return _NONE
        self._as_text(base)
        return _NONE

    def _text_of(self, *children: nodes.Node) -> Tags:
        values = [self.value(child) for child in children]
        for tags in values:
            self._as_text(tags)
            if "content" in tags:
                self.uses.add("joined")
        return _NONE.union(*values) & {"messages"}

    def _add(self, node: nodes.Add) -> Tags:
        return self._text_of(node.left, node.right)

    def _concat(self, node: nodes.Concat) -> Tags:
        for child in node.nodes:
            self._as_text(self.value(child))
        return _NONE

    def _list(self, node: nodes.List) -> Tags:
        values = _NONE.union(*(self.value(item) for item in node.items))
        return frozenset({"messages"}) if values & {"message", "neighbour"} else _NONE

    def _dict(self, node: nodes.Dict) -> Tags:
        pairs = [(pair.key, self.value(pair.value)) for pair in node.items]
        copied = any(isinstance(k, nodes.Const) and k.value == "content" and "content" in v for k, v in pairs)
        return frozenset({"message"}) if copied else _NONE

    def _condexpr(self, node: nodes.CondExpr) -> Tags:
        truth = self.truth(node.test)
        taken = _NONE if truth is False else self.value(node.expr1)
        return taken if truth is True else taken | self.value(node.expr2)

    def _and(self, node: nodes.And) -> Tags:
        return self.value(node.right) if self.truth(node.left) is not False else _NONE

    def _or(self, node: nodes.Or) -> Tags:
        left = self.value(node.left)
        return left if self.truth(node.left) is True else left | self.value(node.right)

    # --- conditions: True, False or None where it depends ---------------------------------------------------------

    def truth(self, node: nodes.Node) -> bool | None:
        if isinstance(node, nodes.Const):
            return bool(node.value)
        if isinstance(node, nodes.Not):
            truth = self.truth(node.node)
            return None if truth is None else not truth
        if isinstance(node, (nodes.And, nodes.Or)):
            decides = isinstance(node, nodes.Or)
            left = self.truth(node.left)
            if left is decides:
                return left
            right = self.truth(node.right)
            return right if right is decides or left is not None else None
        if isinstance(node, nodes.Compare):
            return self._compared(node)
        if isinstance(node, nodes.Test):
            return self._tested(self.value(node.node), node.name)
        tags = self.value(node)
        if tags == {"tools"}:
            return self.tools
        return False if tags == {"content"} and self.content == "none" else None

    def _compared(self, node: nodes.Compare) -> bool | None:
        left = self.value(node.expr)
        for operand in node.ops:
            self.value(operand.expr)
        if len(node.ops) != 1 or left != {"role"}:
            return None
        try:
            other = node.ops[0].expr.as_const()
        except nodes.Impossible:
            return None
        equal = self.role in other if node.ops[0].op in ("in", "notin") else self.role == other
        return {"eq": equal, "in": equal, "ne": not equal, "notin": not equal}.get(node.ops[0].op)

    def _tested(self, tags: Tags, test: str) -> bool | None:
        if tags == {"content"}:
            kind = self.content
        elif tags == {"arguments"}:
            kind = self.arguments
        elif tags == {"tools"}:
            kind = "list" if self.tools else "null"
        elif tags == {"part"} and self.content == "list":
            kind = "object"
        else:
            return None
        true_of = {
            "string": ("text",),
            "mapping": ("object",),
            "iterable": ("text", "list", "object", "none"),
            "sequence": ("text", "list", "object", "none"),
            "defined": ("text", "list", "object", "null"),
            "undefined": ("none",),
            "none": ("null",),
        }
        return kind in true_of[test] if test in true_of else None

    # --- statements -----------------------------------------------------------------------------------------------

    def run(self, body: list[nodes.Node]) -> None:
        for node in body:
            self.value(node)

    def _output(self, node: nodes.Output) -> Tags:
        for child in node.nodes:
            self._as_text(self.value(child))
        return _NONE

    def _assign(self, node: nodes.Assign) -> Tags:
        target = node.target
        if isinstance(target, nodes.Name) and isinstance(node.node, nodes.Call):
            for keyword in node.node.kwargs:
                self.names[f"{target.name}.{keyword.key}"] = self.value(keyword.value)
        value = self.value(node.node)
        if isinstance(target, nodes.Name):
            self.names[target.name] = value
        elif isinstance(target, nodes.NSRef):
            name = f"{target.name}.{target.attr}"
            self.names[name] = self.names.get(name, _NONE) | value
        return _NONE

    def _assignblock(self, node: nodes.AssignBlock) -> Tags:
        self.run(node.body)
        if isinstance(node.target, nodes.Name):
            self.names[node.target.name] = _NONE
        return _NONE

    def _macro(self, node: nodes.Macro) -> Tags:
        self.macros[node.name] = node
        return _NONE

    def _if(self, node: nodes.If) -> Tags:
        before, after = dict(self.names), []
        truth: bool | None = None
        for branch in (node, *node.elif_):
            truth = self.truth(branch.test)
            if truth is not False:
                self.run(branch.body)
                after.append(self.names)
                self.names = dict(before)
            if truth is True:
                break
        if truth is not True:
            self.run(node.else_)
            after.append(self.names)
        self.names = {name: _NONE.union(*(n.get(name, _NONE) for n in after)) for name in set().union(*after)}
        return _NONE

    def _for(self, node: nodes.For) -> Tags:
        over = self.value(node.iter)
        if "arguments" in over:
            self.uses.add("object")
        outside = dict(self.names)
        if isinstance(node.target, nodes.Name):
            self.names[node.target.name] = frozenset(_TO_ELEMENT[tag] for tag in over if tag in _TO_ELEMENT)
        if node.test is None or self.truth(node.test) is not False:
            for _ in range(2):  # what a namespace got in one round may be used in the next
                self.run(node.body)
        self._leave(outside)
        self.run(node.else_)
        return _NONE

    def _leave(self, outside: dict[str, Tags]) -> None:
        """Names set in a loop or macro end with it; namespaces stay."""
        self.names = outside | {name: tags for name, tags in self.names.items() if "." in name}


@functools.lru_cache(maxsize=256)
def _uses(template: str, role: str, content: str, tools: bool, arguments: str = "object") -> frozenset[str]:
    reader = _Reader(role, content, arguments, tools)
    try:
        reader.run(_ENVIRONMENT.parse(template).body)
    except TemplateSyntaxError:
        return frozenset()  # whoever renders it will say what is wrong
    return frozenset(reader.uses)


def content_form(template: str, role: str, given: Form, tools: bool) -> Form:
    """The form in which ``template`` wants the content of a message of ``role``: the given one where it takes both."""
    with_text = _uses(template, role, "text", tools)
    with_list = _uses(template, role, "list", tools)
    takes_text = "list" not in with_text
    takes_list = "list" in with_list and "text" not in with_list
    if given == "text":
        return "text" if takes_text or "list" not in with_list else "list"
    return "list" if takes_list or not takes_text else "text"


def needs_content(template: str, role: str, tools: bool) -> bool:
    """Whether ``template`` fails for a message of ``role`` that has no content, as it joins it to other text."""
    return "joined" in _uses(template, role, "none", tools)


def takes_argument_objects(template: str, role: str, tools: bool) -> bool:
    """Whether ``template`` wants the arguments of a tool call as an object, else as JSON text."""
    with_text = _uses(template, role, "text", tools, arguments="text")
    return "json" not in _uses(template, role, "text", tools) or "object" in with_text
