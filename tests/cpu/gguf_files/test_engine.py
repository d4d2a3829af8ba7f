"""GGUF files as the model of LLM and of `quire plan`, from a folder and from the hub."""

import json
import types

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from quire import LLM, SamplingParams, env
from quire.cli.plan import model_facts
from quire.config.options import ModelOptions, Options
from quire.errors import ConfigError, WeightError
from quire.weights.files import resolve_model_folder
from quire.weights.gguf.folder import GGUF_CACHE
from tests.cpu.gguf_files.writer import write_gguf
from tests.cpu.quant.oracle import tiny, tiny_tensors, write_folder

PROMPTS = ["the cat and the dog", "12 of", "and and and"]
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MIX = {
    "attn_v": "Q6_K",
    "ffn_down": "Q6_K",
    "attn_k": "Q5_K",
    "token_embd": "Q3_K",
    "ffn_up": "Q2_K",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, with the compiled kernels of the usual one."""
    own = tmp_path / "cache"
    own.mkdir()
    for one in env.read().cache_dir.glob("*"):
        if one.name != GGUF_CACHE:
            (own / one.name).symlink_to(one)
    monkeypatch.setenv("QUIRE_CACHE", str(own))


def k_quants(name):
    return MIX.get(name.split(".")[-2], "Q4_K")


def byte_tokenizer(folder, vocab):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(PROMPTS * 20, trainer)
    (folder / "tokenizer.json").write_text(made.to_str())
    return made


def write_model(tmp_path, kinds=lambda name: "Q8_0", unit=64, sizes=(), **settings):
    """(the file, the folder of its dense model, config.json): tied, with a tokenizer."""
    vocab = 288
    hf = tiny("qwen3", unit=unit, vocab_size=vocab, tie_word_embeddings=True, eos_token_id=None)
    hf |= dict(sizes)
    tensors = tiny_tensors(hf | {"model_type": "llama"})
    for i in range(hf["num_hidden_layers"]):
        for one in "qk":
            norm = 1 + 0.2 * torch.randn(hf["head_dim"], generator=torch.Generator().manual_seed(i))
            tensors[f"model.layers.{i}.self_attn.{one}_norm.weight"] = norm
    del tensors["lm_head.weight"]
    dense = write_folder(tmp_path / "dense", hf, tensors)
    tokenizer = byte_tokenizer(dense, vocab)
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds_of_tokens = [1] * len(tokens) + [5] * (vocab - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab)]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]

    def edit(writer):
        for key in ("tokens", "model"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds_of_tokens)
        writer.add_token_merges([" ".join(one) for one in merges])

    file = tmp_path / "model-Q4_K_M.gguf"
    made = write_gguf(file, dense, kinds, edit=edit, **settings)
    save_file(
        {name: t.float().contiguous() for name, t in made.items()}, dense / "model.safetensors"
    )
    return file, dense


def generate(model, **settings):
    llm = LLM(str(model), dtype="float32", max_model_len=128, **settings)
    outs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return [(one.prompt_token_ids, one.outputs[0].token_ids, one.outputs[0].text) for one in outs]


@pytest.mark.slow("three engines")
def test_answers_are_those_of_the_dense_model(tmp_path):
    file, dense = write_model(tmp_path, k_quants, 256)
    want = generate(dense)
    assert generate(file) == want
    assert (
        generate(file, tokenizer=str(dense), hf_config_path=str(dense), quantization="gguf") == want
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.long("two engines, one of two processes")
def test_ranks_cut_inside_of_blocks(tmp_path):
    """768 inputs are three blocks of 256, and each rank has 384."""
    sizes = {"intermediate_size": 768, "num_attention_heads": 6, "head_dim": 128}
    file, _ = write_model(tmp_path, k_quants, 256, sizes)
    assert generate(file, device="cpu", tensor_parallel_size=2) == generate(file, device="cpu")


def test_plan_counts_blocks(tmp_path):
    file, _ = write_model(tmp_path)
    facts, source = model_facts(Options(model=ModelOptions(model=str(file))))
    assert source == "tensor headers"
    stored = file.stat().st_size
    assert facts.weights.bytes(4) == pytest.approx(stored, rel=0.05)
    assert facts.weights.bytes(4, 2) < 0.6 * stored
    assert facts.max_len == 512
    assert facts.quantization.quant_method == "gguf"


def test_parts_and_a_folder_with_nothing_else(tmp_path):
    write_model(tmp_path, in_parts=True)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 1
    folder = resolve_model_folder(parts[-1])
    assert resolve_model_folder(parts[0]) == folder
    assert resolve_model_folder(folder) == folder, "the made folder is used as it is"
    only = tmp_path / "only"
    only.mkdir()
    for part in parts:
        part.rename(only / part.name)
    (only / "mmproj-model.gguf").write_bytes(b"GGUF")
    (only / "README.md").write_text("")
    found = resolve_model_folder(only)
    assert json.loads((found / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    (only / "other-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"has several models: model-Q4_K_M-00001.*other-Q8_0"):
        resolve_model_folder(only)


def test_a_changed_file_is_read_anew(tmp_path):
    file, _ = write_model(tmp_path)
    first = resolve_model_folder(file)
    assert resolve_model_folder(file) == first
    (tmp_path / "2").mkdir()
    write_model(tmp_path / "2", lambda name: "Q4_0")[0].replace(file)
    second = resolve_model_folder(file)
    assert second != first
    assert "Q4_0" in (second / "config.json").read_text()


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    file, _ = write_model(tmp_path)
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "blocked"))
    with pytest.raises(ConfigError, match="set QUIRE_CACHE"):
        resolve_model_folder(file)


# --- the hub ---

LISTED = (
    *("config.json", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "mmproj-f16.gguf"),
    *("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"),
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository with LISTED, in which every model is the same file."""
    file, _ = write_model(tmp_path, lambda name: "F32")
    snapshot, seen = tmp_path / "snapshot", []

    class Api:
        def __init__(self, token=None):
            pass

        def model_info(self, name, *, revision, timeout):
            return types.SimpleNamespace(
                siblings=[types.SimpleNamespace(rfilename=f) for f in LISTED]
            )

    def download(name, *, allow_patterns, local_files_only=False, **_):
        if not local_files_only:
            seen.append((name, allow_patterns))
            for one in allow_patterns:
                target = snapshot / one
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    target.symlink_to(file)
        elif not snapshot.exists():
            raise OSError("not in the cache")
        return str(snapshot)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return seen


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/m:Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("org/m:q8_0", ["m-Q8_0.gguf"]),
        ("org/m:UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("org/m:BF16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        ("org/m/m-Q8_0.gguf", ["m-Q8_0.gguf"]),
    ],
)
def test_one_model_of_a_repository(hub, name, files, monkeypatch):
    found = resolve_model_folder(name)
    assert hub == [("org/m", files)]
    assert (found / "config.json").is_file()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model_folder(name) == found
    assert len(hub) == 1, "the second time it was in the cache"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/m:Q4_K", r"org/m has no model 'Q4_K': .*m-Q8_0\.gguf.*ORG/NAME:Q4_K_M"),
        ("org/m:Q4", "no model 'Q4'"),
        ("org/m/none.gguf", r"no model 'none\.gguf'"),
        ("org/m", r"has its weights in GGUF files .*; give one, as org/m/"),
    ],
)
def test_what_a_repository_has_not(hub, name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_model_folder(name)
    assert hub == []


def test_offline_without_the_files(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'org/m' is not in .*connect once"):
        resolve_model_folder("org/m:Q8_0")


# --- files that lie ---


def edited(tmp_path, edit, kinds=lambda name: "F32"):
    hf = tiny("llama")
    folder = write_folder(tmp_path / "source", hf, tiny_tensors(hf))
    write_gguf(tmp_path / "model.gguf", folder, kinds, edit=edit)
    return tmp_path / "model.gguf"


def metadata(**changes):
    def edit(writer):
        for key, value in changes.items():
            name = key.replace("__", ".")
            writer.kv_data[0].pop(name, None)
            if value is not None:
                add = writer.add_string if isinstance(value, str) else writer.add_uint32
                add(name, value)

    return edit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "general.architecture is 'mamba'; supported"),
        ({"llama__block_count": None}, "llama.block_count = None"),
        ({"llama__block_count": 0}, "llama.block_count = 0"),
        ({"llama__embedding_length": "64"}, "llama.embedding_length = '64'"),
        ({"llama__attention__head_count_kv": 0}, "head_count_kv is 0"),
        ({"llama__rope__scaling__type": "dynamic"}, "rope.scaling.type = 'dynamic'"),
    ],
)
def test_metadata_that_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve_model_folder(edited(tmp_path, metadata(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__block_count": 3}, {"llama__embedding_length": 128}, {"llama__block_count": 1},
        {"llama__feed_forward_length": 999}, {"llama__attention__head_count": 8},
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit_the_tensors(tmp_path, changes):
    file = edited(tmp_path, metadata(**changes))
    with pytest.raises((WeightError, ConfigError), match=r"missing|wrong shape|unexpected|head"):
        generate(file, skip_tokenizer_init=True)


def test_sizes_that_no_model_has(tmp_path):
    file = edited(tmp_path, metadata(llama__block_count=2**31))
    with pytest.raises(ConfigError, match="num_hidden_layers is 2147483648"):
        generate(file, skip_tokenizer_init=True)
