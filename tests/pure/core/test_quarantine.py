"""Inputs that are not tried again: for a while, and not without bound."""

from quire.core.quarantine import Quarantine


def test_one_is_here_until_its_time_is_over():
    now = [0.0]
    quarantine = Quarantine(for_s=10.0, clock=lambda: now[0])
    quarantine.put(b"a")
    now[0] = 4.0
    quarantine.put(b"b")
    assert (quarantine.left_s(b"a"), quarantine.left_s(b"b")) == (6.0, 10.0)
    assert quarantine.left_s(b"c") is None
    now[0] = 10.0
    assert quarantine.left_s(b"a") is None
    assert len(quarantine) == 1
    now[0] = 14.0
    assert quarantine.left_s(b"b") is None
    assert not len(quarantine)


def test_put_again_it_begins_again():
    now = [0.0]
    quarantine = Quarantine(for_s=10.0, clock=lambda: now[0])
    for name in (b"a", b"b"):
        quarantine.put(name)
    now[0] = 5.0
    quarantine.put(b"a")
    now[0] = 12.0
    assert (quarantine.left_s(b"a"), quarantine.left_s(b"b")) == (3.0, None)


def test_the_oldest_is_forgotten_where_there_are_too_many():
    quarantine = Quarantine(most=2, clock=lambda: 0.0)
    for name in (b"a", b"b", b"c"):
        quarantine.put(name)
    assert [quarantine.left_s(name) is None for name in (b"a", b"b", b"c")] == [True, False, False]


def test_what_one_keeps_is_kept_by_another_as_long():
    now = [0.0]
    first, second = (Quarantine(for_s=10.0, clock=lambda: now[0]) for _ in range(2))
    first.put(b"gone")
    now[0] = 4.0
    first.put(b"a")
    now[0] = 10.0
    first.put(b"b")
    assert first.kept() == [(b"a", 4.0), (b"b", 10.0)]
    for fingerprint, left_s in first.kept():
        second.put(fingerprint, left_s)
    assert second.kept() == first.kept()


def test_nobody_has_another_keep_it_longer_than_its_own():
    quarantine = Quarantine(for_s=10.0, clock=lambda: 0.0)
    quarantine.put(b"a", 1e9)
    assert quarantine.left_s(b"a") == 10.0
