"""Inputs that are not tried again: for a while, and not without bound."""

from quire.core.admission.request_blocklist import RequestBlocklist


def test_one_is_here_until_its_time_is_over():
    now = [0.0]
    quarantine = RequestBlocklist(for_s=10.0, clock=lambda: now[0])
    quarantine.add(b"a")
    now[0] = 4.0
    quarantine.add(b"b")
    assert (quarantine.seconds_left(b"a"), quarantine.seconds_left(b"b")) == (6.0, 10.0)
    assert quarantine.seconds_left(b"c") is None
    now[0] = 10.0
    assert quarantine.seconds_left(b"a") is None
    assert len(quarantine) == 1
    now[0] = 14.0
    assert quarantine.seconds_left(b"b") is None
    assert not len(quarantine)


def test_put_again_it_begins_again():
    now = [0.0]
    quarantine = RequestBlocklist(for_s=10.0, clock=lambda: now[0])
    for name in (b"a", b"b"):
        quarantine.add(name)
    now[0] = 5.0
    quarantine.add(b"a")
    now[0] = 12.0
    assert (quarantine.seconds_left(b"a"), quarantine.seconds_left(b"b")) == (3.0, None)


def test_the_oldest_is_forgotten_where_there_are_too_many():
    quarantine = RequestBlocklist(most=2, clock=lambda: 0.0)
    for name in (b"a", b"b", b"c"):
        quarantine.add(name)
    assert [quarantine.seconds_left(name) is None for name in (b"a", b"b", b"c")] == [
        True,
        False,
        False,
    ]


def test_what_one_keeps_is_kept_by_another_as_long():
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


def test_nobody_has_another_keep_it_longer_than_its_own():
    quarantine = RequestBlocklist(for_s=10.0, clock=lambda: 0.0)
    quarantine.add(b"a", 1e9)
    assert quarantine.seconds_left(b"a") == 10.0
