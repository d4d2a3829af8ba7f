"""The harness sees what it is there to see."""

from tests.abuse.harness import Case


def test_a_plain_request_is_answered_by_every_dialect_and_leaves_nothing(victim):
    with victim.unharmed():
        answers = victim.check([Case(id="plain", origin="-", expect="answered")])
    assert len(answers) == 11
