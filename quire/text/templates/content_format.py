"""Detects whether a chat template expects content as text ("string") or as parts ("openai").

The syntax tree decides: a loop over a message's content means parts. Names are followed through
`set`, loops over messages and arguments of macros, without regard to scope: a name that refers to
content in one place is taken to refer to it everywhere.
"""

from __future__ import annotations

from jinja2 import nodes

from quire.text.templates.message_normalizer import ContentFormat


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """The form of content that this template reads."""
    messages, message, content = {"messages"}, {"message"}, set[str]()
    before = -1
    while before != (before := len(messages) + len(message) + len(content)):
        _follow_sets(tree, messages, message, content)
        _follow_loops(tree, messages, message)
        _follow_macros(tree, message, content)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, message, content) for loop in loops) else "string"


def _is_messages(node: nodes.Node, messages: set[str]) -> bool:
    node = _base(node)
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}" in messages
    return isinstance(node, nodes.Name) and node.name in messages


def _is_message(node: nodes.Node, messages: set[str], message: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in message
    if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
        return _is_messages(node.node, messages)
    return False


def _is_content(node: nodes.Node, message: set[str], content: set[str]) -> bool:
    node = _base(node)
    if isinstance(node, nodes.Name):
        return node.name in content
    if isinstance(node, nodes.Getattr):
        key: object = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and _is_message(node.node, {"messages"}, message)


def _base(node: nodes.Node) -> nodes.Node:
    """Without filters, slices, and `or []` around it."""
    while True:
        inner = _inside(node)
        if inner is None:
            return node
        node = inner


def _inside(node: nodes.Node) -> nodes.Node | None:
    if isinstance(node, nodes.Filter):
        return node.node
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return node.node
    return node.left if isinstance(node, nodes.Or) else None


def _follow_sets(
    tree: nodes.Template, messages: set[str], message: set[str], content: set[str]
) -> None:
    for one in tree.find_all(nodes.Assign):
        name = _target(one.target)
        if name is None:
            continue
        if _is_content(one.node, message, content):
            content.add(name)
        elif _is_messages(one.node, messages):
            messages.add(name)
        elif _is_message(one.node, messages, message):
            message.add(name)


def _target(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    return node.name if isinstance(node, nodes.Name) else None


def _follow_loops(tree: nodes.Template, messages: set[str], message: set[str]) -> None:
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and _is_messages(loop.iter, messages):
            message.add(loop.target.name)


def _follow_macros(tree: nodes.Template, message: set[str], content: set[str]) -> None:
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        for parameter, argument in zip(macro.args, call.args):
            if _is_content(argument, message, content):
                content.add(parameter.name)
            elif isinstance(argument, nodes.Name) and argument.name in message:
                message.add(parameter.name)
