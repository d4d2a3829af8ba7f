"""EAGLE-3 heads: their drafts are those of a plain reference, and texts are those without."""

from functools import cache

import pytest
import torch

from tests.cpu.drafters.heads import (
    TARGET,
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


def head_tensors(prefix, *, own_embedding=False, norm_before_fc=False, seed=5):
    draw = drawn(seed)
    found = layer_tensors(draw, prefix, inputs=2 * E)
    found |= {
        f"{prefix}input_layernorm.weight": draw(E, around=1.0),
        f"{prefix}hidden_norm.weight": draw(E, around=1.0),
        "fc.weight": draw(E, 3 * E),
        "norm.weight": draw(E, around=1.0),
        "lm_head.weight": draw(DRAFT_VOCAB, E),
    }
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort()[0]
    found["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    found["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    if own_embedding:
        found["embed_tokens.weight"] = draw(V, E, std=1.0)
    if norm_before_fc:
        found["input_norm.weight"] = draw(3 * E, around=1.0)
    return found


def reference_of(head, target, prefix, *, before=False, norm_output=False, count=4):
    embedding = head.get("embed_tokens.weight", target["model.embed_tokens.weight"])

    def step(following, states):
        positions = torch.arange(len(following))
        normed = rms(states, head[f"{prefix}hidden_norm.weight"])
        both = torch.cat(
            (rms(embedding[following], head[f"{prefix}input_layernorm.weight"]), normed), -1
        )
        x = (normed if before else states) + attend(head, f"{prefix}self_attn.", both, positions)
        u = x + gated(
            head, f"{prefix}mlp.", rms(x, head[f"{prefix}post_attention_layernorm.weight"])
        )
        normed = rms(u, head["norm.weight"])
        ids = (normed @ head["lm_head.weight"].T).argmax(-1)
        return (normed if norm_output else u), ids + head["d2t"][ids]

    @cache
    def reference(tokens):
        streams = run_target(target, torch.tensor(tokens[:-1]))
        x = torch.cat([streams[i] for i in IDS], -1)
        if "input_norm.weight" in head:
            x = rms(x, head["input_norm.weight"])
        return chain(tokens, x @ head["fc.weight"].T, step, count)

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


@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        ("plain", {"budget": 13}),
        ("speculators", {"eager": True, "block_size": 8}),
        ("norms", {"depth": 2}),
    ],
)
def test_drafts_are_those_of_the_reference(target, tmp_path, layout, engine):
    hf, prefix, more, knobs = {
        "plain": (PLAIN, "midlayer.", {}, {}),
        "speculators": (SPECULATORS, "layers.0.", {"own_embedding": True}, {"before": True}),
        "norms": (
            {**PLAIN, "norm_before_fc": True, "norm_output": True},
            "midlayer.",
            {"norm_before_fc": True},
            {"norm_output": True},
        ),
    }[layout]
    head = head_tensors(prefix, **more)
    folder = write(tmp_path, hf, head)
    want, _ = run(plain_engine(target), prompts())
    made = engine_with(target, "eagle3", folder, **engine)
    reference = reference_of(head, target_tensors(), prefix, **knobs)
    got, whole = check_drafts(made, prompts(), reference)
    assert got == want
    assert whole > 0.9
