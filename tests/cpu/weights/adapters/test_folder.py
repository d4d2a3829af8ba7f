"""Where adapters are looked for, and where they are not."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, errors

from quire.errors import ConfigError, UnknownAdapter
from quire.weights.adapters import folder as folders
from quire.weights.adapters.folder import resolve_adapter_folder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def adapter(folder):
    folder.mkdir(parents=True)
    for name in (CONFIG, TENSORS):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_folder_is_itself(tmp_path, monkeypatch):
    made = adapter(tmp_path / "org" / "one")
    monkeypatch.chdir(tmp_path)
    for name in (made, str(made), f" {made} ", "org/one", "./org/one", f"{made}/../one"):
        assert resolve_adapter_folder(name) == made
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_adapter_folder("~/org/one") == made


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("", ConfigError, "is empty"),
        ("x" * 5000, ConfigError, "too long"),
        ("x" * 500, UnknownAdapter, "there is no adapter"),
        ("a\0b", ConfigError, "too long or has a zero"),
        ("http://127.0.0.1/one", ConfigError, "is an address"),
        ("s3://bucket/one", ConfigError, "is an address"),
        ("/no/such/folder", UnknownAdapter, "there is no adapter '/no/such/folder'"),
        ("~nobody-at-all/x", UnknownAdapter, "there is no adapter '~nobody"),
        ("../nothing", UnknownAdapter, "there is no adapter"),
        ("a/b/c", UnknownAdapter, "there is no adapter"),
        ("two words", UnknownAdapter, "there is no adapter"),
        ("汉字/字", UnknownAdapter, "there is no adapter"),
        ("org/one", UnknownAdapter, "HF_HUB_OFFLINE is set; unset it once"),
        ("{tmp}/file", ConfigError, "is a file; give the folder with adapter_config.json"),
    ],
)
def test_other_names_are_refused(tmp_path, offline, name, error, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=words) as caught:
        resolve_adapter_folder(name.replace("{tmp}", str(tmp_path)))
    assert len(str(caught.value)) < 500


def test_only_allowed_folders_are_read(tmp_path):
    root, other = tmp_path / "allowed", adapter(tmp_path / "other")
    inside = adapter(root / "inside")
    (root / "link").symlink_to(other)
    (root / "again").symlink_to(inside)
    leaking = adapter(root / "leaking")
    (leaking / TENSORS).unlink()
    (leaking / TENSORS).symlink_to(other / TENSORS)
    assert resolve_adapter_folder(inside, allowed=[root]) == inside
    assert resolve_adapter_folder(root / "again", allowed=[root]) == inside
    assert resolve_adapter_folder(other, allowed=[root, tmp_path]) == other
    (tmp_path / "allowed2").mkdir()
    (root / "circle").symlink_to(root / "circle")
    outside = (other, root / "link", root / ".." / "other", tmp_path / "allowed2", "/etc", "/none")
    for path in (*outside, leaking, "../allowed2", root / "circle"):
        with pytest.raises(ConfigError, match=f"may be loaded from: {root}"):
            resolve_adapter_folder(path, allowed=[root])
    with pytest.raises(ConfigError, match="may be loaded from: none"):
        resolve_adapter_folder(inside, allowed=[])
    with pytest.raises(UnknownAdapter, match="not downloaded here"):
        resolve_adapter_folder("org/name", allowed=[root], remote=False)


def cache(root, files=(CONFIG, TENSORS)):
    entry = root / "models--org--one"
    snapshot = entry / "snapshots" / COMMIT
    for folder in (entry / "refs", snapshot):
        folder.mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_the_cache_is_used_offline(tmp_path, offline):
    snapshot = cache(tmp_path)
    assert resolve_adapter_folder("org/one", download_dir=tmp_path) == snapshot
    (snapshot / TENSORS).unlink()
    with pytest.raises(UnknownAdapter, match="HF_HUB_OFFLINE"):
        resolve_adapter_folder("org/one", download_dir=tmp_path)


@dataclass
class Hub:
    """Answers of the hub: files and their sizes, or an error."""

    files: dict
    error: Exception | None = None
    wanted: tuple = ()

    def model_info(self, name, **_):
        if self.error is not None:
            raise self.error
        siblings = [SimpleNamespace(rfilename=k, size=v) for k, v in self.files.items()]
        return SimpleNamespace(siblings=siblings)

    def snapshot_download(self, name, *, allow_patterns, **_):
        self.wanted = tuple(allow_patterns)
        return "/downloaded"


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub

    made = Hub({CONFIG: 10, TENSORS: 1000, "adapter_model.bin": 1000, "training_args.bin": 1})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_only_what_is_read_is_downloaded(tmp_path, hub):
    found = resolve_adapter_folder("org/one", download_dir=tmp_path)
    assert found == Path("/downloaded")
    assert hub.wanted == (CONFIG, TENSORS)
    with pytest.raises(ConfigError, match="has 1000 bytes; adapters may have 999"):
        resolve_adapter_folder("org/one", download_dir=tmp_path, max_bytes=999)
    hub.files = {CONFIG: 10}
    with pytest.raises(ConfigError, match="it is not a LoRA adapter"):
        resolve_adapter_folder("org/one", download_dir=tmp_path)


def test_a_folder_of_a_repository(tmp_path, hub, monkeypatch):
    place = {"allowed": [], "download_dir": tmp_path, "subfolder": "a/b"}
    with pytest.raises(UnknownAdapter, match="has no folder 'a/b'"):
        resolve_adapter_folder("org/one", **place)
    hub.files |= {f"a/b/{TENSORS}": 10}
    with pytest.raises(ConfigError, match=f"has no a/b/{CONFIG}"):
        resolve_adapter_folder("org/one", **place)
    hub.files |= {f"a/b/{CONFIG}": 10}
    adapter(tmp_path / "org" / "one")  # a folder of this machine is not meant
    monkeypatch.chdir(tmp_path)
    assert resolve_adapter_folder("org/one", **place) == Path("/downloaded/a/b")
    assert hub.wanted == (f"a/b/{CONFIG}", f"a/b/{TENSORS}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cache(tmp_path)
    with pytest.raises(UnknownAdapter, match="HF_HUB_OFFLINE"):
        resolve_adapter_folder("org/one", **place)
    made = adapter(snapshot / "a" / "b")
    assert resolve_adapter_folder("org/one", **place) == made


def test_refusals_of_the_hub(tmp_path, hub, monkeypatch):
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    hub.error = errors.RepositoryNotFoundError("gone", response=response)
    with pytest.raises(UnknownAdapter, match="there is no folder and no hub model 'org/one'"):
        resolve_adapter_folder("org/one", download_dir=tmp_path)
    hub.error = OSError("no route")
    with pytest.raises(ConfigError, match="the hub cannot be reached: no route"):
        resolve_adapter_folder("org/one", download_dir=tmp_path)
    snapshot = cache(tmp_path)
    assert resolve_adapter_folder("org/one", download_dir=tmp_path) == snapshot
    monkeypatch.setattr(
        folders.environment, "read", lambda: SimpleNamespace(use_modelscope=True)
    )  # fmt: skip
    with pytest.raises(ConfigError, match="from ModelScope"):
        resolve_adapter_folder("org/one", download_dir=tmp_path)
