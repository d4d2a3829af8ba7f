"""Formats of strings as regular expressions, each within what validators take.

Where a format is wider than a regular expression, or validators differ, the expression is
narrower: every text that it matches is of the format. A format without an entry is refused.
"""

from __future__ import annotations

import functools

from quire.grammar.automata import regex_ast as regex
from quire.grammar.automata.regex_ast import RegexExpr

_MONTHS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:{_MONTHS})|{_LEAP}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

_N = "[0-9]{1,9}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = f"P(?:(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_CLOCK})?|{_CLOCK}|{_N}W)"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_PLAIN_LABEL = "[A-Za-z0-9]{1,30}(?:-[A-Za-z0-9]{1,30})?"
_IDN_HOSTNAME = rf"{_PLAIN_LABEL}(?:\.{_PLAIN_LABEL})*"
"""Without "--" in places where it has a meaning."""
_LOCAL = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_LOCAL}(?:\.{_LOCAL})*@{_HOSTNAME}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """All places of "::", and the end as two groups or as an IPv4 address."""
    end = f"(?:{_H16}:{_H16}|{_IPV4})"
    cases = [f"(?:{_H16}:){{6}}{end}"]
    for before in range(6):  # groups before "::", then at most 5 - before and the end
        lead = f"(?:{_H16}:){{{before}}}" if before else ":"
        rest = 5 - before
        cases.append(f"{lead}:(?:{_H16}:){{0,{rest}}}{end}" if rest else f"{lead}:{end}")
    for before in range(8):  # "::" and at most one group behind it
        lead = f"(?:{_H16}:){{{before}}}" if before else ":"
        cases.append(f"{lead}:(?:{_H16})?" if before < 7 else f"{lead}:")
    return "|".join(cases)


_PCHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_USER = "(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*"
_REG_NAME = "(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{2})+"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_ABSOLUTE = f"/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_NO_COLON = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"


def _uri(host: str, reference: bool) -> str:
    authority = f"(?:{_USER}@)?(?:{host})(?::[0-9]{{1,5}})?"
    path = f"//{authority}(?:/{_PCHAR}*)*|//(?:/{_PCHAR}*)+|{_ABSOLUTE}"
    uri = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{path}|{_PCHAR}+(?:/{_PCHAR}*)*){_TAIL}"
    relative = f"(?:{path}|{_NO_COLON}+(?:/{_PCHAR}*)*|){_TAIL}"
    return f"(?:{uri}|{relative})" if reference else uri


_HOST = _REG_NAME
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,2}|\*)?"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}}"
_URI_TEMPLATE = rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|%[0-9A-Fa-f]{{2}}|{_EXPRESSION})*"

_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"


def _uuid_of(version: int) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


def _base64(signs: str) -> str:
    c = f"[A-Za-z0-9{signs}]"
    return f"(?:{c}{{4}})*(?:{c}[AQgw]==|{c}{{2}}[AEIMQUYcgkosw048]=)?"


_CLASS = r"\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ ]|\\[dws.])+\]"
_ATOM = rf"(?:[A-Za-z0-9 _:;,@#%&~=<>!'/-]|\\[dDwWsSnrt.^$*+?()\[\]{{}}|/-]|\.|{_CLASS})"
_ATOMS = rf"(?:{_ATOM}(?:[*+?]|\{{[0-9]\}})?)*"
_REGEX = rf"\^?{_ATOMS}(?:\({_ATOMS}(?:\|{_ATOMS})*\){_ATOMS})*\$?"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _IDN_HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "ipvanyaddress": f"{_IPV4}|{_ipv6()}",
    "ipv4interface": rf"{_IPV4}/(?:[12]?[0-9]|3[0-2])",
    "uri": _uri(_HOST, False),
    "url": _uri(_HOST, False),
    "iri": _uri(_REG_NAME, False),
    "uri-reference": _uri(_HOST, True),
    "iri-reference": _uri(_REG_NAME, True),
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]?)(?:#|{_POINTER})",
    "uuid": _UUID,
    **{f"uuid{version}": _uuid_of(version) for version in (1, 3, 4, 5, 6, 7, 8)},
    "regex": _REGEX,
    "base64": _base64("+/"),
    "base64url": _base64("_-"),
    "byte": _base64("+/"),
    "path": r"[^\x00]+",
    "file-path": r"[^\x00]+",
    "directory-path": r"[^\x00]+",
}
MOST_LENGTH = {"hostname": 253, "idn-hostname": 253, "email": 254, "idn-email": 254}
"""Characters, where the format has a limit beside its expression."""

NO_EFFECT = frozenset({"password", "binary", "float", "double", "decimal"})
"""Formats of how a value is shown or kept, not of which it is."""

_BITS = {8: "8", 16: "16", 32: "32", 64: "64"}
INTEGERS = {f"int{name}": (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n, name in _BITS.items()} | {
    f"uint{name}": (0, 2**n - 1) for n, name in _BITS.items()
}
"""The least and the greatest, of formats of integers."""


KNOWN = frozenset({*_PATTERNS, *INTEGERS, *NO_EFFECT})
"""Formats that are enforced, or that allow every value."""


@functools.cache
def node(name: str) -> RegexExpr | None:
    """What a string of the format is, as a whole; None: not a format of strings."""
    pattern = _PATTERNS.get(name)
    return None if pattern is None else regex.parse_regex(pattern)
