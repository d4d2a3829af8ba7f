"""docs/models.md is made from the table of architectures."""

from tools.models import PAGE, page


def test_the_page_of_models_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/models.py"
