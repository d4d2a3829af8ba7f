"""Every architecture that runs through its class of transformers gives that class's outputs.

Three sequences are packed in a step, in chunks, with decodes between them; transformers computes
each alone, with its eager attention.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import env
from quire.config.architectures import CLASSES, WRAPPERS, architectures, refusal_of
from quire.config.conventions import ENCODERS
from quire.config.facts import read_hf_config
from quire.config.options import Options
from quire.engine.startup.model_setup import describe_model
from quire.models.build import build_model, read_model_config
from tests import tiers
from tests.cpu.models.fallback.tiny_models import VOCAB, tiny_config, tiny_model
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import VARIANTS, logprobs, peer, prompt_of, tiny

TOLERANCE = 1e-4
PROMPTS = [prompt_of(n, VOCAB) for n in (40, 23, 33)]
STEPS = [
    [(0, 17), (1, 5)],  # two prompts begin
    [(1, 18), (2, 9)],
    [(0, 1), (2, 13)],  # a decode beside a chunk
    [(0, 1), (2, 1)],
    [(2, 10), (0, 21)],
]
"""(sequence, tokens) of each step."""
EVERYDAY = {
    "apertus": "an activation with parameters that are numbers",
    "cohere2": "windows, rope on some layers, parallel attention and MLP, a logit scale",
    "deepseek_v2": "latent attention, experts, scaled rope",
    "diffllama": "a module that attends twice, with other values",
    "gemma3n_text": "shared keys and values, embeddings per layer",
    "gemma4_text": "two head sizes, shared keys and values",
    "gpt_bigcode": "learned positions, one kv head",
    "gpt_oss": "sinks, windows, experts stored the other way round",
    "longcat_flash": "two attentions per layer, experts of no computation",
    "nemotron": "partial rotary; no keyword reaches its attention",
    "vaultgemma": "soft caps",
}
HALVES = {"emu3_text_model": "emu3", "mllama_text_model": "mllama"}
"""Text half -> wrapper, by which transformers finds the class of the half."""
NO_CLASS = {"internlm2", "jina_bert", "qwen3_vl_moe_text"}
"""Types of which transformers has no class."""
CROSS = {"blip_text_model", "whisper"}
"""Types that attend to what an encoder makes."""
NATIVE_ENCODERS = {row.model_type for row in architectures() if row.tested.endswith("encoders")}
TYPES = sorted(
    {one for one in CLASSES if refusal_of(one) is None}
    - {*WRAPPERS, *HALVES, *NATIVE_ENCODERS, *ENCODERS, *NO_CLASS, *CROSS}
)


CASES = [*EVERYDAY, *tiers.long(*(one for one in TYPES if one not in EVERYDAY))]


def ours(folder, max_len=1024):
    hf = read_hf_config(folder)
    kind, config = read_model_config(hf, impl="transformers", language_model_only=True)
    assert kind == "transformers"
    config = replace(config, max_len=min(max_len, config.max_len))
    model = build_model(kind, config, folder=folder, dtype=torch.float32, progress=False)
    return model, config


def count_calls(stepper):
    """A list that grows by the layer of every attention call."""
    calls, plan = [], stepper.backend.plan

    class Counted:
        def __init__(self, batch):
            self._step = plan(batch)

        def run(self, q, k, v, layer):
            calls.append(layer)
            return self._step.run(q, k, v, layer)

    stepper.backend.plan = Counted
    return calls


def packed(stepper, prompts, steps):
    """Our log-probabilities of every position of each prompt."""
    at, found = [0] * len(prompts), [[] for _ in prompts]
    for step in steps:
        pieces = [(row, prompts[row][at[row] : at[row] + count]) for row, count in step]
        counts = [len(ids) for _, ids in pieces]
        for (row, ids), part in zip(pieces, stepper.logits_of(pieces).split(counts)):
            at[row] += len(ids)
            found[row].append(part)
    return [torch.cat(parts).log_softmax(-1) for parts in found]


@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize(
    ("wrapper", "prefix"),
    [
        ("gemma3n", "model.language_model."),
        *tiers.long(("emu3", "model.text_model."), ("mllama", "language_model.model.")),
    ],
)
def test_the_text_half_of_a_wrapper(wrapper, prefix, tmp_path):
    half = WRAPPERS[wrapper]
    theirs = tiny_model(HALVES.get(half, half))
    theirs.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    del text["architectures"]
    outer = {"model_type": wrapper, "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    weights = tmp_path / "model.safetensors"
    tensors = {f"{prefix}{name[6:]}": value for name, value in load_file(weights).items()
               if name.startswith("model.")}  # fmt: skip
    if "lm_head.weight" in theirs.state_dict() and not theirs.config.tie_word_embeddings:
        head = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
        tensors[f"{head}lm_head.weight"] = theirs.lm_head.weight.detach().clone()
    save_file(tensors | {"model.vision_tower.weight": torch.zeros(3)}, weights)
    model, config = ours(tmp_path)
    got = Stepper(model, config, max_tokens=64).logits(PROMPTS[0]).log_softmax(-1)
    assert (got - logprobs(theirs, PROMPTS[0])).abs().max() < TOLERANCE


@pytest.mark.sampled(3)
@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize("model_type", CASES)
def test_packed_sequences_have_the_logprobs_of_transformers_alone(model_type, tmp_path):
    theirs = tiny_model(model_type)
    theirs.save_pretrained(tmp_path)
    model, config = ours(tmp_path)
    want = [logprobs(theirs, ids) for ids in PROMPTS]
    assert min(one.std() for one in want) > 0.05, "logits that are alike prove nothing"
    lengths = [len(ids) for ids in PROMPTS]
    one_by_one = [[(row, 1)] for row, n in enumerate(lengths) for _ in range(n)]
    for steps in ([list(enumerate(lengths))], STEPS, one_by_one):
        stepper = Stepper(model, config, sequences=len(lengths), max_tokens=64)
        calls = count_calls(stepper)
        for got, said in zip(packed(stepper, PROMPTS, steps), want):
            assert (got - said).abs().max() < TOLERANCE
        assert len(calls) == len(config.probe.calls) * len(steps)


NATIVE = [one for one in VARIANTS if refusal_of(tiny(one)[0]["model_type"]) is None]


@pytest.mark.parametrize("variant", tiers.long(*NATIVE))
def test_native_variants_are_the_same_through_their_class(variant, tmp_path):
    theirs = peer(variant, tmp_path)
    settings = tiny(variant)[1]
    model, config = ours(tmp_path, settings.get("max_len", 1024))
    for length in settings.get("lengths", (33, 600)):
        ids = prompt_of(length, config.vocab)
        want = logprobs(theirs, ids)
        stepper = Stepper(model, config)
        got = [stepper.logits(piece) for piece in (ids[: length // 2], ids[length // 2 :]) if piece]
        assert (torch.cat(got).log_softmax(-1) - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("model_type", ["gemma3n_text", "longcat_flash", *tiers.long(*TYPES)])
def test_an_engine_plans_with_what_the_probe_has_found(model_type, tmp_path):
    tiny_config(model_type).save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "load_format": "dummy", "model_impl": "transformers"}
    found = describe_model(Options.from_flat(given), env.read())
    assert found.facts.layers == found.config.attention_layers()
    assert found.facts.vocab == VOCAB
