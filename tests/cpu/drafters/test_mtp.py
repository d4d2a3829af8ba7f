"""Layers that predict further tokens: their drafts are those of transformers' layers."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu.drafters.heads import chain, check_drafts, drawn, engine_with, plain_engine, rms
from tests.cpu.engine_of import request, run
from tests.cpu.models.peers import peer, scale_weights

MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}
"""Names of MiMo for those of DeepSeek."""


def one_layer_of(theirs, tmp_path):
    """A model of one layer with attention like those of another, and its tensors by the names of a
    checkpoint."""
    from transformers import AutoModelForCausalLM

    config = type(theirs.config)(**theirs.config.to_dict())
    config.num_hidden_layers, config.first_k_dense_replace = 1, 0
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    torch.manual_seed(9)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    scale_weights(made, 2.0)
    made.save_pretrained(tmp_path)
    return made, load_file(tmp_path / "model.safetensors")


def added_tensors(tensors, layer, vocab, size, *, own):
    """The tensors of layer n of a checkpoint with n layers. own: it has embedding and head too."""
    draw, at = drawn(4), f"model.layers.{layer}."
    found = {
        name.replace("model.layers.0.", at): one
        for name, one in tensors.items()
        if name.startswith("model.layers.0.")
    }
    found |= {
        f"{at}enorm.weight": draw(size, around=1.0),
        f"{at}hnorm.weight": draw(size, around=1.0),
        f"{at}eh_proj.weight": draw(size, 2 * size, std=0.3),
        f"{at}shared_head.norm.weight": tensors["model.norm.weight"],
    }
    if own:
        found[f"{at}embed_tokens.weight"] = draw(vocab, size, std=1.0)
        found[f"{at}shared_head.head.weight"] = draw(vocab, size)
    return found


def renamed(name, at):
    """MiMo's name of a tensor of layer n."""
    path = name.removeprefix(at).removesuffix(".weight")
    return name.replace(at, "model.mtp_layers.0.").replace(path, MIMO.get(path, path))


def reference_of(theirs, layer, head, at, eps, count=4, *, mimo=False):
    table = head.get(f"{at}embed_tokens.weight", theirs.model.embed_tokens.weight)
    output = head.get(f"{at}shared_head.head.weight", theirs.lm_head.weight)
    norm = lambda x, name: rms(x, head[f"{at}{name}.weight"], eps)  # noqa: E731

    def step(following, states):
        embedded = table[following]
        embedded[0] = 0
        both = [norm(embedded, "enorm"), norm(states, "hnorm")]
        both = torch.cat(both[::-1] if mimo else both, -1)
        x = both @ head[f"{at}eh_proj.weight"].T
        out = layer.model(inputs_embeds=x[None]).last_hidden_state[0]
        return out, (out @ output.T).argmax(-1)

    @cache
    @torch.no_grad()
    def reference(tokens):
        states = theirs.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        return chain(tokens, states, step, count)

    return reference


@pytest.mark.sampled(2)
@pytest.mark.slow("transformers' models of experts, and engines over them")
@pytest.mark.parametrize(
    ("variant", "own", "knobs"),
    [
        ("deepseek_v3", False, {"budget": 13}),
        ("glm4_moe", True, {"depth": 2}),
        ("mimo", False, {"block_size": 8}),
    ],
)
def test_drafts_are_those_of_the_reference(variant, own, knobs, tmp_path):
    target = tmp_path / "target"
    theirs = peer("qwen2" if variant == "mimo" else variant, target)
    layer, tensors = one_layer_of(theirs, tmp_path / "layer")
    c = theirs.config
    head = added_tensors(tensors, c.num_hidden_layers, c.vocab_size, c.hidden_size, own=own)
    path, at = target / "model.safetensors", f"model.layers.{c.num_hidden_layers}."
    stored = head
    if variant == "mimo":
        stored = {renamed(name, at): one for name, one in head.items()}
        hf = json.loads((target / "config.json").read_text())
        hf |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        (target / "config.json").write_text(json.dumps(hf))
    save_file({**load_file(path), **stored}, path)
    mimo = variant == "mimo"
    reference = reference_of(theirs, layer, head, at, c.rms_norm_eps, mimo=mimo)
    prompts = [request("a", [5, 6, 7, 8] * 6, 20), request("b", range(20, 60), 20)]
    want, _ = run(plain_engine(target), prompts)
    got, whole = check_drafts(engine_with(target, "mtp", target, **knobs), prompts, reference)
    assert got == want
    assert whole > 0.9


@pytest.mark.sampled(3)
@pytest.mark.slow("transformers' models with recurrent layers, and engines over them")
@pytest.mark.parametrize(
    ("variant", "knobs"),
    [
        ("qwen3_next", {"budget": 13}),
        ("qwen3_5_text", {"depth": 2}),
        ("qwen3_5_moe_text", {"block_size": 8}),
    ],
)
def test_drafts_beside_recurrent_layers_are_those_of_the_reference(variant, knobs, tmp_path):
    target = tmp_path / "target"
    theirs = peer(variant, target)
    layer, tensors = one_layer_of(theirs, tmp_path / "layer")
    eps, size, draw = theirs.config.rms_norm_eps, theirs.config.hidden_size, drawn(4)
    head = {
        name.replace("model.layers.0.", "mtp.layers.0."): one
        for name, one in tensors.items()
        if name.startswith("model.layers.0.")
    }
    head |= {
        "mtp.fc.weight": draw(size, 2 * size, std=0.3),
        "mtp.pre_fc_norm_embedding.weight": draw(size),
        "mtp.pre_fc_norm_hidden.weight": draw(size),
        "mtp.norm.weight": tensors["model.norm.weight"],
    }
    path = target / "model.safetensors"
    save_file({**load_file(path), **head}, path)
    norm = lambda x, name: rms(x, 1 + head[f"mtp.pre_fc_norm_{name}.weight"], eps)  # noqa: E731

    def step(following, states):
        embedded = norm(theirs.model.embed_tokens.weight[following], "embedding")
        x = torch.cat([embedded, norm(states, "hidden")], -1) @ head["mtp.fc.weight"].T
        out = layer.model(inputs_embeds=x[None]).last_hidden_state[0]
        return out, (out @ theirs.lm_head.weight.T).argmax(-1)

    @cache
    @torch.no_grad()
    def reference(tokens):
        states = theirs.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        return chain(tokens, states, step, 4)

    prompts = [request("a", [5, 6, 7, 8] * 6, 20), request("b", range(20, 60), 20)]
    want, _ = run(plain_engine(target), prompts)
    got, whole = check_drafts(engine_with(target, "mtp", target, **knobs), prompts, reference)
    assert got == want
    assert whole > 0.9
