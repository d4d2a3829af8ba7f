"""quire plan: from config.json and tensor headers, without torch, and in agreement with the models."""

import json
import pathlib
import subprocess
import sys
import types

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import NotASafetensorsRepoError

from quire.cli import main
from quire.cli.plan import weight_facts
from quire.config.conventions import conventions_of
from quire.config.facts import DeviceFacts, model_facts
from quire.config.memory.weight_facts import WeightFacts
from quire.config.options import Options
from quire.config.quant.held import MatrixFacts
from quire.config.resolve import resolve
from quire.config.stages import stage_cache
from quire.distributed.mesh import Mesh
from quire.kernels.native import library
from quire.layers import Rope
from quire.models._weight_report import model_bytes
from quire.models.build import MODELS, build_model, read_model_config
from quire.platform import cpu
from quire.platform.base import DeviceMemory
from quire.runner.state_tensors import StateTensors
from tests.cpu.models.harness import Together
from tests.cpu.pooling.folders import st_folder
from tests.cpu.tiny_models import write_model

TINY = sorted((pathlib.Path(__file__).parent / "models" / "tiny").glob("*.json"))
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("plan") / "qwen2", "qwen2")


@pytest.fixture
def qwen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


def plan(capsys, *argv):
    status = main(["plan", *map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", TINY, ids=lambda p: p.stem)
def test_facts_from_config_json_are_those_of_the_model(path):
    hf = json.loads(path.read_text())
    defaults = conventions_of(hf).defaults
    for given in (hf, {key: value for key, value in hf.items() if key not in defaults}):
        model_type, config = read_model_config(given)
        facts = model_facts(given)
        assert facts.layers == config.attention_layers()
        assert (facts.vocab, facts.hidden) == (config.vocab, config.hidden)
        with torch.device("meta"):
            model = MODELS.load(model_type).Model(config)
        tables = {(rope.config, rope.max_len) for rope in model.modules() if isinstance(rope, Rope)}
        assert facts.rotary == sum(table.dims for table, _ in tables)
        if conventions_of(given).positions_kind == "rotary" or model_type == "nemotron_h":
            assert facts.weights.matrices == matrix_elements(model, tied=config.tied)


@pytest.mark.slow("it imports sentence_transformers")
def test_an_encoder_needs_no_kv(tmp_path, capsys):
    folder = tmp_path / "st"
    st_folder(folder, "bert", dense=[(8, torch.nn.Tanh())], normalize=True, max_seq_length=20)
    status, found = plan(capsys, folder, "--dtype", "float32")
    assert status == 0
    rank = found["ranks"][0]
    assert (rank["num_blocks"], rank["need_bytes"], rank["kv_room_bytes"]) == (0, 0, 0)
    assert found["max_model_len"] == rank["longest_context"] == 20
    assert found["max_num_batched_tokens"] >= 20
    files = [folder / "model.safetensors", folder / "2_Dense/model.safetensors"]
    size = sum(one.stat().st_size for one in files)
    assert rank["weight_bytes"] == pytest.approx(size, rel=0.15)
    assert main(["plan", str(folder)]) == 0
    assert "KV memory" in (shown := capsys.readouterr().out)
    assert "none: prompts are computed whole" in shown
    assert "KV per token" not in shown


def test_a_model_that_pools_loads_no_output_head(tmp_path, capsys):
    folder = write_model(tmp_path / "m", "qwen2", tie_word_embeddings=False)
    _, generating = plan(capsys, folder, "--gpu-memory", "4GiB", "--dtype", "float32")
    words = ("--gpu-memory", "4GiB", "--dtype", "float32", "--runner", "pooling")
    _, pooling = plan(capsys, folder, *words)
    hf = json.loads((folder / "config.json").read_text())
    saved = generating["ranks"][0]["weight_bytes"] - pooling["ranks"][0]["weight_bytes"]
    assert saved == 4 * hf["vocab_size"] * hf["hidden_size"]
    assert generating["ranks"][0]["activation_bytes"] > pooling["ranks"][0]["activation_bytes"]


def matrix_elements(model, *, tied):
    """Elements of all weights but vectors: so are biases of experts and norms of heads."""
    left_out = tuple(model.weights.tie) if tied else ()
    return sum(
        value.numel()
        for name, value in model.named_parameters()
        if value.dim() > 1 and not name.endswith(("bias", "norm.weight"))
        if not name.startswith(left_out)
    )


def test_there_are_tiny_models_to_compare_with():
    assert len(TINY) >= 9


def test_known_values_of_a_7b_model(qwen, capsys):
    status, found = plan(capsys, qwen, "--gpu-memory", "24GiB")
    assert status == 0
    assert found["weights_from"] == "config.json (estimated)"
    rank = found["ranks"][0]
    assert rank["kv_bytes_per_token"] == 57344
    assert round(rank["need_bytes"] / 2**30, 2) == 7.00
    status, found = plan(capsys, qwen, "--gpu-memory", "24GiB", "--max-model-len", "120000")
    assert round(found["ranks"][0]["need_bytes"] / 2**30, 2) == 6.41
    assert found["fits"]


def test_a_plan_that_does_not_fit_states_what_would(qwen, capsys):
    status, found = plan(capsys, qwen, "--gpu-memory", "16GiB")
    assert status == 1
    assert not found["fits"]
    assert "What would fit: --max-model-len " in found["problem"]
    status, found = plan(capsys, qwen, "--gpu-memory", "16GiB", "-tp", "2")
    assert status == 0
    assert len(found["ranks"]) == 2
    assert found["ranks"][0]["kv_bytes_per_token"] == 57344 // 2


RANKS = [("llama", 4, 1), ("qwen3_moe", 2, 2), ("deepseek_v2", 2, 1), ("gpt2", 1, 2)]
RANKS += [("qwen3_next", 2, 2), ("mamba2", 4, 1)]


def resolve_ranks(facts, tensor, stages, found):
    options = {"model": "x", "tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    options |= {"dtype": "float32", "max_model_len": 64, "max_num_seqs": found["max_num_seqs"]}
    device = DeviceFacts(
        kind="cuda", total_bytes=2 << 30, free_bytes=2 << 30, count=tensor * stages
    )
    return resolve(Options.from_flat(options), facts, device).config


@pytest.mark.parametrize(("kind", "tensor", "stages"), RANKS)
def test_each_rank_is_planned_with_the_weights_that_it_holds(
    capsys, tmp_path, monkeypatch, kind, tensor, stages
):
    monkeypatch.setattr(library, "load_library", lambda: None)  # no padding of tiny matrices
    hf = json.loads((TINY[0].parent / f"{kind}.json").read_text())
    hf = hf.get("config", hf) | {"vocab_size": 203}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    sizes = ("-tp", tensor, "-pp", stages, "--dtype", "float32", "--max-model-len", 64)
    _, found = plan(capsys, tmp_path, "--gpu-memory", "2GiB", *sizes, "--load-format", "dummy")
    assert (found["devices"], found["pipeline_parallel_size"]) == (tensor * stages, stages)
    facts, layers = model_facts(hf), hf.get("num_hidden_layers") or hf["n_layer"]
    held = []
    for rank in range(tensor * stages):
        stage = range(layers // 2) if rank < tensor else range(layers // 2, layers)
        mesh = Mesh(tp=tensor, pp=stages, rank=rank)
        model = build_model(
            *read_model_config(hf), load_format="dummy", dtype=torch.float32, mesh=mesh,
            comm=Together(tensor).of(0), stage=stage if stages > 1 else None, progress=False,
        )  # fmt: skip
        section = resolve_ranks(facts, tensor, stages, found)
        own = stage_cache(section.cache, section.parallel, mesh.pp_rank).states
        rows = found["max_num_seqs"], found["state_checkpoints"] + found["draft_states"]
        states = StateTensors(own, *rows, torch.float32, torch.device("cpu")).nbytes
        assert found["ranks"][rank]["state_bytes"] == states
        assert bool(states) == bool(own)
        held.append(model_bytes(model) + facts.rotary * 64 * 4 + states)
    assert [one["weight_bytes"] for one in found["ranks"]] == held
    assert [one["stage"] for one in found["ranks"]] == [i // tensor for i in range(len(held))]


def test_engines_and_advice_are_in_the_plan(qwen, capsys):
    _, found = plan(capsys, qwen, "--gpu-memory", "40GiB", "-tp", "2", "-dp", "2")
    assert (found["data_parallel_size"], found["devices"]) == (2, 4)
    assert len(found["ranks"]) == 2
    assert any("--" not in line and "fits one device" in line for line in found["advice"])
    assert main(["plan", str(qwen), "--gpu-memory", "40GiB", "-tp", "2", "-dp", "2"]) == 0
    said = capsys.readouterr().out
    assert "2 engines need 4 devices" in said
    assert "rank 1" in said
    assert "--data-parallel-size 2" in said


def test_headers_give_the_exact_weights(folder, capsys):
    status, found = plan(capsys, folder, "--gpu-memory", "2GiB", "--dtype", "float32")
    assert status == 0
    assert found["weights_from"] == "tensor headers"
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert found["ranks"][0]["weight_bytes"] == pytest.approx(size, rel=0.15)


def test_the_table_is_readable(folder, capsys):
    assert main(["plan", str(folder), "--gpu-memory", "2GiB"]) == 0
    said = capsys.readouterr().out
    for what in (
        "weights",
        "KV per token",
        "activations",
        "KV memory",
        "longest context",
        "concurrency",
    ):
        assert what in said


def test_the_engine_takes_the_planned_blocks(folder, capsys):
    from quire import LLM

    _, found = plan(capsys, folder, "--offline", "--kv-cache-memory-bytes", "1MiB")
    llm = LLM(str(folder), kv_cache_memory_bytes="1MiB")
    assert llm.llm_engine.config.cache.num_blocks == found["ranks"][0]["num_blocks"]


@pytest.mark.parametrize("words", [(), ("--offline",), ("--kv-cache-memory-bytes", "1MiB")])
def test_explain_has_the_numbers_of_the_plan(folder, capsys, words, monkeypatch):
    free = DeviceMemory(16 * 2**30, 8 * 2**30)
    monkeypatch.setattr(cpu, "memory", lambda: free)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.01")
    _, found = plan(capsys, folder, *words)
    assert main(["explain", str(folder), "--json", *words]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["cache.num_blocks"] == found["ranks"][0]["num_blocks"]
    assert config["scheduler.max_num_batched_tokens"] == found["max_num_batched_tokens"]
    assert config["scheduler.max_num_seqs"] == found["max_num_seqs"]
    assert config["scheduler.max_model_len"] == found["max_model_len"]


def test_a_model_of_70b_on_a_cpu_of_23_gib_is_refused_before_it_is_loaded(
    tmp_path, capsys, monkeypatch
):
    shape = QWEN_7B | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
                       "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(cpu, "memory", lambda: DeviceMemory(23 * 2**30, 21 * 2**30))
    status, found = plan(capsys, tmp_path, "--device", "cpu")
    assert status == 1
    assert "for weights in bfloat16" in found["problem"]
    assert "a model with at most 20." in found["problem"]
    assert main(["explain", str(tmp_path), "--device", "cpu"]) == 2  # as the engine's start does
    assert found["problem"] in capsys.readouterr().err


def test_no_torch_is_needed(folder):
    code = f"""
import sys
from quire.cli import main
status = main(["plan", {str(folder)!r}, "--gpu-memory", "2GiB", "--json"])
sys.exit(status or 10 * ("torch" in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


class _Hub:
    """Replaces the hub's answer about the headers of a repository."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, api, name, *, revision=None):
        if isinstance(self.answer, Exception):
            raise self.answer
        tensors = {
            "a.weight": types.SimpleNamespace(dtype="BF16", shape=[1000, 50]),
            "b": types.SimpleNamespace(dtype="BF16", shape=[7]),
        }
        return types.SimpleNamespace(files_metadata={"f": types.SimpleNamespace(tensors=tensors)})


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        (None, "tensor headers on the hub"),
        (OSError("unplugged"), "config.json (estimated)"),
        (NotASafetensorsRepoError("pickles"), "config.json (estimated)"),
    ],
)
def test_headers_are_fetched_from_the_hub_when_there_are_no_files(
    qwen, monkeypatch, answer, source
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub = _Hub(answer)
    monkeypatch.setattr(HfApi, "get_safetensors_metadata", lambda *a, **k: hub(*a, **k))
    options = Options.from_flat({"model": "org/name"})
    found, said = weight_facts(options, qwen, {})
    assert said == source
    assert found == (
        WeightFacts(50000, 7, (MatrixFacts("a", 1000, 50),)) if answer is None else None
    )


def test_a_host_tier_beyond_free_memory_does_not_fit(folder, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "memory", lambda: DeviceMemory(16 * 2**30, 8 * 2**30))
    words = ("--device", "cpu", "--kv-cache-memory-bytes", "1MiB", "--kv-offloading-size")
    status, found = plan(capsys, folder, *words, "20")
    assert (status, found["fits"]) == (1, False)
    assert "--kv-offloading-size" in found["problem"]
    status, found = plan(capsys, folder, *words, "1")
    assert (status, found["ranks"][0]["host_bytes"] > 2**29) == (0, True)
    assert main(["plan", str(folder), *words, "1"]) == 0
    assert "host memory for KV" in capsys.readouterr().out
    assert main(["explain", str(folder), *words, "20"]) == 2
