"""Chat templates of a tokenizer by name, and the choice of the one that applies.

A bounded number of compiled templates is cached, because requests may bring their own. Rendering is
in quire.text.templates.chat_template.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import RequestError
from quire.text.templates.chat_template import ChatTemplate, load_chat_template

MAX_COMPILED = 32

NO_TEMPLATE_MESSAGE = (
    "this model's tokenizer has no chat template. Pass chat_template=... (--chat-template of a "
    "command: the text of a Jinja template, or the path of a file with one), or render the "
    "conversation yourself and use generate() or the completions route"
)


class TemplateCache:
    """Templates by name: "default", "tool_use", "rag", …"""

    def __init__(self, named: Mapping[str, str] | None = None) -> None:
        self.named = dict(named or {})
        self._compiled: dict[str, ChatTemplate] = {}

    def __len__(self) -> int:
        return len(self.named)

    def select(self, chat_template: str | None = None, tools: object = None) -> str:
        """The given one (a name, path or text), else the one for tools if there are tools, else
        the default."""
        if chat_template is not None:
            named = self.named.get(chat_template)
            return named if named is not None else str(load_chat_template(chat_template))
        if tools and "tool_use" in self.named:
            return self.named["tool_use"]
        if "default" in self.named:
            return self.named["default"]
        if self.named:
            raise RequestError(
                f"this tokenizer has chat templates by name only ({', '.join(sorted(self.named))})"
                "; pass one of the names as chat_template",
                param="chat_template",
            )
        raise RequestError(NO_TEMPLATE_MESSAGE, param="chat_template")

    def get(self, source: str, special: Mapping[str, object]) -> ChatTemplate:
        """The template of this text. special: the tokens it may write by name."""
        key = f"{sorted(special.items())}\0{source}"
        found = self._compiled.get(key)
        if found is None:
            if len(self._compiled) >= MAX_COMPILED:
                self._compiled.clear()
            found = self._compiled[key] = ChatTemplate(source, special)
        return found
