"""Forms with files, from bytes."""

import pytest

from quire.errors import RequestError
from quire.server.formats.multipart import FormPart, parse_form

TYPE = 'multipart/form-data; boundary="a b"'


def form(*parts):
    return b"".join(b"--a b\r\n" + one + b"\r\n" for one in parts) + b"--a b--\r\n"


def part(name, data, more=b""):
    return b'Content-Disposition: form-data; name="%s"%s\r\n\r\n%s' % (name, more, data)


def test_fields_and_files_are_read():
    binary = bytes(range(256)) + b"\r\n--a\r\n\r\n"
    body = form(
        part(b"file", binary, b'; filename="a;\\"b\\".wav"\r\nContent-Type: audio/wav'),
        b"content-type: text/plain\r\n" + part(b"x[]", b""),
        part(b"prompt", "Grüße".encode()),
    )
    assert parse_form(TYPE, b"preamble\r\n" + body + b"epilogue") == [
        FormPart("file", binary, 'a;"b".wav'),
        FormPart("x[]", b""),
        FormPart("prompt", "Grüße".encode()),
    ]
    assert parse_form(TYPE, b"--a b--\r\n") == []


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("", b"", "multipart/form-data"),
        ("multipart/form-data", b"", "no boundary"),
        ("multipart/form-data; boundary=" + "x" * 71, b"", "no boundary"),
        (TYPE, b"", "does not end"),
        (TYPE, form(part(b"a", b"b"))[:-6], "does not end"),
        (TYPE, form(b"no headers"), "no headers"),
        (TYPE, form(b"Content-Type: text/plain\r\n\r\nx"), "no name"),
        (TYPE, form(b"Content-Disposition: form-data\r\n\r\nx"), "no name"),
        (TYPE, form(*[part(b"a", b"b")] * 129), "at most 128 fields"),
        (TYPE, form(part(b"a" * 9000, b"b")), "too long"),
    ],
)
def test_malformed_forms_are_refused(kind, body, words):
    with pytest.raises(RequestError, match=words):
        parse_form(kind, body)
