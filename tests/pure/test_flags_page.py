"""docs/flags.md is made from the options."""

from tools.flags import PAGE, page


def test_the_page_of_flags_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/flags.py"
