"""Finding a model: folders, a hub cache laid out by hand, no network, a stand-in for ModelScope."""

import json
import sys
import types
from dataclasses import replace
from fnmatch import fnmatch

import pytest
from huggingface_hub import constants, errors

import quire.weights.hub
from quire import env as environment
from quire.errors import ConfigError
from quire.weights.files import resolve_model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
ENV = replace(environment.read(), use_modelscope=False)
SCOPE = replace(ENV, use_modelscope=True)


def cache(
    root, name="org/model", commit=COMMIT, ref="main", files=("config.json", "model.safetensors")
):
    """A hub cache entry: blobs, a ref, and a snapshot of links to the blobs."""
    entry = root / ("models--" + name.replace("/", "--"))
    snapshot = entry / "snapshots" / commit
    for folder in (entry / "blobs", entry / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (entry / "refs" / ref).write_text(commit)
    for file in files:
        blob = entry / "blobs" / f"{commit[:4]}-{file}"
        blob.write_text("{}")
        (snapshot / file).symlink_to(blob)
    return snapshot


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def online(monkeypatch):
    """Online as far as the code can see; a test sets the hub's answers."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


# --- folders ---


def test_a_folder_with_a_config_is_itself(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_folder(tmp_path, env=ENV) == tmp_path
    assert resolve_model_folder(str(tmp_path) + "/", env=SCOPE) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model_folder(tmp_path.name, env=ENV).samefile(tmp_path)


def test_a_tokenizer_s_folder_needs_no_config(tmp_path):
    assert resolve_model_folder(tmp_path, env=ENV, want="tokenizer") == tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        ("/no/such/folder", "there is no folder"),
        ("./nothing", "there is no folder"),
        ("a/b/c", "there is no folder"),
        ("{tmp}/other", "exists but has no config.json"),
        ("{tmp}", "m.gguf is empty"),
        ("{tmp}/file", "is a file"),
        ("{tmp}/m.gguf", "m.gguf is empty"),
        ("two words", "not a folder or a name"),
    ],
)
def test_names_that_are_not_models_are_distinguished(tmp_path, offline, name, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "m.gguf").write_text("")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=words):
        resolve_model_folder(name.format(tmp=tmp_path), env=ENV)


# --- the cache, offline ---


def test_a_cached_model_is_found_offline(tmp_path, offline):
    snapshot = cache(tmp_path)
    assert resolve_model_folder("org/model", download_dir=tmp_path, env=ENV) == snapshot


def test_the_cache_folder_is_the_hub_s_unless_given(tmp_path, offline, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = cache(tmp_path)
    assert resolve_model_folder("org/model", env=ENV) == snapshot


def test_a_revision_is_a_branch_or_a_commit(tmp_path, offline):
    main, dev = cache(tmp_path), cache(tmp_path, commit=OTHER, ref="dev")
    for revision, snapshot in ((None, main), ("main", main), ("dev", dev), (OTHER, dev)):
        assert (
            resolve_model_folder("org/model", revision=revision, download_dir=tmp_path, env=ENV)
            == snapshot
        )
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        resolve_model_folder("org/model", revision="gone", download_dir=tmp_path, env=ENV)


def test_offline_and_not_cached_is_a_clear_error(tmp_path, offline):
    with pytest.raises(
        ConfigError, match=r"'org/model' is not a folder here, and not in .*HF_HUB_OFFLINE is set"
    ):
        resolve_model_folder("org/model", download_dir=tmp_path, env=ENV)


def test_a_half_downloaded_model_is_reported_with_its_missing_file(tmp_path, offline):
    snapshot = cache(tmp_path, files=("config.json", "x1.safetensors"))
    where = {"a": "x1.safetensors", "b": "x2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ConfigError, match=r"lacks x2\.safetensors"):
        resolve_model_folder("org/model", download_dir=tmp_path, env=ENV)
    assert (
        resolve_model_folder("org/model", download_dir=tmp_path, env=ENV, want="config") == snapshot
    )


def test_a_cached_tokenizer_needs_no_weights(tmp_path, offline):
    snapshot = cache(tmp_path, files=("tokenizer.json",))
    assert (
        resolve_model_folder("org/model", download_dir=tmp_path, env=ENV, want="tokenizer")
        == snapshot
    )


# --- the hub ---


def answers(monkeypatch, *, files=(), error=None, seen=None, root=None):
    """Let the hub list `files` and 'download' them, or raise."""

    class Api:
        def __init__(self, token=None):
            self.token = token

        def model_info(self, name, *, revision, timeout):
            if error is not None:
                raise error
            return types.SimpleNamespace(
                siblings=[types.SimpleNamespace(rfilename=f) for f in files]
            )

    def download(name, **given):
        seen.update(given, name=name)
        return str(cache(root, name))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def http_error(kind):
    response = types.SimpleNamespace(headers={}, status_code=404, url="u", request=None)
    made = kind.__new__(kind, "said the hub")
    made.args, made.response = ("said the hub",), response
    return made


def test_only_what_is_needed_is_fetched(tmp_path, online, monkeypatch):
    seen = {}
    files = ("config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5")
    answers(monkeypatch, files=files, seen=seen, root=tmp_path)
    found = resolve_model_folder(
        "org/model", token="t", revision="dev", download_dir=tmp_path, env=ENV
    )
    assert found.name == COMMIT
    assert (seen["token"], seen["revision"], seen["cache_dir"]) == ("t", "dev", tmp_path)
    assert "model.safetensors" in seen["allow_patterns"]
    assert not any("bin" in p or "h5" in p for p in seen["allow_patterns"])
    assert seen["ignore_patterns"] == ["original/**/*"]


def write_modules(folder, *kinds):
    kinds = ("Transformer", "Pooling", *kinds)
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def test_the_weights_of_modules_are_fetched_and_no_others(tmp_path, online, monkeypatch):
    seen, hub = {}, tmp_path / "modules"
    hub.mkdir()
    write_modules(hub, "Dense", "Normalize")
    files = (
        *("config.json", "modules.json", "model.safetensors", "1_Pooling/config.json"),
        *("2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"),
        *("2_Dense_8192/model.safetensors", "onnx/model.onnx"),
    )
    answers(monkeypatch, files=files, seen=seen, root=tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda name, file, **given: str(hub / file)
    )
    resolve_model_folder("org/model", download_dir=tmp_path, env=ENV)
    weights = [one for one in seen["allow_patterns"] if one.endswith((".safetensors", ".bin"))]
    assert weights == ["model.safetensors", "2_Dense/model.safetensors"]
    for one in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert any(fnmatch(one, pattern) for pattern in seen["allow_patterns"])
    write_modules(hub, "WordWeights")  # which a model that generates does not need
    resolve_model_folder("org/model", download_dir=tmp_path, env=ENV)
    weights = [one for one in seen["allow_patterns"] if one.endswith((".safetensors", ".bin"))]
    assert weights == ["model.safetensors"]


def test_a_cached_model_without_the_weights_of_a_module_is_incomplete(tmp_path, offline):
    snapshot = cache(tmp_path)
    write_modules(snapshot, "Dense")
    with pytest.raises(ConfigError, match=r"lacks 2_Dense/model\.safetensors"):
        resolve_model_folder("org/model", download_dir=tmp_path, env=ENV)
    (snapshot / "2_Dense").mkdir()
    (snapshot / "2_Dense/pytorch_model.bin").write_text("")
    assert resolve_model_folder("org/model", download_dir=tmp_path, env=ENV) == snapshot


def test_a_cached_pinned_commit_needs_no_network(tmp_path, online, monkeypatch):
    snapshot = cache(tmp_path)
    answers(monkeypatch, error=AssertionError("asked the hub"))
    assert (
        resolve_model_folder("org/model", revision=COMMIT, download_dir=tmp_path, env=ENV)
        == snapshot
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "is gated"),
        (errors.RevisionNotFoundError, "has no revision 'dev'"),
        (errors.RepositoryNotFoundError, "no folder and no hub model"),
    ],
)
def test_the_hub_s_refusals_are_distinguished(tmp_path, online, monkeypatch, kind, words):
    answers(monkeypatch, error=http_error(kind))
    with pytest.raises(ConfigError, match=words):
        resolve_model_folder("org/model", revision="dev", download_dir=tmp_path, env=ENV)


def test_without_a_network_the_cached_model_serves_with_a_warning(
    tmp_path, online, monkeypatch, caplog
):
    answers(monkeypatch, error=OSError("no route to host"))
    with pytest.raises(ConfigError, match="cannot be reached: no route to host"):
        resolve_model_folder("org/model", download_dir=tmp_path, env=ENV)
    snapshot = cache(tmp_path)
    assert resolve_model_folder("org/model", download_dir=tmp_path, env=ENV) == snapshot
    assert "no route to host" in caplog.text


# --- ModelScope ---


def scope(monkeypatch, function, files=None):
    """A stand-in for the package. files(**given): those of a repository."""
    module, api = (types.ModuleType(f"modelscope.hub.{n}") for n in ("snapshot_download", "api"))
    module.snapshot_download = function
    api.HubApi = lambda: types.SimpleNamespace(get_model_files=files)
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, api.__name__, api)


def test_modelscope_is_used_when_the_environment_sets_it(tmp_path, monkeypatch):
    seen = {}

    def download(**given):
        seen.update(given)
        for file in ("config.json", "model.safetensors"):
            (tmp_path / file).write_text("{}")
        return str(tmp_path)

    scope(monkeypatch, download)
    assert (
        resolve_model_folder("org/model", revision="v1", download_dir=tmp_path, env=SCOPE)
        == tmp_path
    )
    assert (seen["model_id"], seen["revision"]) == ("org/model", "v1")
    assert seen["cache_dir"] == str(tmp_path)
    assert seen["ignore_file_pattern"] == ["original/**/*"]
    resolve_model_folder("org/model", env=SCOPE, want="config")
    assert "*.safetensors" in seen["ignore_file_pattern"]


def test_without_the_package_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="pip install modelscope"):
        resolve_model_folder("org/model", env=SCOPE)


def test_what_modelscope_raises_is_passed_on_as_a_config_error(monkeypatch):
    def download(**given):
        raise ValueError("no such model there")

    scope(monkeypatch, download)
    with pytest.raises(ConfigError, match="no such model there"):
        resolve_model_folder("org/model", env=SCOPE)


PARTS = [f"m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]


@pytest.fixture
def gguf_scope(tmp_path, monkeypatch):
    """A repository of GGUF files: what was requested of it, and a folder for its files."""
    requests = []

    def files(**given):
        requests.append(given)
        listed = [{"Path": name, "Type": "blob"} for name in [*PARTS, "m-Q8_0.gguf"]]
        return [{"Path": "sub", "Type": "tree"}, *listed]

    def download(**given):
        requests.append(given)
        for name in PARTS:
            if name in given["allow_file_pattern"]:
                (tmp_path / name).write_text("")
        return str(tmp_path)

    scope(monkeypatch, download, files)
    monkeypatch.setattr(quire.weights.hub, "folder_of", lambda path, cache: path)
    return requests


def test_a_part_of_the_name_chooses_gguf_files_of_modelscope(tmp_path, gguf_scope, online):
    got = resolve_model_folder("org/model:q4_k_m", revision="v1", env=SCOPE)
    assert got == tmp_path / PARTS[0]
    listing, download = gguf_scope
    assert listing == {"model_id": "org/model", "recursive": True, "revision": "v1"}
    assert download["allow_file_pattern"] == PARTS
    assert not download["local_files_only"]
    assert resolve_model_folder(f"org/model/{PARTS[0]}", env=SCOPE) == got
    assert "revision" not in gguf_scope[2]
    with pytest.raises(ConfigError, match=r"org/model has no model 'Q2_K': m-Q4_K_M.*, m-Q8_0"):
        resolve_model_folder("org/model:Q2_K", env=SCOPE)


def test_gguf_files_of_modelscope_that_are_cached(tmp_path, gguf_scope, offline):
    for name in PARTS:
        (tmp_path / name).write_text("")
    assert resolve_model_folder("org/model:Q4_K_M", env=SCOPE) == tmp_path / PARTS[0]
    (request,) = gguf_scope
    assert request["local_files_only"]
    (tmp_path / PARTS[1]).unlink()
    with pytest.raises(ConfigError, match="lacks m-Q4_K_M-00002-of-00002"):
        resolve_model_folder("org/model:Q4_K_M", env=SCOPE)


def test_gguf_files_of_modelscope_need_its_package(monkeypatch, online):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="pip install modelscope"):
        resolve_model_folder("org/model:Q4_K_M", env=SCOPE)


def test_the_model_that_ships_with_quire_has_a_name_everywhere(tmp_path, monkeypatch):
    """As `quire quantize embedded OUT` and the tokenizer of a benchmark ask for it."""
    monkeypatch.chdir(tmp_path)
    assert (resolve_model_folder("embedded") / "model.safetensors").is_file()
