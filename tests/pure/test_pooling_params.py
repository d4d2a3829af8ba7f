"""PoolingParams: what is allowed, old names, copies."""

import pytest

from quire import PoolingParams
from quire.core.params import RequestOutputKind
from quire.errors import RequestError, Unsupported


@pytest.mark.parametrize("name", ["normalize", "softmax", "activation"])
@pytest.mark.parametrize("value", [True, False])
def test_old_names_of_the_activation(name, value):
    assert PoolingParams(**{name: value}) == PoolingParams(use_activation=value)
    with pytest.raises(RequestError, match=f"{name} is the old name of use_activation"):
        PoolingParams(use_activation=not value, **{name: value})


def test_old_names_of_tasks_stay_valid():
    assert PoolingParams(task="score").task == "classify"
    assert [PoolingParams(task=one).task for one in ("encode", "reward")] == ["encode", "reward"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"task": "embedding"},
            "one of embed, classify, token_embed, token_classify .*'embedding'",
        ),
        ({"use_activation": 1}, "true, false or None, got 1"),
        ({"dimensions": 0}, "an integer >= 1, or None, got 0"),
        ({"dimensions": "8"}, "an integer >= 1"),
        ({"step_tag_id": -1}, "a token id"),
        ({"returned_token_ids": []}, "non-empty list of token ids"),
        ({"output_kind": RequestOutputKind.DELTA}, "one output"),
        ({"truncate_prompt_tokens": 0}, "an integer >= 1, -1 or None, got 0"),
        ({"prompt_name": 5}, "a name, or None"),
    ],
)
def test_invalid_values_are_refused_with_the_allowed_ones(given, message):
    with pytest.raises(RequestError, match=message) as e:
        PoolingParams(**given)
    assert e.value.param == next(iter(given))


@pytest.mark.parametrize(
    "name", ["late_interaction_params", "extra_kwargs", "late_chunking_params"]
)
def test_fields_of_other_features_are_refused_by_name(name):
    assert getattr(PoolingParams(), name) is None
    with pytest.raises(Unsupported, match=name):
        PoolingParams(**{name: {"a": 1}})


def test_a_clone_shares_no_list():
    one = PoolingParams(dimensions=4, returned_token_ids=[1])
    other = one.clone()
    assert other == one
    other.returned_token_ids.append(2)
    other.dimensions = 0
    assert one == PoolingParams(dimensions=4, returned_token_ids=[1])
    with pytest.raises(RequestError, match="dimensions"):
        other.verify()
