"""`quire quantize` to compressed-tensors: values that the compressed-tensors package reads, and the
life of the folder."""

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from quire.cli import main
from quire.config.quant.online import ONLINE_FORMATS
from quire.errors import ConfigError, WeightError
from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.models.build import build_model, read_model_config
from quire.quant import online
from quire.quantize import compressed_out
from quire.quantize.codec import pack_words, unpack_words
from quire.quantize.options import QuantizeOptions
from quire.quantize.out_folder import REPORT, STATE
from quire.quantize.run import make_plan, quantize_model
from tests import tiers
from tests.cpu.quantize.folders import MOE, write_source

pytestmark = pytest.mark.sampled(3)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


def run(source, out, to="int4", **more):
    return quantize_model(
        QuantizeOptions(model=str(source), out=out, to=to, **more), progress=False
    )


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def decompressed(folder):
    """name -> weight of each quantized matrix, as the compressed-tensors package reads it."""
    config = QuantizationConfig.model_validate(config_of(folder)["quantization_config"])
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    modules = {}
    for name, tensor in tensors_of(folder).items():
        module, _, param = name.rpartition(".")
        modules.setdefault(module, {})[param] = tensor
    return {
        f"{module}.weight": compressor.decompress(own, scheme)["weight"]
        for module, own in modules.items()
        if "weight_scale" in own
    }


SETTINGS = [
    ("int4", {}),
    ("int4", {"symmetric": False, "group_size": 32}),
    ("int4", {"bits": 3, "group_size": 64}),
    ("w8a8", {}),
    ("fp8", {}),
    ("fp8_block", {}),
    ("mxfp4", {}),
    ("nvfp4", {}),
    *tiers.long(
        ("int4", {"bits": 6, "group_size": -1, "symmetric": False}),
        ("int8", {}),
        ("int8", {"group_size": -1}),
    ),
]


@pytest.mark.parametrize(("to", "settings"), SETTINGS, ids=str)
def test_compressed_tensors_reads_the_values_that_are_reported(source, tmp_path, to, settings):
    report = run(source, tmp_path / "out", to, **settings)
    found, before = decompressed(tmp_path / "out"), tensors_of(source)
    assert found.keys() == report["errors"].keys()
    assert len(found) == (14 if to != "fp8_block" else 8)
    for name, weight in found.items():
        error = (weight.float() - before[name]).square().sum() / before[name].square().sum()
        assert float(error) == pytest.approx(report["errors"][name]["weight_error"], rel=1e-3)
        assert float(error) < 0.05


def test_half_precision_scales_are_of_the_model_s_dtype_and_values_the_same(source, tmp_path):
    shutil.copytree(source, tmp_path / "half")
    tensors = {name: one.bfloat16() for name, one in tensors_of(source).items()}
    save_file(tensors, tmp_path / "half/model.safetensors")
    for i, settings in enumerate(({}, {"symmetric": False}, {"bits": 8})):
        folder = tmp_path / f"out{i}"
        run(tmp_path / "half", folder, "int4", **settings)
        made = tensors_of(folder)
        name = "model.layers.1.mlp.down_proj"
        assert made[f"{name}.weight_scale"].dtype == torch.bfloat16
        q = unpack_words(made[f"{name}.weight_packed"], settings.get("bits", 4), 256).float()
        zero = 8.0 if settings != {"bits": 8} else 128.0
        if "symmetric" in settings:
            zero = unpack_words(made[f"{name}.weight_zero_point"].t(), 4, 128).t().float()
            zero = zero.repeat_interleave(128, 1)
        wide = (q - zero) * made[f"{name}.weight_scale"].float().repeat_interleave(128, 1)
        assert torch.equal(wide.bfloat16(), decompressed(folder)[f"{name}.weight"])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 100])
def test_codes_survive_their_words(bits, count):
    codes = torch.randint(0, 1 << bits, (5, count), dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes, bits), bits, count), codes)


def test_the_folder_is_complete_and_the_rest_is_copied(source, tmp_path):
    run(source, tmp_path / "out")
    made, before = tensors_of(tmp_path / "out"), tensors_of(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(made[name], before[name])
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == made.keys()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    config = config_of(tmp_path / "out")
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert {key: config[key] for key in config_of(source)} == config_of(source)
    assert not (tmp_path / "out" / STATE).exists()


@pytest.mark.parametrize("to", ["fp8", "fp8_block"])
def test_the_bits_are_those_of_quantizing_on_load(source, tmp_path, to):
    if to == "fp8_block":
        source = write_source(tmp_path / "source", num_key_value_heads=4)
    run(source, tmp_path / "out", to)
    models = []
    for folder, quant in ((source, to), (tmp_path / "out", None)):
        kind, config = read_model_config(config_of(folder))
        models.append(
            build_model(
                kind, config, folder=folder, dtype=torch.float32, quant=quant, progress=False
            )
        )
    found = [
        {
            name: m.weight
            for name, m in model.named_modules()
            if isinstance(getattr(m, "weight", 0), Fp8Weight)
        }
        for model in models
    ]
    assert found[0].keys() == found[1].keys() != set()
    for name, weight in found[0].items():
        assert torch.equal(weight.data.view(torch.uint8), found[1][name].data.view(torch.uint8))
        assert torch.equal(weight.scale, found[1][name].scale)


@pytest.mark.parametrize(
    ("to", "asked", "settings"),
    [
        ("int4", "int4", {}),
        ("int4", "int4_asym", {"symmetric": False}),
        ("int8", "int8", {}),
        ("int8", "int8_per_channel_weight_only", {"group_size": -1}),
        ("mxfp4", "mxfp4", {}),
    ],
)
def test_codes_are_those_of_quantizing_on_load(source, tmp_path, to, asked, settings):
    shutil.copytree(source, tmp_path / "half")
    tensors = {name: one.bfloat16() for name, one in tensors_of(source).items()}
    save_file(tensors, tmp_path / "half/model.safetensors")
    run(tmp_path / "half", tmp_path / "out", to, **settings)
    name = "model.layers.0.mlp.down_proj.weight"
    made = online.quantize(tensors[name], ONLINE_FORMATS[asked])
    assert torch.equal(
        made.dequantize().bfloat16(), decompressed(tmp_path / "out")[name].bfloat16()
    )


def test_a_dry_run_states_the_sizes_and_writes_nothing(source, tmp_path, capsys):
    for to in ("int4", "w8a8", "nvfp4", "fp8_block"):
        out = tmp_path / to
        plan = make_plan(QuantizeOptions(model=str(source), out=out, to=to))
        assert main(["quantize", str(source), str(out), "--to", to, "--dry-run"]) == 0
        assert not out.exists()
        run(source, out, to)
        assert plan.out_bytes == sum(one.nbytes for one in tensors_of(out).values())
    assert "MiB become" in capsys.readouterr().out


class Interrupted(Exception):
    pass


def interrupt_after(monkeypatch, units):
    real = compressed_out.CompressedOut.write_unit

    def write(self, unit, *rest):
        if unit >= units:
            raise Interrupted
        real(self, unit, *rest)

    monkeypatch.setattr(compressed_out.CompressedOut, "write_unit", write)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != REPORT}


def test_an_interrupted_run_continues_with_the_same_bytes(source, tmp_path, monkeypatch):
    whole = run(source, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Interrupted):
            run(source, tmp_path / "out")
    first = tmp_path / "out/model-00002-of-00004.safetensors"
    (tmp_path / "out/.model-00003-of-00004.safetensors.part").write_bytes(b"half of it")
    before = first.stat().st_mtime_ns
    assert run(source, tmp_path / "out") == whole
    assert first.stat().st_mtime_ns == before
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    stamp = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(source, tmp_path / "out") == whole
    assert stamp == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_a_finished_file_that_was_cut_is_written_again(source, tmp_path):
    run(source, tmp_path / "out")
    path = tmp_path / "out/model-00003-of-00004.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    run(source, tmp_path / "out")
    assert path.read_bytes() == whole


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_start_again_with_a_message(source, tmp_path, monkeypatch, caplog, finished):
    with monkeypatch.context() as patch:
        if not finished:
            interrupt_after(patch, 2)
        try:
            run(source, tmp_path / "out", group_size=64)
        except Interrupted:
            assert not finished
    run(source, tmp_path / "out", group_size=32)
    assert "other settings: starting again" in caplog.text
    run(source, tmp_path / "whole", group_size=32)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_source_that_changed_starts_again(tmp_path, caplog):
    source = write_source(tmp_path / "source")
    run(source, tmp_path / "out")
    tensors = tensors_of(source)
    tensors["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(tensors, source / "model.safetensors")
    run(source, tmp_path / "out")
    assert "starting again" in caplog.text
    made = decompressed(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"]
    assert float(made.mean()) == pytest.approx(1.0, abs=0.1)


def test_a_folder_of_others_is_refused_and_stays_as_it_is(source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"not empty \(it has notes\.txt\), and quire quantize has"
    ):
        run(source, tmp_path)
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        run(source, tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="is the model itself"):
        run(source, source)
    (tmp_path / STATE).write_text(json.dumps({"files": {"../../etc/passwd": 3}, "errors": {}}))
    with pytest.raises(ConfigError, match="is not one that quire quantize has written"):
        run(source, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_noticed_first(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=60 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"needs 0\.07 GB, and its disk has 0\.06 GB free"):
        run(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_ignored_matrices_stay_plain_with_those_they_are_fused_with(source, tmp_path):
    report = run(
        source, tmp_path / "out", ignore=("layers.0.self_attn.k_proj", r"re:.*1\.mlp\.down")
    )
    plain = {f"model.layers.0.self_attn.{one}_proj" for one in "qkv"}
    plain |= {"model.layers.1.mlp.down_proj", "lm_head"}
    assert {name.removesuffix(".weight") for name in report["plain"]} == plain
    assert set(config_of(tmp_path / "out")["quantization_config"]["ignore"]) == plain
    with pytest.raises(ConfigError, match=r"--ignore 'o_prj' matches no matrix.*o_proj"):
        run(source, tmp_path / "other", ignore=("o_prj",))
    with pytest.raises(ConfigError, match=r"nothing would be quantized: ignored"):
        run(source, tmp_path / "other", ignore=("layers",))
    with pytest.raises(ConfigError, match=r"--ignore 're:\(' is not a pattern"):
        run(source, tmp_path / "other", ignore=("re:(",))


def test_the_head_is_quantized_on_request(source, tmp_path):
    report = run(source, tmp_path / "out", lm_head=True)
    assert "lm_head.weight" in report["errors"]
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == []
    tied = write_source(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="shares the embedding's weight"):
        run(tied, tmp_path / "other", lm_head=True)


def test_rows_that_are_not_whole_groups_stay_plain(tmp_path):
    source = write_source(tmp_path / "source", intermediate_size=192)
    report = run(source, tmp_path / "out")
    reasons = {name: why for name, why in report["plain"].items() if "lm_head" not in name}
    assert set(reasons.values()) == {"192 inputs are not whole groups of 128"}
    assert all("down_proj" in name for name in reasons)


def test_fused_parts_that_are_not_whole_blocks_stay_plain(source, tmp_path):
    plain = run(source, tmp_path / "out", "fp8_block")["plain"]
    why = plain["model.layers.0.self_attn.q_proj.weight"]
    assert why == "64 outputs of a fused layer are not whole blocks of 128"
    assert "model.layers.0.self_attn.o_proj.weight" not in plain


def test_experts_are_quantized_and_routers_are_not(tmp_path):
    source = write_source(tmp_path / "source", "qwen3_moe", **MOE)
    report = run(source, tmp_path / "out", "nvfp4")
    made = tensors_of(tmp_path / "out")
    at = "model.layers.0.mlp"
    assert sum("experts" in name for name in report["errors"]) == 2 * 4 * 3
    assert made[f"{at}.gate.weight"].dtype == torch.float32
    assert f"{at}.gate" in config_of(tmp_path / "out")["quantization_config"]["ignore"]
    for expert in range(4):
        gate, up = (
            made[f"{at}.experts.{expert}.{one}_proj.weight_global_scale"] for one in ("gate", "up")
        )
        assert gate == up
    assert decompressed(tmp_path / "out").keys() == report["errors"].keys()


def test_q_k_and_v_share_the_global_scale_of_the_largest(tmp_path):
    source = write_source(tmp_path / "source")
    tensors = tensors_of(source)
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 64
    save_file(tensors, source / "model.safetensors")
    run(source, tmp_path / "out", "nvfp4")
    made = tensors_of(tmp_path / "out")
    scales = {
        float(made[f"model.layers.0.self_attn.{one}_proj.weight_global_scale"]) for one in "qkvo"
    }
    assert len(scales) == 2
    assert float(made["model.layers.0.self_attn.q_proj.weight_global_scale"]) == min(scales)


def broken(source, folder, change):
    shutil.copytree(source, folder)
    change(folder)
    return folder


def set_config(**values):
    def change(folder):
        (folder / "config.json").write_text(json.dumps(config_of(folder) | values))

    return change


def set_tensors(change):
    def write(folder):
        tensors = tensors_of(folder)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return write


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BROKEN = [
    (set_config(quantization_config={"quant_method": "fp8"}), "is quantized already"),
    (set_config(model_type="llamma", architectures=["LlammaForCausalLM"]), "not native to quire .* did you mean"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), "quantize reads safetensors only"),
    (cut, "cut short"),
    (set_tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "1 missing .*up_proj"),
    (set_tensors(lambda t: t.update(more=torch.ones(3))), "1 unexpected .*more"),
    (set_tensors(lambda t: t["model.layers.1.mlp.up_proj.weight"][3, 5].fill_(float("nan"))), "up_proj.weight holds NaN or infinities"),
    (set_tensors(lambda t: t["model.layers.0.mlp.up_proj.weight"][0, 0].fill_(float("inf"))), "up_proj.weight holds NaN or infinities"),
    (set_tensors(lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(256, 128).to(torch.float8_e4m3fn)})), "is F8_E4M3; quantize reads"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[one[1] for one in BROKEN])
def test_a_broken_source_is_an_error_by_name(source, tmp_path, change, message):
    folder = broken(source, tmp_path / "broken", change)
    with pytest.raises((ConfigError, WeightError), match=message):
        run(folder, tmp_path / "out", "fp8")


def test_weights_that_are_stored_turned_are_refused(tmp_path):
    source = write_source(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match=r"is stored \[inputs, outputs\] \(gpt2\)"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "int5"], "--to is 'int5'; it must be one of int4, int8"),
        (["--to", "int4", "--bits", "7"], "--bits is 7; it must be one of 2, 3, 4, 5, 6, 8"),
        (["--to", "int4", "--group-size", "20"], "--group-size is 20; it must be a multiple of 16"),
        (["--to", "fp8", "--group-size", "64"], "--group-size is for int4 and int8"),
        (["--to", "int4", "--algorithm", "gptq"], "--algorithm gptq needs texts: give --data FILE"),
        (["--to", "int4", "--samples", "0"], "--samples is 0; it must be 1 or more"),
        (["--to", "int4", "--act-order"], "--act-order is for GPTQ"),
        (["--to", "Q4_K_M", "--bits", "4"], "Q4_K_M has fixed blocks; --bits cannot be given"),
        (["--to", "int4", "--data", "x.txt", "--damp", "0"], "--damp is 0.0; it must be above 0"),
    ],
)
def test_settings_that_do_not_go_together_are_named(source, tmp_path, capsys, words, message):
    assert main(["quantize", str(source), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_the_errors_of_each_layer(source, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["quantize", str(source), out, "--to", "int8", "--lm-head"]) == 0
    printed = capsys.readouterr().out
    assert "relative squared errors" in printed
    assert "MiB became" in printed
    assert main(["quantize", str(source), out, "--to", "int8", "--lm-head", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "out" / REPORT).read_text())
    assert shown["errors"] == kept["errors"]
    assert shown["errors"]["lm_head.weight"]["type"] == "int8"
