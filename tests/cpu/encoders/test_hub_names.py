"""Checkpoints of encoders as their authors published them: other names, fields and layouts.

Where transformers has no class of a model, a few lines of torch compute it.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from quire.config.model_identity import resolve_identity
from quire.errors import ConfigError
from quire.models.build import read_model_config
from tests.cpu.encoders.tiny_encoders import hidden_of, ours, texts_of, write_peer

SIZES = {
    "vocab_size": 150,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}


def rewrite(folder, hf, rename):
    """Give a folder another config.json, and its tensors other names: rename(name, tensors)."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    found = dict(rename(name, value) for name, value in tensors.items())
    save_file({k: v.contiguous() for k, v in found.items() if k}, folder / "model.safetensors")


def replaced(names):
    def rename(name, value):
        for old, new in names.items():
            name = name.replace(old, new)
        return name, value

    return rename


def assert_alike(theirs, folder, types=None):
    model, config = ours(folder)
    texts = texts_of((1, 2, 33, config.max_len), config.vocab)
    for ids, got in zip(texts, hidden_of(model, texts), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([ids])).last_hidden_state[0]
        assert (got - want).abs().max().item() < 1e-5
    return config


def test_gte_as_alibaba_published_it(tmp_path):
    theirs = write_peer(tmp_path, "gte", rope_theta=1000.0)
    hf = SIZES | {"model_type": "new", "vocab_size": 211, "rope_theta": 1000.0} | {
        "type_vocab_size": 1, "position_embedding_type": "rope", "hidden_act": "gelu",
        "architectures": ["NewModel"], "layer_norm_type": "layer_norm", "pack_qkv": True,
    }  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    assert any("up_gate_proj" in name for name in tensors), "transformers saves the old layout"
    rewrite(tmp_path, hf, lambda name, value: (f"new.{name.removeprefix('new.')}", value))
    assert_alike(theirs, tmp_path)


def test_ntk_scaling_of_gte_divides_the_slowest_frequency_by_its_factor():
    fields = SIZES | {"model_type": "gte", "rope_theta": 20000.0}
    scaled = fields | {"rope_scaling": {"type": "ntk", "factor": 8.0}}
    (_, plain), (_, config) = read_model_config(fields), read_model_config(scaled)
    want = plain.rope.scaling.frequencies(20000.0, 16, 96)[0]
    got = config.rope.scaling.frequencies(20000.0, 16, 96)[0]
    assert got[-1] / want[-1] == pytest.approx(1 / 8)
    assert got[0] / want[0] == pytest.approx(8 ** (-2 / 16))
    assert config.max_len == 96


def test_nomic_as_published(tmp_path):
    theirs = write_peer(tmp_path, "nomic_bert")
    hf = {"model_type": "nomic_bert", "vocab_size": 211, "n_embd": 64, "n_layer": 2, "n_head": 4}
    hf |= {"n_inner": 96, "n_positions": 400, "max_trained_positions": 96, "type_vocab_size": 2}
    hf |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0}
    hf |= {"layer_norm_epsilon": 1e-12, "rotary_scaling_factor": 2, "qkv_proj_bias": False}
    names = load_file(tmp_path / "model.safetensors")
    assert any("Wqkv" in name for name in names)
    rewrite(tmp_path, hf, lambda name, value: (name, value))
    assert assert_alike(theirs, tmp_path).max_len == 96


def test_jina_v3_as_published_with_its_adapters_left_out(tmp_path):
    theirs = write_peer(tmp_path, "jina_embeddings_v3", rope_theta=300.0)
    hf = SIZES | {"model_type": "xlm-roberta", "vocab_size": 211, "layer_norm_eps": 1e-5}
    hf |= {"position_embedding_type": "rotary", "rotary_emb_base": 300.0, "type_vocab_size": 1}
    hf |= {"architectures": ["XLMRobertaModel"], "lora_adaptations": ["retrieval.query"]}

    def rename(name, value):
        name = f"roberta.{name.removeprefix('roberta.')}"
        if name.endswith("weight") and value.dim() == 2:
            name = name.removesuffix("weight") + "parametrizations.weight.original"
        return name, value

    rewrite(tmp_path, hf, rename)
    path = tmp_path / "model.safetensors"
    lora = {"roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_A": torch.ones(5, 4)}
    save_file(load_file(path) | lora, path)
    assert_alike(theirs, tmp_path)


FLASH = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


def test_roberta_with_the_names_of_flash_attention(tmp_path):
    """jina-reranker-v2 has learned positions."""
    theirs = write_peer(tmp_path, "xlm_roberta")
    tensors = load_file(tmp_path / "model.safetensors")

    def rename(name, value):
        if ".query." in name:
            parts = (tensors[name.replace("query", part)] for part in ("query", "key", "value"))
            return name.replace("attention.self.query", "mixer.Wqkv").replace(
                "encoder.layer.", "encoder.layers."
            ), torch.cat(list(parts))
        if ".key." in name or ".value." in name:
            return "", value
        return replaced(FLASH)(name, value)

    hf = json.loads((tmp_path / "config.json").read_text())
    rewrite(tmp_path, hf, rename)
    assert any("mixer.Wqkv" in name for name in load_file(tmp_path / "model.safetensors"))
    assert_alike(theirs, tmp_path)


def random_tensors(shapes, seed=2):
    """Tensors of these names and shapes: norms near one, matrices as those of trained models."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            value *= 1.0 if "embeddings" in name else 1.2 / shape[-1] ** 0.5
        else:
            value = 0.2 * value + ("norm" in name.lower() and "weight" in name)
        found[name] = value
    return found


def affine(t, name, x):
    return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))


def normed(t, name, x):
    return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], 1e-12)


def slopes(heads):
    """For heads that are a power of two."""
    return torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)])


def attended(q, k, v, bias=None):
    """q, k, v [T, E] of 4 heads -> [T, E]."""
    q, k, v = (x.unflatten(1, (4, -1)).transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def jina_v2(t, ids, types, qk_norm):
    x = t["embeddings.word_embeddings.weight"][ids]
    x = normed(t, "embeddings.LayerNorm", x + t["embeddings.token_type_embeddings.weight"][types])
    at = torch.arange(len(ids)).float()
    bias = -slopes(4)[:, None, None] * (at[:, None] - at[None]).abs()
    for i in range(2):
        p = f"encoder.layer.{i}."
        q, k, v = (affine(t, f"{p}attention.self.{one}", x) for one in ("query", "key", "value"))
        if qk_norm:
            q = normed(t, f"{p}attention.self.layer_norm_q", q)
            k = normed(t, f"{p}attention.self.layer_norm_k", k)
        y = affine(t, f"{p}attention.output.dense", attended(q, k, v, bias))
        y = normed(t, f"{p}attention.output.LayerNorm", y + x)
        if qk_norm:
            y = normed(t, f"{p}layer_norm_1", y + x)
            up, gate = affine(t, f"{p}mlp.up_gated_layer", y).chunk(2, -1)
            x = normed(
                t, f"{p}layer_norm_2", affine(t, f"{p}mlp.down_layer", up * F.gelu(gate)) + y
            )
        else:
            gate, up = affine(t, f"{p}mlp.gated_layers", y).chunk(2, -1)
            x = normed(t, f"{p}mlp.layernorm", affine(t, f"{p}mlp.wo", up * F.gelu(gate)) + y)
    return x


def jina_v2_shapes(qk_norm):
    e, f = 64, 96
    vector = {"weight": (e,), "bias": (e,)}
    found = {
        "embeddings.word_embeddings": {"weight": (150, e)},
        "embeddings.token_type_embeddings": {"weight": (2, e)},
        "embeddings.LayerNorm": vector,
        "pooler.dense": {"weight": (e, e), "bias": (e,)},
    }
    for i in range(2):
        p = f"encoder.layer.{i}."
        for one in ("attention.self.query", "attention.self.key", "attention.self.value"):
            found[p + one] = {"weight": (e, e), "bias": (e,)}
        found[f"{p}attention.output.dense"] = {"weight": (e, e), "bias": (e,)}
        norms = ["attention.output.LayerNorm"]
        norms += ["layer_norm_1", "layer_norm_2"] if qk_norm else ["mlp.layernorm"]
        norms += ["attention.self.layer_norm_q", "attention.self.layer_norm_k"] if qk_norm else []
        found |= {p + one: vector for one in norms}
        up, down = ("up_gated_layer", "down_layer") if qk_norm else ("gated_layers", "wo")
        found[f"{p}mlp.{up}"] = {"weight": (2 * f, e)}
        found[f"{p}mlp.{down}"] = {"weight": (e, f), "bias": (e,)}
    return {f"{name}.{one}": shape for name, of in found.items() for one, shape in of.items()}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_jina_v2(qk_norm, tmp_path):
    tensors = random_tensors(jina_v2_shapes(qk_norm))
    save_file(tensors, tmp_path / "model.safetensors")
    code = "jina-bert-v2-qk-post-norm" if qk_norm else "jina-bert-implementation"
    hf = SIZES | {"model_type": "bert", "position_embedding_type": "alibi", "type_vocab_size": 2}
    hf |= {"architectures": ["JinaBertForMaskedLM"], "feed_forward_type": "geglu"}
    hf |= {"auto_map": {"AutoModel": f"jinaai/{code}--modeling_bert.JinaBertModel"}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model, config = ours(tmp_path)
    texts = texts_of((1, 40, 96), config.vocab)
    types = [[0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2) for text in texts]
    for ids, kinds, got in zip(texts, types, hidden_of(model, texts, types), strict=True):
        want = jina_v2(tensors, torch.tensor(ids), torch.tensor(kinds), qk_norm)
        assert (got - want).abs().max().item() < 1e-5


def rotated(x, base=10000.0):
    """x [T, E] of 4 heads, turned by position."""
    heads = x.unflatten(1, (4, -1))
    half = heads.shape[-1] // 2
    rate = base ** (-torch.arange(half) / half)
    angle = torch.arange(len(x))[:, None] * rate
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = heads[..., :half], heads[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).flatten(1)


def nomic_v2(t, ids, renormalise):
    x = t["embeddings.word_embeddings.weight"][ids]
    x = normed(t, "emb_ln", x + t["embeddings.token_type_embeddings.weight"][0])
    for i in range(2):
        p = f"encoder.layers.{i}."
        q, k, v = affine(t, f"{p}attn.Wqkv", x).chunk(3, -1)
        y = affine(t, f"{p}attn.out_proj", attended(rotated(q), rotated(k), v))
        y = normed(t, f"{p}norm1", y + x)
        if i == 0:
            out = affine(t, f"{p}mlp.fc2", F.gelu(affine(t, f"{p}mlp.fc1", y)))
        else:
            shares = affine(t, f"{p}mlp.router.layer", y).softmax(-1)
            best, chosen = shares.topk(2, -1)
            best = best / best.sum(-1, keepdim=True) if renormalise else best
            w1, w2 = (t[f"{p}mlp.experts.mlp.{w}"].view(4, 96, 64) for w in ("w1", "w2"))
            out = torch.zeros_like(y)
            for at in range(len(y)):
                for share, expert in zip(best[at], chosen[at]):
                    out[at] += share * (F.gelu(w1[expert] @ y[at]) @ w2[expert])
            out = out + t[f"{p}mlp.experts.bias"]
        x = normed(t, f"{p}norm2", out + y)
    return x


@pytest.mark.parametrize("renormalise", [False, True])
def test_nomic_v2_with_experts(renormalise, tmp_path):
    e, f, norm = 64, 96, {"weight": (64,), "bias": (64,)}
    of = {"embeddings.word_embeddings": {"weight": (150, e)}, "emb_ln": norm}
    of["embeddings.token_type_embeddings"] = {"weight": (1, e)}
    for i in range(2):
        p = f"encoder.layers.{i}."
        of[f"{p}attn.Wqkv"] = {"weight": (3 * e, e), "bias": (3 * e,)}
        of[f"{p}attn.out_proj"] = {"weight": (e, e), "bias": (e,)}
        of |= {f"{p}norm1": norm, f"{p}norm2": norm}
    of["encoder.layers.0.mlp.fc1"] = {"weight": (f, e), "bias": (f,)}
    of["encoder.layers.0.mlp.fc2"] = {"weight": (e, f), "bias": (e,)}
    of["encoder.layers.1.mlp.router.layer"] = {"weight": (4, e)}
    of["encoder.layers.1.mlp.experts.mlp"] = {"w1": (4 * f, e), "w2": (4 * f, e)}
    of["encoder.layers.1.mlp.experts"] = {"bias": (e,)}
    tensors = random_tensors({f"{k}.{one}": s for k, v in of.items() for one, s in v.items()})
    save_file(tensors, tmp_path / "model.safetensors")
    hf = {"model_type": "nomic_bert", "vocab_size": 150, "n_embd": 64, "n_layer": 2, "n_head": 4}
    hf |= {"n_inner": 96, "n_positions": 96, "type_vocab_size": 1, "activation_function": "gelu"}
    hf |= {"rotary_emb_base": 10000, "qkv_proj_bias": True, "mlp_fc1_bias": True}
    hf |= {"mlp_fc2_bias": True, "num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2}
    hf |= {"moe_normalize_expert_weights": renormalise, "layer_norm_epsilon": 1e-12}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model, config = ours(tmp_path)
    texts = texts_of((1, 40), config.vocab)
    for ids, got in zip(texts, hidden_of(model, texts), strict=True):
        want = nomic_v2(tensors, torch.tensor(ids), renormalise)
        assert (got - want).abs().max().item() < 1e-5


def test_eurobert_that_classifies_every_token_and_averages(tmp_path):
    theirs = write_peer(tmp_path, "eurobert", "classify", classifier_pooling="late")
    model, config = ours(tmp_path, "classify")
    texts = texts_of((1, 33), config.vocab)
    for ids, states in zip(texts, hidden_of(model, texts), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([ids])).logits
            got = model.classify(states.float().mean(0, keepdim=True))
        assert (got - want).abs().max().item() < 1e-5


@pytest.mark.parametrize(
    ("hf", "says"),
    [
        ({"model_type": "nomic_bert", "prenorm": True}, "prenorm is True"),
        ({"model_type": "gte", "logn_attention_scale": True}, "logn_attention_scale is True"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key'"),
        (
            {"model_type": "bert", "position_embedding_type": "alibi"}
            | {"feed_forward_type": "original"},
            "feed_forward_type is 'original'; supported: geglu, reglu",
        ),
        ({"model_type": "eurobert", "classifier_pooling": "max"}, "'max'; supported: late, mean"),
    ],
)
def test_what_is_not_served_is_refused_by_field(hf, says):
    with pytest.raises(ConfigError) as error:
        read_model_config(resolve_identity(SIZES | hf))
    assert says in str(error.value)
