"""EAGLE-3 heads: their drafts are those of a plain reference, and texts are those without."""

from functools import cache

import pytest
import torch

from tests.cpu.drafters.heads import (
    TARGET,
    D,
    E,
    V,
    attend,
    chain,
    check_drafts,
    drawn,
    engine_with,
    gated,
    layer_tensors,
    plain_engine,
    rms,
    run_target,
    target_tensors,
    write,
)
from tests.cpu.engine_of import request, run

DRAFT_VOCAB = 40
IDS = [1, 2, 3]


def head_tensors(prefix, *, own_embedding=False, norms=(), whole_vocab=False, seed=5):
    """norms: "fc": of the states side by side; "states": of each; "queries": of queries and keys."""
    draw = drawn(seed)
    found = layer_tensors(draw, prefix, inputs=2 * E)
    outputs = V if whole_vocab else DRAFT_VOCAB
    found |= {
        f"{prefix}input_layernorm.weight": draw(E, around=1.0),
        f"{prefix}hidden_norm.weight": draw(E, around=1.0),
        "fc.weight": draw(E, 3 * E),
        "norm.weight": draw(E, around=1.0),
        "lm_head.weight": draw(outputs, E),
    }
    if not whole_vocab:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort()[0]
        found["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        found["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    if own_embedding:
        found["embed_tokens.weight"] = draw(V, E, std=1.0)
    if "fc" in norms:
        found["input_norm.weight"] = draw(3 * E, around=1.0)
    if "states" in norms:
        found |= {f"fc_norm.{i}.weight": draw(E, around=1.0) for i in range(3)}
    if "queries" in norms:
        for one in "qk":
            found[f"{prefix}self_attn.{one}_norm.weight"] = draw(D, around=1.0)
    return found


def reference_of(head, target, prefix, *, before=False, norm_output=False, count=4, follow=None):
    """before: the residual is the normed state. follow(tokens): as chain() has it."""
    embedding = head.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    offsets = head.get("d2t", torch.zeros(V, dtype=torch.int64))

    def step(following, states):
        positions = torch.arange(len(following))
        normed = rms(states, head[f"{prefix}hidden_norm.weight"])
        both = torch.cat(
            (rms(embedding[following], head[f"{prefix}input_layernorm.weight"]), normed), -1
        )
        attention, norms = f"{prefix}self_attn.", f"{prefix}self_attn.q_norm.weight" in head
        x = (normed if before else states) + attend(head, attention, both, positions, norms)
        u = x + gated(
            head, f"{prefix}mlp.", rms(x, head[f"{prefix}post_attention_layernorm.weight"])
        )
        normed = rms(u, head["norm.weight"])
        ids = (normed @ head["lm_head.weight"].T).argmax(-1)
        return (normed if norm_output else u), ids + offsets[ids]

    @cache
    def reference(tokens):
        streams = run_target(target, torch.tensor(tokens[:-1]))
        parts = [streams[i] for i in IDS]
        if "fc_norm.0.weight" in head:
            parts = [rms(one, head[f"fc_norm.{i}.weight"]) for i, one in enumerate(parts)]
        x = torch.cat(parts, -1)
        if "input_norm.weight" in head:
            x = rms(x, head["input_norm.weight"])
        known = follow(tokens) if follow else None
        return chain(tokens, x @ head["fc.weight"].T, step, count, known)

    return reference


LAYER = {key: TARGET[key] for key in TARGET if key != "num_hidden_layers"}
PLAIN = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS, "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_aux_hidden_state_layer_ids": IDS,
    "transformer_layer_config": LAYER,
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
}


def prompts():
    return [
        request("a", [5, 6, 7, 8] * 6, 24),
        request("b", range(20, 60), 24),
        request("c", [9], 24),
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), TARGET, target_tensors())


QWEN = {**PLAIN, "architectures": ["Eagle3Qwen3ForCausalLM"], "norm_before_residual": True}
LAYOUTS = {
    "plain": (PLAIN, "midlayer.", {}, {}),
    "speculators": (SPECULATORS, "layers.0.", {"own_embedding": True}, {"before": True}),
    "speculators, residual before the norm": (
        {**SPECULATORS, "norm_before_residual": False},
        "layers.0.",
        {"own_embedding": True},
        {},
    ),
    "norms": (
        {**PLAIN, "norm_before_fc": True, "norm_output": True},
        "midlayer.",
        {"norms": ("fc",)},
        {"norm_output": True},
    ),
    "a norm for each state": ({**PLAIN, "fc_norm": True}, "midlayer.", {"norms": ("states",)}, {}),
    "qwen3": (QWEN, "midlayer.", {"norms": ("queries",)}, {"before": True}),
    "whole vocabulary": ({**PLAIN, "draft_vocab_size": V}, "midlayer.", {"whole_vocab": True}, {}),
}
"""config.json, names of the layer's tensors, how they are drawn, and how the reference runs."""
ENGINES = ({"budget": 13}, {"eager": True, "block_size": 8}, {"depth": 2})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "engine"), zip(LAYOUTS, 3 * ENGINES))
def test_drafts_are_those_of_the_reference(target, tmp_path, layout, engine):
    hf, prefix, more, knobs = LAYOUTS[layout]
    head = head_tensors(prefix, **more)
    folder = write(tmp_path, hf, head)
    want, _ = run(plain_engine(target), prompts())
    made = engine_with(target, "eagle3", folder, **engine)
    reference = reference_of(head, target_tensors(), prefix, **knobs)
    got, whole = check_drafts(made, prompts(), reference)
    assert got == want
    assert whole > 0.9
