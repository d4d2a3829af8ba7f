"""Marks of items in a rendered chat: each becomes its placeholder, or nothing where there is none."""

from types import SimpleNamespace

import pytest

from quire.media.expand import ReadyItem
from quire.text.marked_media import MarkedTexts


class Processor:
    def __init__(self, form):
        self.form = form

    def expand(self, media, number):
        return None

    def placeholder(self, modality, number):
        return self.form.format(number)


def written(form, text):
    """A text, in which {0} and {1} are the marks of two images, as the prompt of a model."""
    texts = MarkedTexts()
    marks = [texts.add({"type": "image_url"}, f"messages[0].content[{i}]") for i in range(2)]
    pipeline = SimpleNamespace(processor=Processor(form), check_counts=lambda parts: None)
    texts._reader = SimpleNamespace(pipeline=pipeline)
    texts._guard = SimpleNamespace(restore=lambda text: (text, {}))
    texts._parts = [None, None]
    texts._items = {i: ReadyItem("image", 1, b"", None, None) for i in range(2)}
    return texts.write(text.format(*marks))[0]


@pytest.mark.parametrize(
    ("form", "want"),
    [("<image_{}>", "a <image_1>\n<image_2>\nWhat?"), ("", "a What?")],
)
def test_a_mark_and_its_line_break_become_the_placeholder_or_nothing(form, want):
    assert written(form, "a {0}\n{1}\nWhat?") == want
