"""All cases of a schema, less those that can never be: a required value that nothing can be, and
recursion without an end. What is left can always be brought to an end.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.grammar.schemas.branch import Reason
from quire.grammar.schemas.document import refuse
from quire.grammar.schemas.shapes import NEVER, Array, Key, Object, Shape, is_never
from quire.grammar.schemas.tableau import Tableau

ENDLESS = "it holds itself without an end: every value of it would have to hold another one"


class Graph:
    """Keys reached from a root, each with the Shapes that can be had."""

    def __init__(self, tableau: Tableau, root: Key) -> None:
        self.root = root
        self.cases: dict[Key, list[Shape]] = {}
        self._reasons = tableau.reasons
        self._lossy = tableau.lossy
        self._reach(tableau)
        self._alive = self._living()
        if root not in self._alive:
            key, reason = self._why(root)
            start = "it cannot be honoured" if key in self._lossy else "no JSON value is allowed"
            refuse(reason.place, f"{start}: {reason.what}")
        for key in self._alive:
            self.cases[key] = [one for one in self.cases[key] if self._lives(one, self._alive)]
            for shape in self.cases[key]:
                self._prune(shape)

    def _reach(self, tableau: Tableau) -> None:
        todo = [self.root]
        while todo:
            key = todo.pop()
            if key in self.cases or is_never(key):
                continue
            self.cases[key] = tableau.cases(key)
            for shape in self.cases[key]:
                todo += within(shape)

    def _living(self) -> set[Key]:
        """Keys that some finite value is of: found from the leaves up."""
        alive: set[Key] = set()
        waiting: dict[Key, set[Key]] = {}
        for key, shapes in self.cases.items():
            for shape in shapes:
                for inner in within(shape):
                    waiting.setdefault(inner, set()).add(key)
        todo = list(self.cases)
        while todo:
            key = todo.pop()
            if key not in alive and any(self._lives(one, alive) for one in self.cases[key]):
                alive.add(key)
                todo += waiting.get(key, ())
        return alive

    def _lives(self, shape: Shape, alive: set[Key]) -> bool:
        if isinstance(shape, Object):
            return all(shape.named[name] in alive for name in shape.required) and (
                shape.least <= len(shape.required) or any(one.key in alive for one in shape.free)
            )
        if isinstance(shape, Array):
            return all(shape.at(place) in alive for place in _needed(shape))
        return True

    def _prune(self, shape: Shape) -> None:
        """Take out what can never be within it."""
        if isinstance(shape, Object):
            for name, key in shape.named.items():
                if key not in self._alive:
                    shape.named[name] = NEVER
            shape.free = [one for one in shape.free if one.key in self._alive]
        elif isinstance(shape, Array):
            for place, key in enumerate(shape.first):
                if key not in self._alive:
                    shape.first, shape.rest, shape.most = shape.first[:place], NEVER, place
                    return
            if shape.rest not in self._alive:
                top = len(shape.first)
                shape.rest, shape.most = NEVER, top if shape.most is None else min(top, shape.most)

    def _why(self, key: Key) -> tuple[Key, Reason]:
        """Why nothing is of the Key: of the first case, the first thing in the way."""
        seen: set[Key] = set()
        while key not in seen:
            seen.add(key)
            if is_never(key):
                node = next(node for node, sign in key if sign and node.false)
                return key, Reason(node.place, "false allows nothing")
            if key in self._reasons:
                return key, self._reasons[key]
            key = self._in_the_way(self.cases[key][0])
        return key, Reason(min(key, key=lambda one: one[0].number)[0].place, ENDLESS)

    def _in_the_way(self, shape: Shape) -> Key:
        if isinstance(shape, Object):
            for name, key in shape.named.items():
                if name in shape.required and key not in self._alive:
                    return key
            return next((one.key for one in shape.free if one.key not in self._alive), NEVER)
        assert isinstance(shape, Array), f"{shape!r} allows something"
        return next(key for place in _needed(shape) if (key := shape.at(place)) not in self._alive)


def _needed(shape: Array) -> range:
    """Places of the items that must be there; all behind the first ones are alike."""
    return range(min(shape.least, len(shape.first) + 1))


def within(shape: Shape) -> Iterator[Key]:
    """Keys of what is within a value."""
    if isinstance(shape, Object):
        yield from shape.named.values()
        yield from (one.key for one in shape.free)
    elif isinstance(shape, Array):
        yield from shape.first
        yield shape.rest
