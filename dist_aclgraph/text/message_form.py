"""MessageForm: the form in which a chat template reads the content and the role of a message.

A content is one text, or a list of parts ``{"type": "text", "text": ...}``. Most templates read
texts, some read parts, and some read both. The form is found in the template's syntax tree. A
template reads parts if it reads the text of one item of a content, or of each item in a loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

CONTENT = "content"
_OF_PARTS = frozenset({"text", "type"})  # keys of a part
ROLES = frozenset({"system", "user", "assistant", "tool"})
# Maps a role of other APIs to a usual role. The usual role replaces the other role if the template
# has no rule for the other role.
OLDER_ROLES = {"developer": "system", "function": "tool"}
OBSERVATION = "observation"
PHI_TOOLS = "<|/tool|>"
# The model card of Phi-4-mini has this text before the tools.
SYSTEM = "You are a helpful assistant with some tools."
# these strings are keys of a message, and not names of roles
NO_ROLES = frozenset({"content", "role"})
# Filters whose result is still a list of parts.
_OF_LISTS = frozenset({"default", "list", "rejectattr", "reverse", "selectattr"})
# Tests by which a template distinguishes a text from a list of parts.
_OF_KIND = frozenset({"iterable", "sequence", "string"})


@dataclass(frozen=True)
class MessageForm:
    """The form of messages that one template reads.

    Attributes:
        reads_parts: whether a content may be a list of parts.
        reads_texts: whether a content may be one text.
        roles: the roles for which the template has a rule.
        words: all words in the string constants of the template's code. If the template compares a
            role indirectly, for example by a filter, ``words`` has the role, but ``roles`` does
            not.
        writes_roles: whether the template writes the name of a role, so that any name is possible.
        tests_none: whether the template tests whether a content is None. Some templates use this
            test to find messages with calls.
        reads_metadata: whether a call is a separate message, whose metadata is the call's name.
            Results then have the role "observation". GLM-4 has such a template.
        tools: the form in which the template reads tools from the first message: "text" or "list".
            None if the template does not read tools from this message. GLM-4-9B and Phi-4-mini have
            such templates.
        calls_are_text: whether calls in earlier messages become a part of the content. True if the
            template reads no calls, and has the tokens that Phi-4-mini puts around tools.
    """

    reads_parts: bool = False
    reads_texts: bool = True
    roles: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    writes_roles: bool = False
    tests_none: bool = False
    reads_metadata: bool = False
    tools: str | None = None
    calls_are_text: bool = False

    def adapt_all(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Return the messages in this form."""
        found = [self.adapt(message) for message in messages]
        if tools and self.tools is not None:
            if not found or found[0].get("role") != "system":
                found.insert(0, {"role": "system", CONTENT: SYSTEM if self.calls_are_text else ""})
            functions = [tool.get("function", tool) for tool in tools]
            as_text = json.dumps(functions, ensure_ascii=False)
            found[0]["tools"] = as_text if self.tools == "text" else list(tools)
        if self.calls_are_text:
            return [_with_text_of_calls(message) for message in found]
        if self.reads_metadata:
            return [each for message in found for each in _with_metadata(message)]
        return found

    def adapt(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message in this form, without the keys whose value is None. There is one
        exception: in a message with calls, a content of None is kept if the template tests contents
        for None.

        Parts are joined by line breaks if the template reads texts only. A content stays as it is
        if one of its parts is not a text. Arguments of calls become objects.
        """
        found = {name: value for name, value in message.items() if value is not None}
        if isinstance(calls := found.get("tool_calls"), list | tuple):
            found["tool_calls"] = [_with_object(call) for call in calls]
        if found.get("tool_calls") and (self.tests_none or not self.reads_texts):
            empty = [{"type": "text", "text": ""}]
            found.setdefault(CONTENT, None if self.reads_texts else empty)
        content = found.get(CONTENT)
        if isinstance(content, str) and not self.reads_texts:
            found[CONTENT] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self.reads_parts and all(map(_is_text, content)):
            found[CONTENT] = "\n".join(part["text"] for part in content)
        role = found.get("role")
        if role in OLDER_ROLES and role not in self.roles:
            found["role"] = OLDER_ROLES[role]
        return found

    def knows(self, role: str) -> bool:
        """Return whether messages may have this role."""
        return role in ROLES or role in OLDER_ROLES or role in self.words or self.writes_roles


def read_form(source: str, template: nodes.Template) -> MessageForm:
    """Return the form that a template reads.

    Args:
        template: the syntax tree of ``source``.
    """
    names = _names_of_contents(template)
    reads_parts = any(_reads_parts(node, names) for node in template.find_all(nodes.Node))
    tells_kinds = any(
        test.name in _OF_KIND and _is_content(test.node, names)
        for test in template.find_all(nodes.Test)
    )
    tests_none = any(
        test.name == "none" and _is_content(test.node, names)
        for test in template.find_all(nodes.Test)
    )
    reads_texts = not reads_parts or tells_kinds
    variables = _names_of_roles(template)
    roles = set(_compared_roles(template, variables))
    roles |= {"developer"} if "developer" in source else set()
    texts = (value for value in _constants(template) if isinstance(value, str))
    writes_roles = _writes_roles(template, variables)
    own_tools = _own_tools(template)
    keys = {key for node in template.find_all(nodes.Node) if isinstance(key := _key(node), str)}
    return MessageForm(
        reads_parts=reads_parts,
        reads_texts=reads_texts,
        roles=frozenset(roles),
        words=frozenset(word for text in texts for word in text.split()) - NO_ROLES,
        writes_roles=writes_roles,
        tests_none=tests_none,
        reads_metadata=(OBSERVATION in roles or writes_roles) and "metadata" in keys,
        tools=own_tools,
        calls_are_text=own_tools is not None and PHI_TOOLS in source and "tool_calls" not in keys,
    )


def _own_tools(template: nodes.Template) -> str | None:
    """Return the form in which a template reads the tools of a message: "text" or "list". Return
    None if the template reads the tools from the request, or reads no tools.
    """
    assigned = [each for each in template.find_all(nodes.Assign) if _key(each.node) == "tools"]
    own = {each.target.name for each in assigned if isinstance(each.target, nodes.Name)}
    names = template.find_all(nodes.Name)
    if any(name.name == "tools" and name.ctx == "load" for name in names) and "tools" not in own:
        return None
    if not any(_key(node) == "tools" for node in template.find_all(nodes.Node)):
        return None
    sides = (side for each in template.find_all(nodes.Add) for side in (each.left, each.right))
    return "text" if any(_key(side) == "tools" for side in sides) else "list"


def _names_of_roles(template: nodes.Template) -> set[str]:
    """Return the names of the variables and namespace attributes to which the template assigns a
    message's role.
    """
    assigned = [each for each in template.find_all(nodes.Assign) if _has_role(each.node, set())]
    targets = [each.target for each in assigned]
    attributes = {target.attr for target in targets if isinstance(target, nodes.NSRef)}
    return {target.name for target in targets if isinstance(target, nodes.Name)} | attributes


def _compared_roles(template: nodes.Template, names: set[str]) -> Iterator[str]:
    """Yield the texts that a template compares with a message's role."""
    for compare in template.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_has_role(side, names) for side in sides):
            for side in sides:
                others = [] if _has_role(side, names) else _constants(side)
                yield from (value for value in others if isinstance(value, str))


def _writes_roles(template: nodes.Template, names: set[str]) -> bool:
    """Return whether a template writes a message's role into the prompt. Such a template accepts
    any role.
    """
    return any(
        _has_role(node, names)
        for output in template.find_all(nodes.Output)
        for node in output.nodes
    )


def _has_role(node: nodes.Node, names: set[str]) -> bool:
    """Return whether the value of an expression contains a role. The value of a comparison contains
    no role.
    """
    is_error = isinstance(node, nodes.Call) and _own_name(node.node) == {"raise_exception"}
    if is_error or isinstance(node, nodes.Compare | nodes.Test):
        return False
    if isinstance(node, nodes.CondExpr):
        branches = [node.expr1] if node.expr2 is None else [node.expr1, node.expr2]
        return any(_has_role(branch, names) for branch in branches)
    is_variable = isinstance(node, nodes.Name) and node.name in names
    is_attribute = isinstance(node, nodes.Getattr) and node.attr in names
    is_named = is_variable or is_attribute
    is_role = is_named or _key(node) == "role"
    return is_role or any(_has_role(inner, names) for inner in node.iter_child_nodes())


def _constants(node: nodes.Node) -> list[Any]:
    own = [node.value] if isinstance(node, nodes.Const) else []
    return own + [const.value for const in node.find_all(nodes.Const)]


def _with_text_of_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls are a part of its content, as Phi-4-mini writes them."""
    calls = message.pop("tool_calls", None)
    if not isinstance(calls, list):
        return message
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    text = json.dumps(functions, ensure_ascii=False)
    return {**message, CONTENT: f"{message.get(CONTENT) or ''}<|tool_call|>{text}<|/tool_call|>"}


def _with_metadata(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message as separate messages for its text and for each of its calls."""
    if message.get("role") == "tool":
        return [{**message, "role": OBSERVATION}]
    calls = message.pop("tool_calls", None)
    if not isinstance(calls, list):
        return [message]
    found = [message] if message.get(CONTENT) else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            metadata = str(function.get("name", ""))
            found.append({"role": "assistant", "metadata": metadata, CONTENT: arguments})
    return found


def _with_object(call: Any) -> Any:
    """Return a call. If its arguments are the text of a JSON object, they become this object. Other
    arguments stay unchanged.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments if arguments.strip() else "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _reads_parts(node: nodes.Node, names: set[str]) -> bool:
    """Return whether a node reads the text of one item of a content, or loops over a content and
    reads the text of each item.
    """
    if isinstance(node, nodes.For):
        items = {name.name for name in node.target.find_all(nodes.Name)} | _own_name(node.target)
        return _is_content(node.iter, names) and any(
            _key(inner) in _OF_PARTS and _own_name(inner.node) & items  # type: ignore[attr-defined]
            for inner in node.find_all((nodes.Getattr, nodes.Getitem))
        )
    if _key(node) not in _OF_PARTS:
        return False
    item = node.node  # type: ignore[attr-defined]
    return isinstance(_key(item), int) and _is_content(item.node, names)


def _own_name(node: nodes.Node) -> set[str]:
    return {node.name} if isinstance(node, nodes.Name) else set()


def _names_of_contents(template: nodes.Template) -> set[str]:
    """Return the variables, and the parameters of macros, that have a content as their value."""
    names: set[str] = set()
    while found := set(_more_names(template, names)) - names:
        names |= found
    return names


def _more_names(template: nodes.Template, names: set[str]) -> Iterator[str]:
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            yield assign.target.name
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        for given, parameter in zip(call.args, macro.args if macro else (), strict=False):
            if _is_content(given, names):
                yield parameter.name


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Return whether an expression is a message's content."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Filter):
        return node.name in _OF_LISTS and _is_content(node.node, names)
    return bool(_key(node) == CONTENT)


def _key(node: nodes.Node | None) -> Any:
    """Return the constant key of ``a.key``, ``a[key]`` or ``a.get(key)``; None for other nodes."""
    if isinstance(node, nodes.Call) and _key(node.node) == "get" and node.args:
        return node.args[0].value if isinstance(node.args[0], nodes.Const) else None
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value
    return None
