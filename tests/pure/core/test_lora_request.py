"""LoRARequest, as scripts for other engines make it."""

import pytest

import quire
from quire.core.params import LoRARequest
from quire.errors import RequestError


def test_its_name_is_its_identity():
    one = LoRARequest("sql", 1, "/x")
    assert one == LoRARequest("sql", 2, "/y")
    assert one != LoRARequest("chat", 1, "/x")
    assert one != "sql"
    assert len({one, LoRARequest("sql", 2, "/y")}) == 1
    assert (one.name, one.path, one.adapter_id) == ("sql", "/x", 1)
    assert (one.base_model_name, one.load_inplace, one.is_3d_lora_weight) == (None, False, False)
    assert quire.LoRARequest is LoRARequest


def test_older_names_of_its_fields():
    one = LoRARequest(lora_name="a", lora_int_id=1, lora_local_path="/x", long_lora_max_len=4096)
    assert one.lora_path == "/x"
    assert LoRARequest("a", 1, "/x", lora_local_path="/y").lora_path == "/x"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (("a", 0, "/x"), "lora_int_id"),
        (("a", -1, "/x"), "lora_int_id"),
        (("a", True, "/x"), "lora_int_id"),
        (("a", "1", "/x"), "lora_int_id"),
        (("", 1, "/x"), "lora_name"),
        (("a", 1, ""), "lora_path"),
        (("a", 1), "lora_path"),
    ],
)
def test_what_is_refused(given, word):
    with pytest.raises(RequestError, match=word) as caught:
        LoRARequest(*given)
    assert isinstance(caught.value, ValueError)
