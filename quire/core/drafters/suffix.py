"""Suffix drafter: proposes what followed the longest matches of the last tokens, by their counts.

It reads the prompt and output of a request, and past outputs. Of each match length the drafts are
the most frequent tokens, one after the other, while the product of their shares of the occurrences
is high enough; the length whose drafts promise most is taken. Instead of a tree of suffixes, texts
have links from each pair of tokens to the one before that is equal, and the latest occurrences are
compared: a token costs one link.

Past outputs are those of the same tenant, cache salt and adapter, so that no tenant learns from
the speed of an answer what others were answered.

Source: Oliaro et al., SuffixDecoding, NeurIPS 2025; links in place of a tree are ours.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.config.engine_config import SpeculationSection
from quire.core.drafters.base import HostDrafter
from quire.core.drafters.ngram import continuation
from quire.core.types import Sequence

MAX_OCCURRENCES = 6
"""Occurrences of the last pair that are compared: the latest ones."""
MAX_INDEXED = 4096
"""Tokens that one call adds to the links of a prompt."""
SEPARATOR = -2
"""Between two past outputs."""

MAX_PAST_TOKENS = 1_000_000
"""Tokens of past outputs that are kept, of all tenants. One takes about 150 bytes."""

Scope = tuple[bytes, bytes]
"""Tenant, and what separates the cached KV of its requests: outputs of one scope are shared."""
Match = tuple[int, int]
"""Tokens that agree, and the place behind them."""


class PastOutput(NamedTuple):
    """end: the place behind it, in the texts of its scope. size: its tokens."""

    scope: Scope
    end: int
    size: int


class PairLinks:
    """Links from each place in a list of tokens to the latest one before behind an equal pair."""

    __slots__ = ("_latest", "_previous")

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # pair -> latest place
        self._previous = array("i", (0, 0))  # place -> the one before; 0: none

    @property
    def end(self) -> int:
        """The last place that has links."""
        return len(self._previous) - 1

    def extend(self, tokens: list[int], end: int) -> None:
        """Add places up to `end`."""
        latest, previous = self._latest, self._previous
        find, add = latest.get, previous.append
        for place in range(len(previous), end + 1):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            add(find(pair, 0))
            latest[pair] = place

    @property
    def places(self) -> array[int]:
        """By place: the one before that has an equal pair; 0: there is none."""
        return self._previous

    def latest(self, one: int, other: int) -> int:
        """Return the latest place behind a pair of tokens; 0: there is none."""
        return self._latest.get(one << 32 | other, 0)

    def remove(self, tokens: list[int], places: range) -> None:
        """Remove the oldest places. Links to them are left, and mean nothing."""
        for place in places:
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            if self._latest.get(pair, 0) in places:
                del self._latest[pair]


class PastOutputs:
    """Outputs of one scope, one behind the other."""

    def __init__(self) -> None:
        self.tokens: list[int] = [SEPARATOR] * 2
        self.links = PairLinks()
        self.first = 0  # places up to it were removed
        self.outputs = 0

    def add(self, output: list[int]) -> int:
        """Add an output. Returns the place behind it."""
        self.tokens += output
        self.tokens.append(SEPARATOR)
        self.links.extend(self.tokens, len(self.tokens))
        self.outputs += 1
        return len(self.tokens)

    def remove_oldest(self, end: int) -> None:
        """Remove the oldest output, which add() returned this place for."""
        self.links.remove(self.tokens, range(max(self.first, 2), end + 1))
        self.first = end
        self.outputs -= 1

    def compacted(self) -> PastOutputs:
        """Return the same without what was removed."""
        fresh = PastOutputs()
        fresh.tokens += self.tokens[self.first :]
        fresh.links.extend(fresh.tokens, len(fresh.tokens))
        fresh.outputs = self.outputs
        return fresh


class SuffixDrafter(HostDrafter):
    """depth: tokens of a match, at most. requests: past outputs that are kept. factor: drafts for
    each token of a match. min_probability: of a draft."""

    def __init__(self, *, depth: int, requests: int, factor: float, min_probability: float) -> None:
        self._depth, self._factor, self._min_probability = depth, factor, min_probability
        self._requests = requests
        self._links: dict[Sequence, PairLinks] = {}
        self._past: dict[Scope, PastOutputs] = {}
        self._tenants: dict[bytes, deque[PastOutput]] = {}  # past outputs, the oldest first
        self._tokens: dict[bytes, int] = {}  # of these

    def propose(self, seq: Sequence, known: int, most: int) -> Seq[int]:
        links = self._links.get(seq)
        if links is None:
            links = self._links[seq] = PairLinks()
        tokens = seq.tokens
        links.extend(tokens, min(known, links.end + MAX_INDEXED))
        if known < 2 or links.end < known:
            return ()
        matches = self._matches(tokens, known, tokens, links, links.places[known], 0)
        drafts, score = self._best(tokens, known, matches, most)
        past = self._past.get(_scope(seq)) if self._past else None
        if past is not None:
            place = past.links.latest(tokens[known - 2], tokens[known - 1])
            matches = self._matches(tokens, known, past.tokens, past.links, place, past.first)
            others, other_score = self._best(past.tokens, len(past.tokens), matches, most)
            if other_score > score:
                return others
        return drafts

    def remove(self, seq: Sequence) -> None:
        if self._links.pop(seq, None) is None or not self._requests:
            return
        output = seq.tokens[seq.prompt_len :]
        if len(output) > 2:
            self._keep(_scope(seq), output)

    def _keep(self, scope: Scope, output: list[int]) -> None:
        past = self._past.get(scope)
        if past is None:
            past = self._past[scope] = PastOutputs()
        tenant, size = scope[0], len(output)
        self._tenants.setdefault(tenant, deque()).append(PastOutput(scope, past.add(output), size))
        self._tokens[tenant] = self._tokens.get(tenant, 0) + size
        while (
            sum([len(one) for one in self._tenants.values()]) > self._requests
            or sum(self._tokens.values()) > MAX_PAST_TOKENS
        ):
            self._remove_oldest(max(self._tokens, key=self._tokens.__getitem__))

    def _remove_oldest(self, tenant: bytes) -> None:
        """Remove a tenant's oldest output. It is the tenant with the most tokens, so that a busy
        one does not displace the outputs of others."""
        order = self._tenants[tenant]
        scope, end, size = order.popleft()
        self._tokens[tenant] -= size
        if not order:
            del self._tenants[tenant], self._tokens[tenant]
        past = self._past[scope]
        past.remove_oldest(end)
        if not past.outputs:
            del self._past[scope]
        elif past.first > len(past.tokens) // 2:
            self._past[scope], moved = past.compacted(), past.first - 2
            self._tenants[tenant] = deque(
                [one._replace(end=one.end - moved) if one.scope == scope else one for one in order]
            )

    def _matches(
        self,
        tokens: list[int],
        known: int,
        text: list[int],
        links: PairLinks,
        place: int,
        first: int,
    ) -> list[Match]:
        """Return the latest occurrences of the last tokens before `known` in a text, the longest
        first. place: of the latest one. first: places up to it do not count."""
        found: list[Match] = []
        previous = links.places
        depth = min(self._depth, known)
        last = tokens[known - depth : known]
        while place > first and len(found) < MAX_OCCURRENCES:
            if place >= depth and text[place - depth : place] == last:
                found.append((depth, place))
            else:
                length, most = 2, min(depth, place)
                while length < most and text[place - length - 1] == last[-length - 1]:
                    length += 1
                found.append((length, place))
            place = previous[place]
        found.sort(reverse=True)
        return found

    def _best(
        self, text: list[int], end: int, matches: list[Match], most: int
    ) -> tuple[list[int], float]:
        """Return the drafts of the match length that promises most, and how many it promises."""
        best: list[int] = []
        best_score = 0.0
        for i, (length, _) in enumerate(matches, 1):
            if i < len(matches) and matches[i][0] == length:
                continue  # all matches of a length count together, with longer ones
            limit = min(most, int(self._factor * length))
            if limit > best_score:
                places = [place for _, place in matches[:i]]
                drafts, score = self._follow(text, end, places, limit)
                if score > best_score:
                    best, best_score = drafts, score
        return best, best_score

    def _follow(
        self, text: list[int], end: int, places: list[int], most: int
    ) -> tuple[list[int], float]:
        """Return the most frequent tokens behind some places, and the sum of probabilities."""
        behind = [text[place : place + most] for place in places]
        first = behind[0]
        agree = behind.count(first) == len(places) and max(places) + most <= end
        if agree and SEPARATOR not in first:
            return first, float(most)
        drafts: list[int] = []
        probability, score = 1.0, 0.0
        while len(drafts) < most:
            at = len(drafts)
            if len(places) == 1:  # where the text ends, the drafts themselves repeat
                place = places[0] + at if places[0] + at < end else places[0]
                rest = continuation(text, place, end, most - at)
                if SEPARATOR in rest:
                    rest = rest[: rest.index(SEPARATOR)]
                return drafts + rest, score + probability * len(rest)
            column = [
                token
                for place, ids in zip(places, behind)
                if place + at < end and (token := ids[at]) != SEPARATOR
            ]
            if not column:
                break
            token, count = column[0], column.count(column[0])
            if count < len(column):
                token = max(column, key=column.count)
                count = column.count(token)
            probability *= count / len(places)
            if probability < self._min_probability:
                break
            drafts.append(token)
            score += probability
            if count < len(places):
                live = [i for i, place in enumerate(places) if place + at < end]
                live = [i for i in live if behind[i][at] == token]
                places, behind = [places[i] for i in live], [behind[i] for i in live]
        return drafts, score


def _scope(seq: Sequence) -> Scope:
    return seq.request.tenant, seq.request.cache_root


def build(section: SpeculationSection) -> HostDrafter:
    return SuffixDrafter(
        depth=section.suffix_depth,
        requests=section.suffix_requests,
        factor=section.suffix_factor,
        min_probability=section.suffix_min_probability,
    )
