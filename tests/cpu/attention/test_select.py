import pytest
import torch

from quire.attention.base import BackendCapabilities
from quire.attention.select import BackendRequirements, select_backend, unmet_requirement
from quire.errors import ConfigError


def test_the_first_backend_that_fits_is_chosen_with_its_reason():
    choice = select_backend(
        None, BackendRequirements("cpu", torch.bfloat16, 128, window=True, softcap=True)
    )
    assert choice.name == "paged"
    assert choice.reasons == ("paged: first in order that fits",)


def test_a_device_no_backend_serves_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="paged: runs on cpu, cuda, not on mps"):
        select_backend(None, BackendRequirements("mps", torch.bfloat16, 128))


def test_latents_have_a_backend_of_their_own():
    choice = select_backend(None, BackendRequirements("cuda", torch.bfloat16, 576, latent=True))
    assert choice.name == "mla"
    assert choice.reasons[0] == "paged: keeps keys and values, not latents"
    with pytest.raises(ConfigError, match="mla: has no cache of 8 bits"):
        select_backend(
            None, BackendRequirements("cuda", torch.bfloat16, 576, latent=True, coded_cache=True)
        )
    with pytest.raises(ConfigError, match="mla: keeps latents only"):
        select_backend("mla", BackendRequirements("cuda", torch.bfloat16, 128))


def test_an_unknown_backend_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean paged"):
        select_backend("pagd", BackendRequirements("cpu", torch.float32, 64))


@pytest.mark.parametrize(
    ("needs", "word"),
    [
        (BackendRequirements("cpu", torch.float64, 64), "float64"),
        (BackendRequirements("cpu", torch.float32, 512), "512"),
        (BackendRequirements("cpu", torch.float32, 64, window=True), "window"),
        (BackendRequirements("cpu", torch.float32, 64, softcap=True), "soft cap"),
        (BackendRequirements("cpu", torch.float32, 64, latent=True), "latents"),
        (BackendRequirements("cpu", torch.float32, 64, coded_cache=True), "8 bits"),
    ],
)
def test_each_lack_is_named(needs, word):
    caps = BackendCapabilities(frozenset({"cpu"}), frozenset({torch.float32}), False, False, 256)
    assert word in unmet_requirement(caps, needs)
