"""Tiny models of transformers with random weights: what ours are compared with.

A file tiny/<variant>.json is a config.json, plus settings of the comparison under "test":

    max_len   serve this many positions (default: as in our Config)
    lengths   prompt lengths to compare (default: LENGTHS)
    greedy    prompt lengths to continue (default: GREEDY)
    seed      of the weights, if the usual one makes a model that repeats itself
    attention transformers' implementation, if its eager one is wrong
    embeddings size of the embeddings: small ones, if each token would repeat itself
"""

import functools
import json
from dataclasses import replace
from pathlib import Path

import torch

from quire.models.build import build_model, read_model_config

TINY = Path(__file__).parent / "tiny"
LENGTHS = (1, 2, 33, 600)
GREEDY = (1, 600)
VARIANTS = sorted(path.stem for path in TINY.glob("*.json"))


def tiny(variant):
    """(config.json contents, test settings) of a variant."""
    hf = json.loads((TINY / f"{variant}.json").read_text())
    return hf, hf.pop("test", {})


def peer(variant, folder):
    """A transformers model of the variant, saved to the folder as well."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf, test = tiny(variant)
    settings = {key: value for key, value in hf.items() if key != "model_type"}
    config = AutoConfig.for_model(hf["model_type"], **settings)
    torch.manual_seed(test.get("seed", 1))
    how = test.get("attention", "eager")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=how).eval()
    if hf["model_type"] == "mpt":
        add_what_transformers_lacks(model, hf)
    usual = 0.3 if "gemma" in hf["model_type"] else 2.0  # gemma scales them itself
    scale_weights(model, test.get("embeddings", usual))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model


def add_what_transformers_lacks(model, hf):
    """Settings that MPT's own code follows and transformers' class reads past."""
    inner = model.transformer
    if hf.get("no_bias") is False:
        for module in inner.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)):
                module.bias = torch.nn.Parameter(torch.zeros(module.weight.shape[0]))
    attention = hf["attn_config"]
    if steepest := attention.get("alibi_bias_max"):
        build = functools.partial(inner.build_mpt_alibi_tensor, alibi_bias_max=steepest)
        inner.build_mpt_alibi_tensor = build
    if attention.get("alibi") is False:
        inner.build_mpt_alibi_tensor = lambda *_, **__: None
        inner.wpe = torch.nn.Embedding(hf["max_seq_len"], hf["d_model"])
        inner.wte.register_forward_hook(
            lambda _, __, out: out + inner.wpe(torch.arange(out.shape[1], device=out.device))
        )
        model.generation_config.use_cache = False  # a call has all tokens, from the first on
    if hf.get("logit_scale"):
        scale = 1.0 / hf["d_model"] ** 0.5
        model.lm_head.register_forward_hook(lambda _, __, out: out * scale)


@torch.no_grad()
def scale_weights(model, embeddings):
    """Weights as large as a trained model's, so that the best token wins clearly."""
    for name, value in model.named_parameters():
        noise = torch.randn_like(value)
        if name.endswith(".A_log") and value.ndim == 1:
            value.copy_(0.5 * noise - 3.0)  # states that carry far, as those of a trained model
        elif value.ndim == 1:
            value += 0.2 * noise
            value *= 0.2 if "embeddings_layernorm" in name else 1.0  # or each token repeats itself
            if "gemma4" in model.config.model_type and "q_norm" in name:
                value *= 0.25  # scores are not scaled
        elif "embed" in name or ".wte" in name or ".wpe" in name:
            value.copy_(noise * embeddings / value.shape[-1] ** 0.5)
        else:
            transposed = model.config.model_type == "gpt2" and ".c_" in name
            fan_in = value.shape[0] if transposed else value.shape[-1]
            value.copy_(noise * 1.2 / fan_in**0.5)
    for name, value in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):  # zero in a new model
            value.copy_(0.3 * torch.randn_like(value))
        if name.endswith("layer_scalar"):  # one in a new model
            value.copy_(0.5 + torch.rand_like(value))


def ours(variant, folder, dtype=torch.float32, **settings):
    """(model, config) of the checkpoint in the folder."""
    model_type, config = read_model_config(json.loads((folder / "config.json").read_text()))
    max_len = tiny(variant)[1].get("max_len", min(config.max_len, 1024))
    config = replace(config, max_len=max_len)
    settings = {"folder": folder, "progress": False, **settings}
    return build_model(model_type, config, dtype=dtype, **settings), config


def prompt_of(length, vocab, seed=0):
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


@torch.inference_mode()
def logprobs(model, ids):
    """transformers' log-probabilities [n, V] of every position."""
    ids = torch.tensor([ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float().log_softmax(-1).cpu()


def continued(model, ids, count):
    """transformers' greedy continuation."""
    prompt = torch.tensor([ids], device=model.device)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False
    )
    return out[0, len(ids) :].tolist()
