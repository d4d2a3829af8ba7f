"""Tiny random targets and drafters, as checkpoints under their true names, and plain references."""

import json
from functools import cache

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from quire.config.engine_config import SpeculationSection
from quire.config.facts import read_hf_config
from quire.engine.startup.drafter_setup import describe_drafter
from quire.models.build import build_model, read_model_config
from tests.cpu.engine_of import TINY, engine_of

TARGET = {**TINY, "num_hidden_layers": 4}
E, V, H, K, D, F_ = 32, 97, 4, 2, 8, 64
EPS = 1e-6


def drawn(seed):
    """Return a function that draws weights."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape, around=0.0, std=None):
        std = (shape[-1] ** -0.5 if len(shape) > 1 else 0.3) if std is None else std
        return torch.randn(shape, generator=source) * std + around

    return draw


def layer_tensors(draw, prefix, inputs=E, hidden=E):
    return {
        f"{prefix}self_attn.q_proj.weight": draw(H * D, inputs),
        f"{prefix}self_attn.k_proj.weight": draw(K * D, inputs),
        f"{prefix}self_attn.v_proj.weight": draw(K * D, inputs),
        f"{prefix}self_attn.o_proj.weight": draw(hidden, H * D),
        f"{prefix}post_attention_layernorm.weight": draw(hidden, around=1.0),
        f"{prefix}mlp.gate_proj.weight": draw(F_, hidden),
        f"{prefix}mlp.up_proj.weight": draw(F_, hidden),
        f"{prefix}mlp.down_proj.weight": draw(hidden, F_),
    }


def target_tensors(hf=TARGET, seed=1):
    draw, found = drawn(seed), {}
    for i in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        found |= layer_tensors(draw, prefix)
        found[f"{prefix}input_layernorm.weight"] = draw(E, around=1.0)
    found["model.embed_tokens.weight"] = draw(V, E, std=1.0)
    found["model.norm.weight"] = draw(E, around=1.0)
    found["lm_head.weight"] = draw(V, E)
    return found


def write(folder, hf, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def agreeing_pair(root):
    """Write a target and an EAGLE head whose drafts are often right: layers add little to the
    embedding of a token, and the head has that alone. Returns their folders."""
    tensors = {
        name: one * 0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else one
        for name, one in target_tensors().items()
    }
    tensors["model.norm.weight"] = torch.ones(E)
    tensors["lm_head.weight"] *= 4
    head = layer_tensors(drawn(3), "layers.0.")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        head[f"layers.0.{name}.weight"] *= 0
    head["fc.weight"] = torch.cat([torch.eye(E), torch.zeros(E, E)], 1)
    hf = {**TARGET, "num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    return write(root / "target", TARGET, tensors), write(root / "head", hf, head)


def watch_plans(engine):
    """Return a list to which the engine adds each of its plans."""
    plans, planned = [], engine._observer.on_step_planned

    def note(plan):
        plans.append(plan)
        planned(plan)

    engine._observer.on_step_planned = note
    return plans


@cache
def built_target(folder):
    kind, config = read_model_config(read_hf_config(folder))
    model = build_model(kind, config, folder=folder, dtype=torch.float32, progress=False)
    return model, config


def engine_with(target, method, folder, drafts=4, **knobs):
    """An engine of the target's folder, with a drafter's."""
    hf = read_hf_config(target)
    model, config = built_target(target)
    found = describe_drafter(method, folder, hf["model_type"], config, hf)
    section = SpeculationSection(method=method, max_drafts=drafts, adaptive=False)
    knobs = {"max_len": 200, **knobs}
    return engine_of(hf, built=(model, config), speculation=section, drafter=found, **knobs)


def plain_engine(target, **knobs):
    hf = read_hf_config(target)
    return engine_of(hf, built=built_target(target), **{"max_len": 200, **knobs})


# -- references in plain torch ----------------------------------------------------------------


def rms(x, weight, eps=EPS):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(w, prefix, x, positions, norms=False):
    """Attention of tokens at all positions up to theirs: [n, inputs] -> [n, E]."""
    q = (x @ w[f"{prefix}q_proj.weight"].T).view(-1, H, D)
    k = (x @ w[f"{prefix}k_proj.weight"].T).view(-1, K, D)
    v = (x @ w[f"{prefix}v_proj.weight"].T).view(-1, K, D)
    if norms:
        q, k = rms(q, w[f"{prefix}q_norm.weight"]), rms(k, w[f"{prefix}k_norm.weight"])
    q, k = rotate(q, positions), rotate(k, positions)
    k, v = (one.repeat_interleave(H // K, 1) for one in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True
    )
    return out[0].transpose(0, 1).reshape(len(x), H * D) @ w[f"{prefix}o_proj.weight"].T


def gated(w, prefix, x):
    act = F.silu(x @ w[f"{prefix}gate_proj.weight"].T) * (x @ w[f"{prefix}up_proj.weight"].T)
    return act @ w[f"{prefix}down_proj.weight"].T


def run_target(w, tokens, layers=4):
    """The residual stream that enters each layer, and leaves the last: [L + 1][n, E]."""
    x, positions = w["model.embed_tokens.weight"][tokens], torch.arange(len(tokens))
    streams = [x]
    for i in range(layers):
        prefix = f"model.layers.{i}."
        normed = rms(x, w[f"{prefix}input_layernorm.weight"])
        x = x + attend(w, f"{prefix}self_attn.", normed, positions)
        normed = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
        x = x + gated(w, f"{prefix}mlp.", normed)
        streams.append(x)
    return streams


def chain(tokens, states, run, count, follow=None):
    """The drafts behind all tokens. run(next tokens, states) -> (states, drafts) of a sequence.

    states: of all tokens but the last, which has no state yet. follow: position -> token that the
    keys there were made of, where it is not the next one.
    """
    following, found = list(tokens[1:]), []
    for position, token in (follow or {}).items():
        if position < len(following) - 1:
            following[position] = token
    for _ in range(count):
        outs, drafts = run(torch.tensor(following), states)
        found.append(int(drafts[-1]))
        following.append(found[-1])
        states = torch.cat((states, outs[-1:]))
    return tuple(found)


def run_drafting(engine, requests, see, stagger=0, close=True):
    """Run requests, added `stagger` steps apart; see(sequence) each that has drafts. Returns the
    tokens."""
    drafting = engine._scheduler._drafting
    set_proposals = drafting.set_proposals

    def note(seq, drafts):
        set_proposals(seq, drafts)
        if seq.drafts and seq.tokens[-1] >= 0:
            see(seq)

    drafting.set_proposals = note  # the next step may be planned before step() returns
    waiting, out, steps = list(requests), {}, 0
    while waiting or not engine.idle:
        while waiting and not (stagger and steps % stagger):
            engine.add(waiting.pop(0))
            if stagger:
                break
        for update in engine.step():
            assert update.error is None
            out.setdefault((update.request_id, update.index), []).extend(update.token_ids)
        steps += 1
    drafting.set_proposals = set_proposals
    if close:
        engine.shutdown()
    return out


def check_drafts(engine, requests, reference, drafts=4, stagger=0):
    """Run requests; compare what is proposed for each sequence in each step with a reference.

    Returns the tokens, and how many of the proposals were whole.
    """
    lengths = []

    def see(seq):
        want = reference(tuple(seq.tokens))
        assert seq.drafts == want[: len(seq.drafts)], (seq.tokens, seq.drafts, want)
        lengths.append(len(seq.drafts))

    out = run_drafting(engine, requests, see, stagger)
    assert lengths, "there were proposals"
    return out, lengths.count(drafts) / len(lengths)


def recorded_drafts(engine, requests, stagger=0):
    """Run requests. Returns what was proposed behind each text."""
    found = {}
    run_drafting(
        engine, requests, lambda seq: found.update({tuple(seq.tokens): seq.drafts}), stagger
    )
    return found
