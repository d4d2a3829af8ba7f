"""The shipped model's files, read without any library: sizes, shapes, ids, and the split of its prompts."""

import importlib.util
import json
import math
import struct
import sys
from pathlib import Path

import pytest

from quire import embedded

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "embedded_model"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


def read(name):
    return json.loads((embedded.path() / name).read_text(encoding="utf-8"))


def tensors():
    """Name -> (dtype, shape) from the head of the safetensors file, and the bytes of data it promises."""
    file = embedded.path() / "model.safetensors"
    with file.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        head = json.loads(f.read(length))
    head.pop("__metadata__", None)
    end = max(t["data_offsets"][1] for t in head.values())
    assert file.stat().st_size == 8 + length + end
    return {name: (t["dtype"], tuple(t["shape"])) for name, t in head.items()}


def expected_shapes(c):
    heads, kv, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    hidden, mlp = c["hidden_size"], c["intermediate_size"]
    layer = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv * size, hidden),
        "self_attn.v_proj": (kv * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    out = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return out


def test_the_checkpoint_holds_exactly_the_tensors_of_a_qwen3_of_its_config_in_bf16():
    config = read("config.json")
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    found = tensors()
    assert {name: shape for name, (_, shape) in found.items()} == expected_shapes(config)
    assert {dtype for dtype, _ in found.values()} == {"BF16"}
    assert sum(math.prod(shape) for _, shape in found.values()) < 11.5e6


def test_everything_that_ships_stays_under_twenty_five_megabytes():
    files = [f for f in embedded.path().iterdir() if f.is_file()]
    names = {f.name for f in files}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert {"model.safetensors", "MODEL_CARD.md"} <= names
    assert sum(f.stat().st_size for f in files) < 25e6


def test_the_vocabulary_covers_every_byte_and_ends_where_the_embedding_ends():
    spec = read("tokenizer.json")
    vocab = spec["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(read("config.json")["vocab_size"]))
    assert len([t for t in vocab if len(t) == 1]) >= 256
    added = {t["content"]: (t["id"], t["special"]) for t in spec["added_tokens"]}
    assert list(added) == SPECIALS + MARKERS
    assert [added[t][0] for t in SPECIALS + MARKERS] == list(range(9))
    assert all(added[t][1] for t in SPECIALS)
    assert not any(added[t][1] for t in MARKERS)


def test_the_end_ids_of_the_configs_are_those_of_the_tokenizer():
    assert read("config.json")["eos_token_id"] == 2
    assert read("generation_config.json")["eos_token_id"] == [2, 0]
    assert read("tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_the_shipped_template_is_the_one_beside_the_generator():
    assert read("tokenizer_config.json")["chat_template"] == (
        TOOLS / "chat_template.jinja"
    ).read_text("utf-8")


@pytest.fixture(scope="module")
def tools():
    """The generator's modules: scripts beside each other, imported by their plain names."""
    sys.path.insert(0, str(TOOLS))
    before = set(sys.modules)
    try:
        names = ("draw", "mixture", "evaluate", "task_numbers")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(TOOLS))
        for name in set(sys.modules) - before:
            if importlib.util.find_spec("quire") and str(TOOLS) in str(
                getattr(sys.modules[name], "__file__", "")
            ):
                del sys.modules[name]


# Groups whose last turn is no question of the user's choosing: a tool's result, or a question about something
# said before (there the names and values are held out, not the question).
SHARED = ("tool_answer", "memory", "name_recall", "fresh_recall")


def question(prompt):
    """The last user turn of a prompt."""
    return prompt.rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>")[0]


def test_no_evaluation_question_is_a_training_question(tools):
    cases = [c for c in tools["evaluate"].cases(60) if not c.group.startswith(SHARED)]
    held_out = {question(c.prompt) for c in cases}
    draw = tools["draw"].Draw(2026)
    trained = {question(tools["mixture"].document(draw)[0]) for _ in range(12000)}
    assert len(held_out) > 800
    assert not held_out & trained


def test_no_evaluation_prompt_is_a_training_prompt(tools):
    held_out = {c.prompt for c in tools["evaluate"].cases(60)}
    draw = tools["draw"].Draw(7)
    assert not held_out & {tools["mixture"].document(draw)[0] for _ in range(6000)}


def test_no_training_sum_uses_a_held_out_pair(tools):
    draw, numbers, held = tools["draw"].Draw(5), tools["task_numbers"], tools["draw"].held_out_pair
    for _ in range(3000):
        op = "+-*"[_ % 3]
        assert not held(op, *numbers.operands(draw, op))
    judge = tools["draw"].Draw(5, held_out=True)
    assert all(held("+", *numbers.operands(judge, "+")) for _ in range(300))


def test_the_two_sides_of_a_list_share_nothing(tools):
    words = [f"word {i}" for i in range(50)]
    train, judge = tools["draw"].Draw(1), tools["draw"].Draw(1, held_out=True)
    seen = {train.value(words) for _ in range(2000)}
    kept = {judge.value(words) for _ in range(2000)}
    assert seen | kept == set(words)
    assert not seen & kept
