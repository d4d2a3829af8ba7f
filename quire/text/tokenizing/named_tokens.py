"""Named tokens (bos_token, eos_token_id and so on) as attributes of a tokenizer."""

from __future__ import annotations

from typing import Protocol, overload

from quire.text.tokenizing.backends import TokenizerBackend


class NamedTokenOwner(Protocol):
    """An object with named tokens."""

    named: dict[str, str]
    backend: TokenizerBackend

    def name_token(self, name: str, token: str | None) -> None: ...


class NamedToken:
    """A special token by its name; assigning one makes it the token of that name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> NamedToken: ...
    @overload
    def __get__(self, instance: NamedTokenOwner, owner: type) -> str | None: ...
    def __get__(self, instance: NamedTokenOwner | None, owner: type) -> NamedToken | str | None:
        return self if instance is None else instance.named.get(self.name)

    def __set__(self, instance: NamedTokenOwner, token: str | None) -> None:
        instance.name_token(self.name, token)


class NamedTokenId:
    """The id of a special token, by the token's name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> NamedTokenId: ...
    @overload
    def __get__(self, instance: NamedTokenOwner, owner: type) -> int | None: ...
    def __get__(self, instance: NamedTokenOwner | None, owner: type) -> NamedTokenId | int | None:
        if instance is None:
            return self
        token = instance.named.get(self.name)
        return None if token is None else instance.backend.token_to_id(token)

    def __set__(self, instance: NamedTokenOwner, token_id: int) -> None:
        instance.name_token(self.name, instance.backend.id_to_token(token_id) or f"id {token_id}")
