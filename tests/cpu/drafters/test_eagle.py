"""EAGLE 1 and Medusa heads: their drafts are those of plain references."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

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

WEIGHTS = target_tensors()


def prompts():
    return [
        request("a", [5, 6, 7, 8] * 6, 20),
        request("b", range(20, 60), 20),
        request("c", [9], 20),
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), TARGET, WEIGHTS)


def last_states(tokens):
    """The states after the last norm of all tokens: [n, E]."""
    return rms(run_target(WEIGHTS, torch.tensor(tokens))[-1], WEIGHTS["model.norm.weight"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["plain", "nested with an embedding"])
def test_drafts_of_eagle_are_those_of_the_reference(target, tmp_path, layout):
    draw = drawn(6)
    head = {**layer_tensors(draw, "layers.0."), "fc.weight": draw(E, 2 * E)}
    hf = {**TARGET, "num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    if layout != "plain":
        head |= {"fc.bias": draw(E), "embed_tokens.weight": draw(V, E, std=1.0)}
        head["layers.0.input_layernorm.weight"] = draw(E, around=1.0)
        hf = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": hf}
    table = head.get("embed_tokens.weight", WEIGHTS["model.embed_tokens.weight"])

    def step(following, states):
        x = torch.cat((table[following], states), -1) @ head["fc.weight"].T + head.get("fc.bias", 0)
        norm = head.get("layers.0.input_layernorm.weight")
        normed = x if norm is None else rms(x, norm)
        x = x + attend(head, "layers.0.self_attn.", normed, torch.arange(len(x)))
        normed = rms(x, head["layers.0.post_attention_layernorm.weight"])
        out = x + gated(head, "layers.0.mlp.", normed)
        return out, (out @ WEIGHTS["lm_head.weight"].T).argmax(-1)

    @cache
    def reference(tokens):
        return chain(tokens, last_states(tokens[:-1]), step, 4)

    engine = engine_with(target, "eagle", write(tmp_path, hf, head), budget=13)
    got, whole = check_drafts(engine, prompts(), reference)
    assert got == run(plain_engine(target), prompts())[0]
    assert whole > 0.9


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["pickle", "converted"])
def test_drafts_of_medusa_are_those_of_the_reference(target, tmp_path, layout):
    draw, heads, layers = drawn(7), 3, 2
    blocks = [[(draw(E, E), draw(E)) for _ in range(layers)] for _ in range(heads)]
    outputs = [draw(V, E) for _ in range(heads)]
    tensors = {}
    names = {
        "pickle": ("{}.{}.linear", "{}.2"),
        "converted": ("blocks.{}.layers.{}", "lm_heads.{}"),
    }
    inner, outer = names[layout]
    for i in range(heads):
        tensors[f"{outer.format(i)}.weight"] = outputs[i]
        for j in range(layers):
            tensors[f"{inner.format(i, j)}.weight"], tensors[f"{inner.format(i, j)}.bias"] = blocks[
                i
            ][j]
    folder = write(tmp_path, {"medusa_num_heads": 5, "medusa_num_layers": layers}, tensors)
    if layout == "pickle":
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")

    @cache
    def reference(tokens):
        state, found = last_states(tokens[:-1])[-1], []
        for block, output in zip(blocks, outputs):
            x = state
            for weight, bias in block:
                x = x + F.silu(weight @ x + bias)
            found.append(int((output @ x).argmax()))
        return tuple(found)

    engine = engine_with(target, "medusa", folder, drafts=3, budget=13)
    got, whole = check_drafts(engine, prompts(), reference, drafts=3)
    assert got == run(plain_engine(target), prompts())[0]
    assert whole > 0.9
