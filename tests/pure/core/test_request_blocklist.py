"""The request blocklist: entries expire, and their number is bounded."""

from quire.core.admission.request_blocklist import RequestBlocklist


def test_an_entry_expires():
    now = [0.0]
    blocklist = RequestBlocklist(for_s=10.0, clock=lambda: now[0])
    blocklist.add(b"a")
    now[0] = 4.0
    blocklist.add(b"b")
    assert (blocklist.seconds_left(b"a"), blocklist.seconds_left(b"b")) == (6.0, 10.0)
    assert blocklist.seconds_left(b"c") is None
    now[0] = 10.0
    assert blocklist.seconds_left(b"a") is None
    assert len(blocklist) == 1
    now[0] = 14.0
    assert blocklist.seconds_left(b"b") is None
    assert not len(blocklist)


def test_adding_again_renews_an_entry():
    now = [0.0]
    blocklist = RequestBlocklist(for_s=10.0, clock=lambda: now[0])
    for name in (b"a", b"b"):
        blocklist.add(name)
    now[0] = 5.0
    blocklist.add(b"a")
    now[0] = 12.0
    assert (blocklist.seconds_left(b"a"), blocklist.seconds_left(b"b")) == (3.0, None)


def test_the_oldest_entry_is_dropped_at_the_limit():
    blocklist = RequestBlocklist(most=2, clock=lambda: 0.0)
    for name in (b"a", b"b", b"c"):
        blocklist.add(name)
    assert [blocklist.seconds_left(name) is None for name in (b"a", b"b", b"c")] == [
        True,
        False,
        False,
    ]


def test_copied_entries_keep_their_expiry():
    now = [0.0]
    first, second = (RequestBlocklist(for_s=10.0, clock=lambda: now[0]) for _ in range(2))
    first.add(b"gone")
    now[0] = 4.0
    first.add(b"a")
    now[0] = 10.0
    first.add(b"b")
    assert first.entries() == [(b"a", 4.0), (b"b", 10.0)]
    for fingerprint, left_s in first.entries():
        second.add(fingerprint, left_s)
    assert second.entries() == first.entries()


def test_an_entry_is_blocked_for_at_most_the_full_time():
    blocklist = RequestBlocklist(for_s=10.0, clock=lambda: 0.0)
    blocklist.add(b"a", 1e9)
    assert blocklist.seconds_left(b"a") == 10.0
