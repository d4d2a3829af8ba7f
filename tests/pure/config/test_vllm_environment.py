"""Variables of the resolvers of adapters, and the plugins that read them."""

import pytest

from quire.cli.serve_flags import parse
from quire.config.vllm_environment import describe_variables, options_from_environment
from quire.errors import ConfigError

GIVEN = {"VLLM_LORA_RESOLVER_CACHE_DIR": "/x", "VLLM_LORA_RESOLVER_HF_REPO_LIST": "a/b,c/d"}
FOLDER, REPOS = {"lora_resolver_folder": "/x"}, {"lora_resolver_repos": "a/b,c/d"}


@pytest.mark.parametrize(
    ("plugins", "found"),
    [
        (None, FOLDER | REPOS),
        ("lora_filesystem_resolver", FOLDER),
        (" lora_hf_hub_resolver , other", REPOS),
        ("", {}),
        ("other", {}),
    ],
)
def test_plugins_select_resolvers(plugins, found):
    given = GIVEN if plugins is None else GIVEN | {"VLLM_PLUGINS": plugins}
    assert options_from_environment(given) == found


def test_plugins_that_do_not_exist_are_reported():
    plugins = "mine,lora_filesystem_resolver"
    lines = list(describe_variables(GIVEN | {"VLLM_PLUGINS": plugins}))
    assert lines == [(30, "plugins of vLLM are not loaded: mine")]


def test_options_of_resolvers(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_LORA_RESOLVER_HF_REPO_LIST", "a/b,c/d")
    _, server = parse(["m"])
    assert server.lora_resolver_folder == str(tmp_path)
    assert server.lora_resolver_repos == ("a/b", "c/d")
    with pytest.raises(ConfigError, match="lora_resolver_folder must be a folder"):
        parse(["m", "--lora-resolver-folder", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="lora_resolver_repos must be ORG/NAME"):
        parse(["m", "--lora-resolver-repos", "https://x/y"])
