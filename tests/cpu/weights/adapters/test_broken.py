"""Adapters that do not fit, lie or attack are refused by name, before anything large is made."""

import contextlib
import json
import os
import pickle
import random
import resource
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ConfigError, WeightError
from quire.models._adapter_modules import adapter_modules
from quire.models.build import MODELS, read_model_config
from quire.weights.adapters.adapter import AdapterLimits
from quire.weights.adapters.read import read_adapter
from tests import tiers
from tests.cpu.models.peers import tiny

LAYER = "base_model.model.model.layers.0"
Q, EMBED = f"{LAYER}.self_attn.q_proj", "base_model.model.model.embed_tokens"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
SIZE = 64  # inputs and outputs of q_proj of the tiny llama


def modules_of(variant):
    model_type, config = read_model_config(tiny(variant)[0])
    with torch.device("meta"):
        model = MODELS.load(model_type).Model(config)
    return adapter_modules(model, config.tied)


@pytest.fixture(scope="module")
def llama():
    return modules_of("llama")


def tensors():
    return {A: torch.ones(4, SIZE), B: torch.ones(SIZE, 4)}


def write(folder, config=None, files=None, **more):
    """A folder with an adapter. config: changes of its keys; more: suffix of q_proj -> tensor."""
    folder.mkdir(exist_ok=True)
    made = {k: v for k, v in {**CONFIG, **(config or {})}.items() if v != "absent"}
    (folder / "adapter_config.json").write_text(json.dumps(made))
    save_file(tensors() if files is None else files, folder / "adapter_model.safetensors")
    return folder


def refusal(folder, modules, **limits):
    with pytest.raises(ConfigError) as caught:
        read_adapter(folder, modules, torch.float16, AdapterLimits(**limits))
    return str(caught.value)


def test_what_is_changed_below_is_an_adapter(tmp_path, llama):
    found = read_adapter(write(tmp_path), llama, torch.float16)
    assert found.rank == 4
    assert found.nbytes == 2 * 2 * 4 * SIZE
    assert (found.deltas["layers.0.self_attn.qkv_proj"][0].b == 2).all()


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("peft_type", "absent", "peft_type is missing"),
        ("peft_type", "LOHA", "peft_type is 'LOHA'; quire serves LORA"),
        ("peft_type", "ADALORA", "peft_type is 'ADALORA'"),
        ("peft_type", ["LORA"], "peft_type is \\['LORA'\\]"),
        ("r", "absent", "r is missing"),
        ("r", 0, "r is 0; it must be a whole number from 1"),
        ("r", -4, "r is -4"),
        ("r", 10**6, "r is 1000000"),
        ("r", 1e400, "r is inf"),
        ("r", "4", "r is '4'"),
        ("r", True, "r is True"),
        ("lora_alpha", "absent", "lora_alpha is missing"),
        ("lora_alpha", float("nan"), "lora_alpha is nan; it must be a number"),
        ("use_rslora", "yes", "use_rslora is 'yes'; it must be true or false"),
        ("bias", "all", "bias is 'all'; the base model's biases would change; merge"),
        ("bias", "lora_only", "bias is 'lora_only'"),
        ("init_lora_weights", "pissa_niter_16", "pissa.*path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "olora", "the base weights were changed"),
        ("init_lora_weights", "corda", "the base weights were changed"),
        ("init_lora_weights", "loftq", "the base weights were changed"),
        ("init_lora_weights", "lora_ga", "the base weights were changed"),
        ("init_lora_weights", "novel", "known are true, false, gaussian"),
        ("init_lora_weights", 3, "it must be true, false or a name"),
        ("alora_invocation_tokens", [1, 2], "alora_invocation_tokens is \\[1, 2\\]; the adapter"),
        ("layer_replication", [[0, 2]], "layer_replication .*it repeats layers"),
        ("use_qalora", True, "use_qalora is True; it pools"),
        ("use_bdlora", {"nblocks": 2}, "use_bdlora"),
        ("arrow_config", {"top_k": 2}, "arrow_config"),
        ("kasa_config", {"beta": 1}, "kasa_config"),
        ("monteclora_config", {"a": 1}, "monteclora_config"),
        ("use_dora", True, "q_proj' has no magnitude of the adapter, but use_dora"),
        ("lora_bias", True, "q_proj' has no bias of the adapter, but lora_bias"),
        ("rank_pattern", [4], "rank_pattern is \\[4\\]; it must be an object"),
        ("rank_pattern", {"q_proj": 8}, "lora_A.weight' is \\[4, 64\\]: rank 4; .* it has 8"),
        ("rank_pattern", {"q_proj": 0}, "rank_pattern\\['q_proj'\\] is 0"),
        ("rank_pattern", {"(a+)+": 4}, "rank_pattern has the pattern '\\(a\\+\\)\\+'; allowed"),
        ("rank_pattern", {"(a": 4}, "rank_pattern has the pattern '\\(a'"),
        ("rank_pattern", {"a{99999999999}": 4}, "rank_pattern has the pattern"),
        ("alpha_pattern", {f"{i}.*": 4 for i in range(99)}, "alpha_pattern has 99 regular"),
        ("alpha_pattern", {"q_proj": "2"}, "alpha_pattern\\['q_proj'\\] is '2'"),
        ("target_parameters", "x", "target_parameters is 'x'; it must be a list of names"),
        ("trainable_token_indices", "x", "trainable_token_indices is 'x'"),
        ("trainable_token_indices", [1, 1], "each must be there once"),
        ("trainable_token_indices", [-1], "trainable_token_indices is \\[-1\\]"),
    ],
)
def test_keys_that_change_the_sum_are_refused(tmp_path, llama, key, value, problem):
    with pytest.raises(ConfigError, match=problem):
        read_adapter(write(tmp_path, {key: value}), llama, torch.float16)


def test_keys_of_training_are_ignored_and_new_ones_are_named(tmp_path, llama):
    ours = {"target_modules": ["x"], "task_type": "CAUSAL_LM", "lora_dropout": 0.1, "bias": "none"}
    new = {"new_key": 3, "another": None, "more": {}, "off": False}
    for kind in (True, False, "gaussian", "eva", "orthogonal", "mica", None):
        more = {"init_lora_weights": kind}
        found = read_adapter(write(tmp_path, ours | new | more), llama, torch.float16)
        assert found.warnings == (
            "adapter_config.json has keys that quire does not know: new_key",
        )  # fmt: skip


def test_patterns_end_soon(tmp_path, llama, monkeypatch):
    slow = {"rank_pattern": {".*.*.*x": 8}}
    assert read_adapter(write(tmp_path, slow), llama, torch.float16).rank == 4
    monkeypatch.setattr("quire.weights.adapters.lora_config.MAX_PATTERN_SECONDS", 0.0)
    assert "rank_pattern take longer to match than" in refusal(tmp_path, llama)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


TENSORS = {
    "no tensors": ({}, "the adapter has no tensors"),
    "no B": ({A: ones(4, SIZE)}, "q_proj' has no lora_B"),
    "no A": ({B: ones(SIZE, 4)}, "q_proj' has no lora_A"),
    "other rank": ({A: ones(8, SIZE)}, r"lora_A.weight' is \[8, 64\]: rank 8"),
    "two ranks": ({B: ones(SIZE, 8)}, r"lora_B.weight' is \[64, 8\]: rank 8"),
    "wrong inputs": ({A: ones(4, 63)}, r"lora_A.weight' is \[4, 63\], the model has \[4, 64\]"),
    "wrong outputs": ({B: ones(1, 4)}, r"lora_B.weight' is \[1, 4\], the model has \[64, 4\]"),
    "one axis": ({A: ones(4 * SIZE)}, r"lora_A.weight' is \[256\], the model has"),
    "no axis": ({A: ones()}, r"lora_A.weight' is \[\], the model has"),
    "three axes": ({A: ones(4, SIZE, 1)}, r"is \[4, 64, 1\]"),
    "nothing in it": ({A: ones(0, SIZE)}, r"is \[0, 64\]"),
    "integers": ({A: ones(4, SIZE, dtype=torch.int8)}, r"is I8; quire reads adapters in BF16, F16"),
    "fp8": ({A: ones(4, SIZE).to(torch.float8_e4m3fn)}, "is F8_E4M3; quire reads"),
    "NaN": ({A: ones(4, SIZE) * float("nan")}, "lora_A.weight' has values that are NaN"),
    "infinity": ({B: ones(SIZE, 4) * float("inf")}, "lora_B.weight' has values that are NaN"),
    "too large in float16": ({B: ones(SIZE, 4) * 6e4}, "NaN or infinite in torch.float16"),
    "no such layer": (
        {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": ones(4, SIZE)},
        "there is no module 'model.layers.9.self_attn.q_proj'; the model has layers",
    ),
    "wrong prefix": (
        {"base_model.model.transformer.layers.0.self_attn.q_proj.lora_A.weight": ones(4, SIZE)},
        "there is no module 'transformer.layers.0.self_attn.q_proj'; the model has layers.0.self",
    ),
    "a tower": (
        {"base_model.model.model.vision_tower.layers.0.q_proj.lora_A.weight": ones(4, SIZE)},
        "it belongs to a tower",
    ),
    "a norm": (
        {"base_model.model.model.norm.weight": ones(SIZE)},
        r"norm.weight': quire does not serve adapters of this kind of module",
    ),
    "a whole linear layer": (
        {f"{LAYER}.self_attn.k_proj.weight": ones(32, SIZE)},
        "k_proj.weight': quire cannot add this to a layer of kind linear; modules_to_save may",
    ),
    "a bias of the base": ({f"{Q}.bias": ones(SIZE)}, "q_proj.bias.*cannot add this"),
    "a base weight": (
        {f"{Q}.base_layer.weight": ones(SIZE, SIZE)},
        "base_layer.weight' is a base weight",
    ),
    "another vocabulary": (
        {f"{EMBED}.base_layer.weight": ones(300, SIZE)},
        r"is \[300, 64\], the model has \[199, 64\]",
    ),
    "a larger embedding": (
        {f"{EMBED}.lora_embedding_A": ones(4, 300), f"{EMBED}.lora_embedding_B": ones(SIZE, 4)},
        r"lora_embedding_A' is \[4, 300\], the model has \[4, 199\]",
    ),
    "a linear pair on an embedding": (
        {f"{EMBED}.lora_A.weight": ones(4, 199), f"{EMBED}.lora_B.weight": ones(SIZE, 4)},
        "cannot add this to a layer of kind embedding",
    ),
    "a larger whole embedding": ({f"{EMBED}.weight": ones(200, SIZE)}, r"the model has \[199, 64\]"),
    "tokens without indices": (
        {f"{EMBED}.token_adapter.trainable_tokens_delta": ones(2, SIZE)},
        "trainable_token_indices of adapter_config.json has no indices for it",
    ),
    "an undeclared magnitude": (
        {f"{Q}.lora_magnitude_vector": ones(SIZE)},
        "has a magnitude of the adapter, but use_dora of adapter_config.json is false",
    ),
    "an undeclared bias": ({f"{Q}.lora_B.bias": ones(SIZE)}, "has a bias of the adapter, but lora_"),
    "a bias of A": ({f"{Q}.lora_A.bias": ones(4)}, "is no tensor of a LoRA adapter"),
    "another method": ({f"{Q}.hada_w1_a": ones(4)}, "hada_w1_a' is no tensor of a LoRA adapter"),
    "a name twice": (
        {A.replace("base_model.model.", ""): ones(4, SIZE)},
        "are the same tensor of one module",
    ),
    "one part twice": (
        {
            f"{LAYER}.self_attn.qkv_proj.lora_A.weight": ones(4, SIZE),
            f"{LAYER}.self_attn.qkv_proj.lora_B.weight": ones(2 * SIZE, 4),
        },
        "are the same part of the model",
    ),
    "two adapters": (
        {
            f"{LAYER}.self_attn.k_proj.lora_A.one.weight": ones(4, SIZE),
            f"{LAYER}.self_attn.k_proj.lora_B.two.weight": ones(32, 4),
        },
        r"tensors of 2 adapters \('one', 'two'\)",
    ),
    "a long name": ({f"{'x' * 10**6}.lora_A.weight": ones(4)}, r"xxx'\.\.\. is no tensor"),
    "an empty name": ({"": ones(4)}, "'' is no tensor"),
    "no module": ({"lora_A.weight": ones(4)}, "is no tensor of a LoRA adapter"),
    "a path": ({f"../../{Q}/..lora_A.weight": ones(4)}, "is no tensor|there is no module"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused(tmp_path, llama, name):
    changed, problem = TENSORS[name]
    alone = name in ("no tensors", "no A", "no B")
    write(tmp_path, files=changed if alone else tensors() | changed)
    with pytest.raises(WeightError, match=problem) as caught:
        read_adapter(tmp_path, llama, torch.float16)
    assert len(str(caught.value)) < 1500


def test_experts_that_do_not_fit_are_refused(tmp_path):
    bank = "base_model.model.model.layers.0.mlp.experts"
    moe = modules_of("qwen3_moe")  # 12 experts of 40, of 64 inputs
    for files, problem in (
        ({f"{bank}.12.up_proj.lora_A.weight": ones(4, 64)}, "no module '.*experts.12.up_proj'"),
        ({f"{bank}.up_proj.lora_A.weight": ones(4, 64)}, "there is no module"),
        ({f"{bank}.1.up_proj.lora_A.weight": ones(4, 64)}, "experts.1.up_proj' has no lora_B"),
        (
            {f"{bank}.lora_A.weight": ones(44, 64), f"{bank}.lora_B.weight": ones(80, 44)},
            r"lora_A.weight' is \[44, 64\]: rank 44; .* it has 48",
        ),
        (
            {f"{bank}.lora_A.weight": ones(48, 63), f"{bank}.lora_B.weight": ones(80, 48)},
            r"lora_A.weight' is \[48, 63\] and .*A and B of the model's experts have 64 and 80",
        ),
        (
            {
                f"{bank}.lora_A.weight": ones(48, 64),
                f"{bank}.lora_B.weight": ones(80, 48),
                f"{bank}.1.up_proj.lora_A.weight": ones(4, 64),
                f"{bank}.1.up_proj.lora_B.weight": ones(40, 4),
            },
            "are the same part of the model",
        ),
        ({"base_model.model.model.layers.0.mlp.gate.lora_A.weight": ones(4, 64)}, "this kind of"),
    ):
        with pytest.raises(WeightError, match=problem):
            read_adapter(write(tmp_path, files=files), moe, torch.float32)


def test_square_matrices_of_experts_need_a_version(tmp_path):
    moe = modules_of("qwen3_moe")
    bank = moe.layers["layers.0.mlp.experts"]
    shape = replace(bank, outputs=(64, 64, 64))
    moe = replace(moe, layers={**moe.layers, "layers.0.mlp.experts": shape})
    name = "base_model.model.model.layers.0.mlp.experts"
    a, b = torch.randn(48, 64), torch.randn(64, 48)
    files = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    assert "has no peft_version" in refusal(write(tmp_path, files=files), moe)
    for version in ("0.18.1", "0.19.0.dev0"):
        folder = write(tmp_path, {"peft_version": version}, files)
        delta = read_adapter(folder, moe, torch.float32).deltas["layers.0.mlp.experts"][2]
        want = 2 * torch.einsum("okx,xki->xoi", b.view(64, 4, 12), a.view(12, 4, 64))
        want = want.transpose(1, 2) if version == "0.18.1" else want
        torch.testing.assert_close(delta.b.mT @ delta.a, want)


def test_what_is_absorbed_cannot_be_adapted(tmp_path):
    name = f"{LAYER}.self_attn.kv_b_proj.lora_A.weight"
    folder = write(tmp_path, files={name: ones(4, 32)})
    assert "multiplies kv_b_proj into" in refusal(folder, modules_of("deepseek_v2"))


def test_token_rows_must_fit(tmp_path, llama):
    name = f"{EMBED}.token_adapter.trainable_tokens_delta"
    for ids, problem in (
        ([5], r"is \[2, 64\], the model has \[1, 64\]"),
        ([5, 199], "replaces token 199; the model has 199 rows"),
        ({"lm_head": [5, 6]}, "has no indices for it"),
    ):
        write(tmp_path, {"trainable_token_indices": ids}, tensors() | {name: ones(2, SIZE)})
        with pytest.raises(WeightError, match=problem):
            read_adapter(tmp_path, llama, torch.float32)


def test_limits_come_first(tmp_path, llama, monkeypatch):
    folder = write(tmp_path)
    assert "has rank 4; the maximum is 3 (max_lora_rank)" in refusal(folder, llama, max_rank=3)
    assert "takes 1024 bytes; the maximum is 1023" in refusal(folder, llama, max_bytes=1023)
    write(tmp_path, {"r": 2, "rank_pattern": {"q_proj": 4}})
    assert "q_proj' has rank 4; the maximum is 3" in refusal(folder, llama, max_rank=3)
    monkeypatch.setattr("quire.weights.adapters.tensor_files.MAX_TENSORS", 1)
    assert "has 2 tensors; the maximum is 1" in refusal(folder, llama)
    monkeypatch.setattr("quire.weights.adapters.tensor_files.MAX_HEADER_BYTES", 10)
    assert "adapters may have 80" in refusal(folder, llama, max_bytes=10)


def break_file(name, content):
    def change(folder):
        (folder / name).unlink()
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif content is not None:
            content(folder / name)

    return change


CONFIG_NAME, FILE = "adapter_config.json", "adapter_model.safetensors"
FILES = {
    "no config": (break_file(CONFIG_NAME, None), "has no adapter_config.json: it is not a LoRA"),
    "a broken config": (break_file(CONFIG_NAME, b"{"), "is not valid JSON"),
    "a list": (break_file(CONFIG_NAME, b"[]"), "must hold a JSON object"),
    "a deep config": (break_file(CONFIG_NAME, b"[" * 10**6), "nested too deep"),
    "a config of zeros": (break_file(CONFIG_NAME, bytes(20 << 20)), "bytes; the maximum is"),
    "a config that waits": (break_file(CONFIG_NAME, os.mkfifo), "is not a regular file"),
    "no tensors": (break_file(FILE, None), "has no adapter_model.safetensors"),
    "an empty file": (break_file(FILE, b""), "is empty"),
    "a cut file": (break_file(FILE, b"\xff" * 100), "is not a whole safetensors file"),
    "a pipe": (break_file(FILE, os.mkfifo), "is not a regular file"),
    "a folder": (break_file(FILE, os.mkdir), "is not a regular file"),
    "a link to nothing": (break_file(FILE, lambda p: p.symlink_to("/none")), "has no adapter_"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read_are_refused(tmp_path, llama, name):
    change, problem = FILES[name]
    change(write(tmp_path))
    with pytest.raises(ConfigError, match=problem):
        read_adapter(tmp_path, llama, torch.float16)


class Shell:
    def __reduce__(self):
        return (os.system, ("exit 1",))


def zipped(value, how):
    def write_file(path):
        plain = path.with_suffix(".tmp")
        torch.save(value, plain)
        with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", how) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        plain.unlink()

    return write_file


ARCHIVES = {
    "a plain pickle": (lambda p: p.write_bytes(pickle.dumps({A: 1})), "is not an archive of"),
    "an old archive": (
        lambda p: torch.save(tensors(), p, _use_new_zipfile_serialization=False),
        "is not an archive of torch.save",
    ),
    "code": (lambda p: torch.save({A: Shell()}, p), "cannot be read as weights"),
    "a list": (lambda p: torch.save([torch.ones(3)], p), "holds a list, not a dict"),
    "a number": (lambda p: torch.save({A: 3}, p), "is a int, not a tensor"),
    "meta": (lambda p: torch.save({A: ones(4, SIZE).to("meta")}, p), "not a dense tensor"),
    "numbered": (lambda p: torch.save({1: torch.ones(3)}, p), "1 is a Tensor"),
    "a bomb": (zipped({A: torch.zeros(1 << 20)}, zipfile.ZIP_DEFLATED), "is compressed"),
    "one number many times": (
        lambda p: torch.save({A: torch.ones(1).expand(1 << 40), B: torch.ones(SIZE, 4)}, p),
        r"is \[1099511627776\], the model has",
    ),
    "sparse": (lambda p: torch.save({A: torch.ones(2, 2).to_sparse()}, p), "not a dense tensor"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_are_no_adapters_are_refused(tmp_path, llama, name):
    write_file, problem = ARCHIVES[name]
    write(tmp_path)
    (tmp_path / FILE).unlink()
    write_file(tmp_path / "adapter_model.bin")
    with pytest.raises(WeightError, match=problem):
        read_adapter(tmp_path, llama, torch.float16)


def test_refusals_take_no_memory(tmp_path, llama):
    """A file of a gigabyte, without blocks on the disk, whose header fits it."""
    size = 1 << 30
    header = {
        A: {"dtype": "F32", "shape": [4, size // 16], "data_offsets": [0, size]},
    }
    text = json.dumps(header).encode()
    write(tmp_path)
    with (tmp_path / FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"is [4, {size // 16}], the model has [4, 64]" in refusal(tmp_path, llama)
    assert "bytes; adapters may have" in refusal(tmp_path, llama, max_bytes=1 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_files_that_shrink_while_they_are_read(tmp_path, llama, monkeypatch):
    from quire.weights.adapters import read as reader

    opened = reader.open_tensors

    def cut(*args):
        source = opened(*args)
        os.truncate(tmp_path / FILE, 600)
        return source

    monkeypatch.setattr(reader, "open_tensors", cut)
    assert "was cut short while it was read" in refusal(write(tmp_path), llama)


VALUES = (
    *(None, True, 0, 1, -1, 4, 1e308, float("nan"), 10**400, "", "LORA", "[", "(a+)+", "0.18"),
    *([], [1], ["a"], [[1]], [10**30], {}, {"q_proj": 8}, {"": 1}, {"(": 1}, {"a": {"b": 1}}),
)
PARTS = (
    *("base_model", "model", "layers", "0", "self_attn", "q_proj", "mlp", "experts", "down_proj"),
    *("lora_A", "lora_B", "weight", "bias", "base_layer", "embed_tokens", "lora_embedding_A"),
    *("lora_magnitude_vector", "token_adapter", "trainable_tokens_delta", "modules_to_save", ""),
)
KEYS = (
    *(*CONFIG, "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("use_dora", "lora_bias", "target_parameters", "trainable_token_indices", "peft_version", "x"),
)


def test_random_adapters_are_refused_or_read(tmp_path, llama):
    rng = random.Random(1)
    plain = (write(tmp_path) / FILE).read_bytes()
    for _ in range(tiers.amount(150, 20_000)):
        config = {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.choice([0, 1, 2]))}
        files = tensors() if rng.random() < 0.7 else {}
        for _ in range(rng.choice([0, 1, 2])):
            name = ".".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 9)))
            if rng.random() < 0.5:
                name = A.replace(rng.choice(A.split(".")), rng.choice(PARTS))
            files[name] = ones(*(rng.choice([1, 4, SIZE, 199]) for _ in range(rng.randrange(4))))
        write(tmp_path, config, files)
        if rng.random() < 0.3:
            broken = bytearray(plain)
            for _ in range(rng.choice([1, 2, 8])):
                broken[rng.randrange(400)] = rng.randrange(256)
            (tmp_path / FILE).write_bytes(broken)
        with contextlib.suppress(ConfigError):
            read_adapter(tmp_path, llama, torch.float32)


def test_a_head_that_classifies(tmp_path):
    hf = tiny("llama")[0]
    model_type, config = read_model_config(hf, head="classify", labels=3)
    with torch.device("meta"):
        model = MODELS.load(model_type).Model(config)
        model.set_head(config, [])
    modules = adapter_modules(model, config.tied)
    name, weight = "base_model.model.score.weight", torch.randn(3, SIZE)
    found = read_adapter(write(tmp_path, files=tensors() | {name: weight}), modules, torch.float32)
    assert torch.equal(found.deltas["score"][0].weight, weight)
    write(tmp_path, files={name: ones(4, SIZE)})
    assert r"score.weight' is [4, 64], the model has [3, 64]" in refusal(tmp_path, modules)
