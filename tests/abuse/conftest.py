"""One server for all of this folder: what one test does to it the next would notice."""

import pytest

from tests.abuse.harness import FLAGS, KEY, OTHER_KEY, Victim
from tests.server import running


@pytest.fixture(scope="session")
def victim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("temporary")
    keys = f"{KEY},{OTHER_KEY}"
    options = {"folder": folder, "forked": False, "QUIRE_API_KEY": keys}
    with running.serving("embedded", *FLAGS, **options) as server:
        made = Victim(server, folder)
        yield made
        made.close()
