"""A strict reader of event streams, by the letter of the HTML standard, section "Server-sent
events": bytes in any cut, LF, CR or CRLF, one leading BOM, comments, fields with one optional space,
events only at blank lines. What no server should send is an error here where browsers forgive it.
"""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    type: str
    data: str
    last_id: str = ""


class Reader:
    """push() bytes, get events; close() says whether the stream ended between two events."""

    def __init__(self):
        self._bytes = b""
        self._begun = False
        self._after_cr = False
        self._data = []
        self._type = ""
        self._id = ""
        self.comments = []
        self.retry = None

    def push(self, chunk):
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        self._bytes += chunk
        if not self._begun:
            if len(self._bytes) < 3 and b"\xef\xbb\xbf".startswith(self._bytes):
                return []
            self._bytes = self._bytes.removeprefix(b"\xef\xbb\xbf")
            self._begun = True
        events = []
        while (line := self._line()) is not None:
            if (event := self._take(line.decode("utf-8", errors="strict"))) is not None:
                events.append(event)
        return events

    def close(self):
        assert not self._bytes, f"cut within a line: {self._bytes[:100]!r}"
        assert not self._data, f"cut within an event: {self._data}"

    def _line(self):
        places = [at for at in (self._bytes.find(b"\n"), self._bytes.find(b"\r")) if at >= 0]
        if not places:
            return None
        at = min(places)
        line, end, rest = self._bytes[:at], self._bytes[at : at + 1], self._bytes[at + 1 :]
        if end == b"\r":
            if not rest:
                self._after_cr = True
            rest = rest.removeprefix(b"\n")
        self._bytes = rest
        return line

    def _take(self, line):
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            self.comments.append(line[1:])
            return None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._type = value
        elif field == "id":
            assert "\0" not in value
            self._id = value
        elif field == "retry":
            assert value.isdecimal(), line
            self.retry = int(value)
        else:
            raise AssertionError(f"a field of no event stream: {line[:100]!r}")
        return None

    def _dispatch(self):
        data, self._data = self._data, []
        kind, self._type = self._type, ""
        if not data:
            assert not kind, f"an event {kind!r} without data is dropped by readers"
            return None
        return Event(kind or "message", "\n".join(data), self._id)


def read(chunks):
    """All events of a stream that must end whole."""
    reader = Reader()
    events = [event for chunk in chunks for event in reader.push(chunk)]
    reader.close()
    return events


def openai_chunks(events):
    """The JSON of each event; the last must be [DONE], and nothing may come after it."""
    assert events[-1].data == "[DONE]", events[-1]
    assert all(one.type == "message" for one in events)
    return [json.loads(one.data) for one in events[:-1]]


def named_events(events):
    """(type, JSON) of events whose name and `type` must agree; no [DONE]."""
    found = [(one.type, json.loads(one.data)) for one in events]
    for name, data in found:
        assert data["type"] == name, (name, data)
    return found
