"""Models that run through transformers' classes give the outputs of these classes by themselves."""

import functools
import json
from collections import Counter

import pytest
import torch

from quire.distributed.collectives import SingleProcessCollectives
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError
from quire.models.build import build_model, read_model_config
from quire.models.fallback.attention import StepCalls
from quire.models.fallback.router_matrix import router_matrix
from tests import tiers
from tests.cpu import engine_of
from tests.cpu.engine_of import request, run
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import continued, logprobs, prompt_of

pytestmark = pytest.mark.sampled(3)

TOLERANCE = 1e-4
VOCAB = 97
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
HEADS = {key: value for key, value in SMALL.items() if key != "head_dim"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS = {
    "llama": SMALL,
    "llama_tied_longrope": {
        **SMALL,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + i / 4 for i in range(8)],
            "original_max_position_embeddings": 128,
        },
    },
    "qwen3_moe": {**SMALL, **EXPERTS, "num_experts": 4, "decoder_sparse_step": 1},
    "gemma2": {**SMALL, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "cohere": {**HEADS, "logit_scale": 0.3},
    "gpt_neox": HEADS,
    "gpt_oss": {
        **SMALL,
        "sliding_window": 7,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v2": {
        **SMALL,
        **LATENT,
        **EXPERTS,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "olmo2": SMALL,
    "stablelm": HEADS,
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 48,
        "do_layer_norm_before": True,
    },
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB, "n_positions": 512},
}

EVERYDAY = ("llama", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v2", "gpt2")
"""Those that an engine runs every day: plain, experts, windows, sinks, latent, learned positions."""


def peer(name, folder):
    """A random model of transformers' class, saved to the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = "llama" if name.startswith("llama_") else name
    config = AutoConfig.for_model(kind, **MODELS[name], pad_token_id=0)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn_like(param)
            param.copy_(param + 0.2 * noise if param.ndim == 1 else 0.15 * noise)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model


def ours(folder, **settings):
    hf = json.loads((folder / "config.json").read_text())
    model_type, config = read_model_config(hf, "transformers")
    assert model_type == "transformers"
    settings = {"folder": folder, "dtype": torch.float32, "progress": False, **settings}
    return build_model(model_type, config, **settings), config


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """name -> (transformers' model, ours, our config); the last one is kept."""

    @functools.lru_cache(maxsize=1)
    def pair(name):
        folder = tmp_path_factory.mktemp(name)
        return peer(name, folder), *ours(folder)

    return pair


@pytest.mark.parametrize("name", MODELS, scope="class")
class TestModel:
    def test_logprobs_equal_those_of_transformers(self, name, pairs):
        theirs, model, config = pairs(name)
        ids = prompt_of(200, VOCAB)
        if name == "llama_tied_longrope":
            ids = prompt_of(500, VOCAB)  # transformers has one set of frequencies for a batch
        want = logprobs(theirs, ids)
        for sizes in ([len(ids)], [7, 100, 1, len(ids) - 118, *[1] * 10]):
            stepper, at, got = Stepper(model, config), 0, []
            for size in sizes:
                got.append(stepper.logits(ids[at : at + size]))
                at += size
            worst = (torch.cat(got).log_softmax(-1) - want).abs().max().item()
            assert worst < TOLERANCE, f"in pieces of {sizes[:4]}: {worst}"

    def test_a_step_makes_the_calls_of_the_probe(self, name, pairs, monkeypatch):
        _, model, config = pairs(name)
        made = []
        run_call = StepCalls.run
        monkeypatch.setattr(StepCalls, "run", lambda *args: made.append(args[1]) or run_call(*args))
        Stepper(model, config).hidden([5, 6, 7])
        assert len(made) == len(config.probe.calls) == SMALL["num_hidden_layers"] or name in (
            "opt",
            "gpt2",
        )

    @pytest.mark.sampled(4)
    def test_an_engine_answers_as_transformers(self, name, pairs):
        theirs, model, config = pairs(name)
        if "longrope" in name:
            pytest.skip("short prompts have other frequencies in transformers")
        if not tiers.LONG and name not in EVERYDAY:
            pytest.skip("--long: more of the same")
        hf = {"model_type": name, "head_dim": "fallback", "vocab_size": VOCAB}
        engine_of._models[name, "fallback", None, torch.float32, "cpu"] = (model, config)
        prompts = [prompt_of(n, VOCAB) for n in (1, 40, 40, 70, 33)]
        prompts.append([*prompts[3][:64], 9, 8, 7])  # finds the blocks of another
        want = [continued(theirs, ids, 24) for ids in prompts]
        for settings in (
            {"budget": 48},
            {"num_blocks": 16 * len({call.window for call in config.probe.calls}), "seqs": 6},
            {
                "num_blocks": 16 * len({call.window for call in config.probe.calls}),
                "host_blocks": 64,
            },
        ):
            engine = engine_of.engine_of(hf, max_len=160, **settings)
            out, _ = run(
                engine, [request(str(i), ids, 24) for i, ids in enumerate(prompts)], stagger=3
            )
            assert [out[str(i), 0] for i in range(len(prompts))] == want, settings


def test_like_parts_become_kernels(pairs):
    _, model, _ = pairs("llama")
    kinds = Counter(type(module).__name__ for module in model.modules())
    layers = SMALL["num_hidden_layers"]
    assert kinds["MergedLinear"] == kinds["MergedMLP"] == kinds["AnyAxesLinear"] == layers
    assert kinds["AnyAxesRMSNorm"] == 2 * layers + 1
    assert not kinds["HeldParams"]
    assert not kinds["Linear"]
    assert sum("forward" in vars(module) for module in model.modules()) == layers  # rotary


@pytest.mark.parametrize("settings", [{"mesh": Mesh(tp=2)}, {"stage": range(2)}])
def test_ranks_and_stages_are_refused(settings):
    model_type, config = read_model_config({"model_type": "llama", **SMALL}, "transformers")
    settings |= {"load_format": "dummy", "dtype": torch.float32}
    with pytest.raises(ConfigError, match="models that run through transformers"):
        build_model(model_type, config, comm=SingleProcessCollectives(), **settings)


def test_forks_share_their_prompt(pairs):
    _, model, config = pairs("gemma2")
    hf = {"model_type": "gemma2", "head_dim": "fallback", "vocab_size": VOCAB}
    engine_of._models["gemma2", "fallback", None, torch.float32, "cpu"] = (model, config)
    ids = prompt_of(40, VOCAB)
    together, _ = run(engine_of.engine_of(hf, max_len=160), [request("a", ids, 12, n=2, seed=3)])
    apart = [
        run(
            engine_of.engine_of(hf, max_len=160, prefix=False, seqs=1),
            [request("a", ids, 12, n=2, seed=3)],
        )[0]["a", i]
        for i in range(2)
    ]
    assert [together["a", i] for i in range(2)] == apart
    assert apart[0] != apart[1]


def test_experts_are_chosen_the_same_in_any_company():
    matrix = router_matrix(torch.randn(64, 512))
    rows = torch.randn(37, 512)
    together = torch.nn.functional.linear(rows, matrix)
    alone = [torch.nn.functional.linear(row[None], matrix)[0] for row in rows]
    assert torch.equal(together, torch.stack(alone))
    assert type(together) is torch.Tensor
