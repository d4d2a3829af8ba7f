"""Checks a weight format against a dense model of its dequantized weights, on every path.

    def quantize(name, weight):          # one matrix; see `write_pair`
        codes, scales = ...
        return {"qweight": codes, "scales": scales}, (codes * scales)   # tensors, dense [O, I]

    pair = write_pair(tmp_path, tiny("llama"), quantize, {"quant_method": "gptq", "bits": 4})
    check_pair(pair)                     # or check_logits, check_paths, check_ranks alone
    check_equal_paths(pair)              # in 16 bits, where the dense model's tokens may differ

`tiny` has four models: "llama" (dense), "phi3" (dense, with one tensor for q, k and v and one for
gate and up), "qwen3_moe" (experts, one dense layer), "deepseek_v2" (latent attention, shared
experts). Their sizes follow from `unit`: hidden and latent sizes are
`unit`, the inputs of o_proj and down_proj 2 * unit. So two ranks cut inputs into parts of `unit`,
between groups of every size that divides it. Choose 128 for groups of 128, 256 for K-quants.

A format that is no folder of safetensors makes its own files of `tiny_tensors` and gives `Pair` a
`build` function.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.distributed.mesh import Mesh
from quire.models.build import build_model, read_model_config
from tests.cpu.engine_of import engine_of, request, run
from tests.cpu.models.harness import Stepper, Together
from tests.cpu.models.peers import prompt_of

SHARED = {
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
PROMPTS = (41, 5, 30)
"""Lengths of the prompts that run together."""
OUTPUT = 10
TIE = 5e-3
"""Tokens are compared until the dense model's two best logits are closer than this."""
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest error of logits, in units of their standard deviation."""


def tiny(model, unit=64, **changes):
    """The config.json of a tiny model. changes: of its fields."""
    found = SHARED | {"model_type": model, "hidden_size": unit, "intermediate_size": 2 * unit}
    if model != "deepseek_v2":
        found |= {"num_key_value_heads": 2, "head_dim": unit // 2}
    if model == "phi3":
        found |= {"original_max_position_embeddings": 512}
    if model == "qwen3_moe":
        found |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * unit}
        found |= {"mlp_only_layers": [0], "norm_topk_prob": True}
    if model == "deepseek_v2":
        found |= {"kv_lora_rank": unit, "q_lora_rank": unit, "qk_nope_head_dim": 16}
        found |= {"qk_rope_head_dim": 16, "v_head_dim": unit // 2, "num_key_value_heads": 4}
        found |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
        found |= {"moe_intermediate_size": 2 * unit, "first_k_dense_replace": 1}
    return found | changes


def tiny_shapes(hf):
    """Module name -> shape of its weight; matrices are [O, I]. The router is `mlp.gate`."""
    e, f, heads = hf["hidden_size"], hf["intermediate_size"], hf["num_attention_heads"]
    shapes = {"model.embed_tokens": (hf["vocab_size"], e)}
    sparse = range(0)
    if hf["model_type"] not in ("llama", "phi3"):
        first = hf["first_k_dense_replace"] if "n_routed_experts" in hf else 1
        sparse = range(first, hf["num_hidden_layers"])
    for i in range(hf["num_hidden_layers"]):
        at = f"model.layers.{i}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        shapes |= {f"{at}.{one}_layernorm": (e,) for one in ("input", "post_attention")}
        if "kv_lora_rank" in hf:
            latent, rank = hf["kv_lora_rank"], hf["q_lora_rank"]
            nope, rope, value = (hf[f"{k}_head_dim"] for k in ("qk_nope", "qk_rope", "v"))
            shapes[f"{attn}.q_a_proj"] = (rank, e)
            shapes[f"{attn}.q_a_layernorm"] = (rank,)
            shapes[f"{attn}.q_b_proj"] = (heads * (nope + rope), rank)
            shapes[f"{attn}.kv_a_proj_with_mqa"] = (latent + rope, e)
            shapes[f"{attn}.kv_a_layernorm"] = (latent,)
            shapes[f"{attn}.kv_b_proj"] = (heads * (nope + value), latent)
            shapes[f"{attn}.o_proj"] = (e, heads * value)
        else:
            width, kv = hf["head_dim"], hf["num_key_value_heads"]
            if hf["model_type"] == "phi3":
                shapes[f"{attn}.qkv_proj"] = ((heads + 2 * kv) * width, e)
            else:
                shapes[f"{attn}.q_proj"] = (heads * width, e)
                shapes |= {f"{attn}.{one}_proj": (kv * width, e) for one in "kv"}
            shapes[f"{attn}.o_proj"] = (e, heads * width)
            if hf["model_type"].startswith("qwen3"):
                shapes |= {f"{attn}.{one}_norm": (width,) for one in "qk"}
        blocks = {mlp: f}
        if i in sparse:
            x, width = hf.get("num_experts") or hf["n_routed_experts"], hf["moe_intermediate_size"]
            shapes[f"{mlp}.gate"] = (x, e)
            blocks = {f"{mlp}.experts.{n}": width for n in range(x)}
            if shared := hf.get("n_shared_experts"):
                blocks[f"{mlp}.shared_experts"] = shared * width
        for block, width in blocks.items():
            if hf["model_type"] == "phi3":
                shapes[f"{block}.gate_up_proj"] = (2 * width, e)
            else:
                shapes |= {f"{block}.{one}_proj": (width, e) for one in ("gate", "up")}
            shapes[f"{block}.down_proj"] = (e, width)
    return shapes | {"model.norm": (e,), "lm_head": (hf["vocab_size"], e)}


def tiny_tensors(hf, dtype=torch.float32, seed=3):
    """Checkpoint name -> random tensor of a whole plain model, large enough to decide tokens."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, shape in tiny_shapes(hf).items():
        value = torch.randn(shape, generator=draw)
        if len(shape) == 1:
            value = 1 + 0.2 * value
        else:
            value = value * (2.0 if "embed" in name else 1.2) / shape[-1] ** 0.5
        found[f"{name}.weight"] = value.to(dtype)
    return found


def build(folder, **settings):
    """(model, config) of a folder of safetensors."""
    model_type, config = read_model_config(json.loads((folder / "config.json").read_text()))
    settings = {"dtype": torch.float32, "progress": False, **settings}
    return build_model(model_type, config, folder=folder, **settings), config


@dataclass(frozen=True)
class Pair:
    """A quantized checkpoint, and the dense float32 one of its dequantized weights.

    build: (folder, **settings of build_model) -> (model, config), of the quantized one.
    """

    folder: Path
    dense: Path
    hf: dict
    build: Callable = build


def write_folder(folder, hf, tensors):
    """A checkpoint without a tokenizer; returns its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def write_pair(
    tmp_path, hf, quantize, config, *, dtype=torch.float32, edit=None, seed=3, routers=False
):
    """A Pair of folders below tmp_path.

    quantize(name, weight): called with each matrix but embeddings and routers: its module's name,
    as "model.layers.0.self_attn.q_proj" or "lm_head", and its value [O, I] in float32, rounded to
    `dtype`, in which the quantized folder has all that stays plain. Returns ({suffix: tensor},
    dense float32 [O, I]), or None for a matrix that stays plain.
    config: the quantization_config; None: config.json has none.
    edit(tensors): a last change of the quantized folder's tensors, a dict.
    routers: quantize is called with those, too.
    """
    stored, dense = {}, {}
    for name, value in tiny_tensors(hf, dtype, seed).items():
        module = name.removesuffix(".weight")
        skipped = ("embed_tokens",) if routers else ("embed_tokens", "mlp.gate")
        plain = value.dim() == 1 or module.endswith(skipped)
        made = None if plain else quantize(module, value.float())
        if made is None:
            stored[name], dense[name] = value, value.float()
            continue
        tensors, wide = made
        assert wide.shape == value.shape, (name, wide.shape, value.shape)
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        dense[name] = wide.float()
    if edit is not None:
        edit(stored)
    own = hf if config is None else hf | {"quantization_config": config}
    return Pair(
        write_folder(tmp_path / "quantized", own, stored),
        write_folder(tmp_path / "dense", hf, dense),
        hf,
    )


def check_pair(pair):
    """Equal logits and greedy tokens in float32 on all paths, and on two ranks."""
    model = check_logits(pair)
    check_paths(pair, model)
    check_ranks(pair)


def check_logits(pair, dtype=torch.float32):
    """Equal logits of a prompt, in chunks of any size. Returns the quantized (model, config)."""
    ids = prompt_of(50, pair.hf["vocab_size"])
    want = Stepper(*build(pair.dense)).logits(ids)
    built = pair.build(pair.folder, dtype=dtype)
    got = Stepper(*built, dtype=dtype).logits(ids)
    _assert_close(got, want, dtype)
    stepper = Stepper(*built, dtype=dtype)
    parts = [stepper.logits(ids[at:end]) for at, end in [(0, 33), (33, 34), (34, 50)]]
    _assert_close(torch.cat(parts), want, dtype)
    return built


def check_paths(pair, built=None):
    """Equal greedy tokens alone, in a batch, in chunks, after a prefix hit and preempted."""
    built = built or pair.build(pair.folder)
    vocab = pair.hf["vocab_size"]
    prompts = [prompt_of(length, vocab) for length in PROMPTS]
    prompts.append([*prompts[0][:36], *prompts[1]])  # shares two blocks with the first
    want = [_greedy(build(pair.dense), prompt) for prompt in prompts]
    assert sum(map(len, want)) > len(want) * OUTPUT // 2, "too many ties to compare tokens"
    requests = [request(str(i), prompt, OUTPUT) for i, prompt in enumerate(prompts)]
    for name, out in _on_paths(pair, built, requests):
        for i, tokens in enumerate(want):
            assert out[str(i), 0][: len(tokens)] == tokens, (name, i)


def check_equal_paths(pair, dtype=torch.bfloat16):
    """Equal greedy tokens on the same paths, of the quantized model alone."""
    built = pair.build(pair.folder, dtype=dtype)
    prompts = [prompt_of(length, pair.hf["vocab_size"]) for length in PROMPTS]
    prompts.append([*prompts[0][:36], *prompts[1]])
    requests = [request(str(i), prompt, OUTPUT) for i, prompt in enumerate(prompts)]
    (_, alone), *others = _on_paths(pair, built, requests, dtype=dtype)
    for name, out in others:
        assert out == alone, name


def _on_paths(pair, built, requests, **common):
    """(name, tokens) of the requests on each path of an engine."""
    paths = {
        "alone": ({"prefix": False}, 200),
        "in a batch": ({"prefix": False}, 0),
        "in chunks": ({"prefix": False, "budget": 9}, 0),
        "after a prefix hit": ({}, 30),
        "preempted": ({"prefix": False, "block_size": 4, "num_blocks": 24}, 0),
    }
    for name, (settings, stagger) in paths.items():
        engine = engine_of(pair.hf, built=built, **settings, **common)
        out, _ = run(engine, requests, stagger=stagger)
        stats = engine.stats()
        assert (stats.preemptions > 0) == (name == "preempted"), name
        assert (stats.prefix_hit_tokens > 0) == (name == "after a prefix hit"), name
        yield name, out


def check_ranks(pair, tp=2, experts=None):
    """Equal logits on every rank of a mesh. experts: the placement of whole experts, if any."""
    ids = prompt_of(50, pair.hf["vocab_size"])
    want = Stepper(*build(pair.dense)).logits(ids)
    together = Together(tp)

    def rank_main(rank):
        try:
            mesh = Mesh(tp=tp, ep=tp if experts else 1, rank=rank)
            built = pair.build(pair.folder, mesh=mesh, comm=together.of(rank), experts=experts)
            return Stepper(*built).logits(ids)
        except Exception:
            together.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        ranks = [pool.submit(rank_main, rank) for rank in range(tp)]
    failed = [rank.exception() for rank in ranks if rank.exception() is not None]
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not failed, failed
    for rank in ranks:
        _assert_close(rank.result(), want, torch.float32)


def _assert_close(got, want, dtype):
    """Within TOLERANCE everywhere; in 16 bits on average, as one choice of experts may differ."""
    assert got.isfinite().all()
    error = (got - want).abs() / want.std()
    worst = float(error.max() if dtype == torch.float32 else error.mean())
    assert worst < TOLERANCE[dtype], f"logits differ by {worst} standard deviations"


def _greedy(built, prompt):
    """The dense model's next tokens, up to the first tie."""
    stepper, out = Stepper(*built), []
    logits = stepper.logits(prompt)[-1]
    while len(out) < OUTPUT:
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) < TIE:
            break
        out.append(int(best.indices[0]))
        logits = stepper.logits(out[-1:])[-1]
    return out
