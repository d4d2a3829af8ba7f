"""Adapters of prompts with media of some kind."""

import pytest

from quire.core.types import AdapterRef
from quire.text.media_adapters import MediaAdapters

REFS = {kind: AdapterRef(kind, kind.encode()) for kind in ("image", "audio")}


@pytest.mark.parametrize(
    ("media", "kind"),
    [
        ((), None),
        (("video",), None),
        (("image",), "image"),
        (("image", "image", "video"), "image"),
        (("image", "audio"), None),
        (("audio", "video"), "audio"),
    ],
)
def test_media_of_one_kind_mean_its_adapter(media, kind):
    adapters = MediaAdapters(("image", "audio"))
    assert adapters.choose(media) is None  # nothing serves them yet
    adapters.find = REFS.get
    assert adapters.choose(media) is REFS.get(kind)


def test_an_adapter_that_was_unloaded_is_none():
    adapters = MediaAdapters(("image",))
    adapters.find = {}.get
    assert adapters.choose(("image",)) is None
