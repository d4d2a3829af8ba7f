"""Compiled kernels travel as one file, and only files that the store itself would write come in."""

import io
import json
import tarfile
import zipfile

import pytest

from quire.cli import main
from quire.errors import ConfigError
from quire.platform import kernel_store as store

PLACE = "triton-3.6.0-sm90"


@pytest.fixture
def cache(tmp_path):
    """A cache folder with two kernels as Triton lays them out, and some litter."""
    for key in ("AAA", "BBB"):
        folder = tmp_path / "kernels" / PLACE / key
        folder.mkdir(parents=True)
        (folder / "k.cubin").write_bytes(key.encode() * 100)
        (folder / "k.json").write_text("{}")
        files = {name: str(folder / name) for name in ("k.cubin", "k.json")}
        (folder / "__grp__k.json").write_text(json.dumps({"child_paths": files}))
    (tmp_path / "kernels" / PLACE / "CCC").mkdir()  # begun, never finished
    (tmp_path / "kernels" / PLACE / "CCC" / "k.ttir").write_text("half")
    return tmp_path


def test_a_folder_names_the_compiler_and_the_gpu(tmp_path):
    assert store.kernel_folder(tmp_path, "3.6.0", (9, 0)) == tmp_path / "kernels" / PLACE


def test_where_the_folder_cannot_be_made_it_is_a_temporary_one(tmp_path, caplog):
    assert store.make_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "file").write_text("")
    other = store.make_folder(tmp_path / "file" / "kernels")
    assert other.is_dir()
    assert not list(other.iterdir())
    assert "every start compiles" in caplog.text
    other.rmdir()


def test_info_counts_whole_kernels_only(cache):
    (found,) = store.store_info(cache)
    assert (found.name, found.kernels) == (PLACE, 2)
    assert found.bytes > 600


def test_a_packed_cache_is_whole_elsewhere_with_paths_of_that_place(cache, tmp_path):
    other = tmp_path / "other"
    assert store.pack(cache, tmp_path / "k.tgz") == 2
    assert store.unpack(tmp_path / "k.tgz", other) == 2
    assert store.store_info(other)[0].kernels == 2
    folder = other / "kernels" / PLACE / "AAA"
    assert (folder / "k.cubin").read_bytes() == b"AAA" * 100
    paths = json.loads((folder / "__grp__k.json").read_text())["child_paths"]
    assert paths == {name: str(folder / name) for name in ("k.cubin", "k.json")}


def test_an_empty_cache_is_not_packed(tmp_path):
    with pytest.raises(ConfigError, match="holds no compiled kernels"):
        store.pack(tmp_path, tmp_path / "k.tgz")


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/evil", "triton-x/AAA/../../../evil", "other/AAA/k", "triton-x/k"]
)
def test_an_archive_with_other_files_is_refused(tmp_path, name):
    with tarfile.open(tmp_path / "bad.tgz", "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = 4
        archive.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(ConfigError, match="never makes"):
        store.unpack(tmp_path / "bad.tgz", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_link_in_an_archive_is_refused(tmp_path):
    with tarfile.open(tmp_path / "bad.tgz", "w:gz") as archive:
        member = tarfile.TarInfo(f"{PLACE}/AAA/k")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(ConfigError, match="never makes"):
        store.unpack(tmp_path / "bad.tgz", tmp_path / "cache")


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "x").write_text("no archive")
    with pytest.raises(ConfigError, match="not an archive"):
        store.unpack(tmp_path / "x", tmp_path)
    with pytest.raises(ConfigError, match="not an archive"):
        store.unpack(tmp_path / "absent", tmp_path)


def test_an_archive_cut_short_is_refused(cache, tmp_path):
    store.pack(cache, tmp_path / "k.tgz")
    (tmp_path / "short.tgz").write_bytes((tmp_path / "k.tgz").read_bytes()[:150])
    with pytest.raises(ConfigError, match="not an archive"):
        store.unpack(tmp_path / "short.tgz", tmp_path / "other")


def test_the_command_shows_packs_and_clears(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_CACHE", str(cache))
    assert main(["cache", "info"]) == 0
    assert f"{PLACE}: 2 kernels" in capsys.readouterr().out
    assert main(["cache", "pack", str(tmp_path / "k.tgz")]) == 0
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kernels"][0]["kernels"] == 0
    assert main(["cache", "unpack", str(tmp_path / "k.tgz")]) == 0
    assert "unpacked 2" in capsys.readouterr().out


def test_an_installed_wheel_adds_its_kernels_once(cache, tmp_path, monkeypatch):
    (wheel,) = store.write_wheels(cache, tmp_path / "dist", "1.2")
    assert wheel.name == "quire_llm_kernels_sm90-1.2-py3-none-any.whl"
    site, other = tmp_path / "site", tmp_path / "other"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
        record = opened.read("quire_llm_kernels_sm90-1.2.dist-info/RECORD").decode()
        names = {line.split(",")[0] for line in record.splitlines()}
        assert names == set(opened.namelist())
    assert store.add_installed(other, (9, 0)) == 0  # not installed
    monkeypatch.syspath_prepend(str(site))
    assert store.add_installed(other, (8, 0)) == 0
    assert store.add_installed(other, (9, 0)) == 2
    assert store.store_info(other)[0].kernels == 2
    assert store.add_installed(other, (9, 0)) == 0


def test_a_broken_wheel_of_kernels_is_a_warning(cache, tmp_path, monkeypatch, caplog):
    package = tmp_path / "site" / "quire_kernels_sm90"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.tar.gz").write_bytes(b"no archive")
    monkeypatch.syspath_prepend(str(package.parent))
    assert store.add_installed(tmp_path / "other", (9, 0)) == 0
    assert "cannot be used" in caplog.text


def test_a_cache_without_kernels_makes_no_wheel(tmp_path):
    with pytest.raises(ConfigError, match="holds no compiled kernels"):
        store.write_wheels(tmp_path, tmp_path / "dist", "1.2")
