"""PoolerConfig: JSON, dicts, objects and names of earlier releases."""

import dataclasses
import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import as_vllm
from quire.config.options import Options
from quire.config.pooler_config import PoolerConfig
from quire.errors import ConfigError


@dataclass
class Theirs:
    pooling_type: str = "LAST"
    normalize: bool | None = False
    softmax: bool | None = None


def test_every_form_means_the_same():
    want = PoolerConfig(seq_pooling_type="LAST", pooling_type="LAST", use_activation=False)
    fields = {"pooling_type": "last", "normalize": False}
    for given_value in (fields, json.dumps(fields), Theirs(), want, PoolerConfig(**fields)):
        assert PoolerConfig.parse(given_value) == want
    assert PoolerConfig.parse(want.non_default()) == want
    assert PoolerConfig.parse({"use_activation": None}) == PoolerConfig()


def test_an_option_takes_every_form():
    for name in ("pooler_config", "override_pooler_config"):
        for value in ('{"pooling_type": "MEAN"}', PoolerConfig(pooling_type="MEAN")):
            found = Options.from_flat({name: value}).pooling.pooler_config
            assert found == {"pooling_type": "MEAN", "seq_pooling_type": "MEAN"}


def test_scripts_import_it_by_the_name_of_vllm():
    as_vllm.install()
    try:
        from vllm.config import PoolerConfig as FromVllm
    finally:
        as_vllm.uninstall()
    assert FromVllm is PoolerConfig


def test_old_tasks():
    assert PoolerConfig(task="score").task == "classify"
    assert PoolerConfig(task="reward").task is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pooling_type": "MIDDLE"}, "pooling_type must be CLS or LAST .* got 'MIDDLE'"),
        ({"seq_pooling_type": "ALL"}, "seq_pooling_type must be CLS"),
        ({"tok_pooling_type": "CLS"}, "tok_pooling_type must be ALL or STEP"),
        ({"pooling_type": "CLS", "seq_pooling_type": "MEAN"}, "differ: give one of them"),
        ({"task": "generate"}, "task must be embed or classify"),
        ({"dimensions": 0}, "dimensions must be an integer >= 1, got 0"),
        ({"dimensions": True}, "dimensions must be an integer"),
        ({"logit_sigma": 0}, "logit_sigma must be a finite number, not 0"),
        ({"logit_mean": float("nan")}, "logit_mean must be a finite number"),
        ({"logit_mean": 10**400}, "logit_mean must be a finite number"),
        ({"returned_token_ids": []}, "a list of integers >= 0"),
        ({"returned_token_ids": [1, "2"]}, "a list of integers >= 0"),
        ({"use_activation": "yes"}, "use_activation must be true or false"),
        ({"dimension": 3}, "no field 'dimension'; did you mean dimensions"),
        ({"zzz": 3}, "no field 'zzz'; allowed: task"),
        ({"normalize": True, "softmax": False}, "softmax is another name of use_activation"),
        ("{", "must be a JSON object"),
        ("3", "must be a JSON object, got 3"),
        (5, "must be a JSON object, got 5"),
    ],
)
def test_what_is_not_allowed(fields, words):
    with pytest.raises(ConfigError, match=words):
        PoolerConfig.parse(fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
NAMES = st.sampled_from([one.name for one in dataclasses.fields(PoolerConfig)] + ["normalize", "x"])


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_dict_gives_a_config_or_a_config_error(fields):
    try:
        found = PoolerConfig.parse(fields)
    except ConfigError:
        return
    assert PoolerConfig.parse(found.non_default()) == found
