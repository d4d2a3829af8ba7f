"""Numbers, sampling fields, prompts: out of range, of another type, too many."""

from tests.abuse.numbers import CASES


def test_no_number_does_harm(victim):
    with victim.unharmed():
        victim.check(CASES)


def test_no_two_cases_have_one_name():
    names = [case.id for case in CASES]
    assert len(set(names)) == len(names)
