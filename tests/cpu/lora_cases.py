"""Models of tests/cpu/models/tiny with adapters that peft made, and the answers of peft."""

import functools
import json
import warnings

import torch
from transformers import AutoModelForCausalLM

from quire import LLM, LoRARequest, SamplingParams
from tests import tiers
from tests.cpu import peft_alone
from tests.cpu.models.peers import TINY, peer, prompt_of
from tests.cpu.tiny_models import write_ascii_tokenizer

COUNT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
SETTINGS = {
    "dtype": "float32", "enable_lora": True, "max_loras": 6, "max_lora_rank": 33,
    "num_gpu_blocks_override": 256, "use_tqdm_on_load": False, "max_num_seqs": 8,
    "max_model_len": 176,
}  # fmt: skip
TIGHT = {"block_size": 2, "num_gpu_blocks_override": 92, "enable_prefix_caching": False}
"""So few blocks that sequences of models without windows are preempted."""
PATHS = (
    {},
    *tiers.long(
        {"max_num_batched_tokens": 9},
        {"max_loras": 1, "steps_in_flight": 2},
        TIGHT,
        TIGHT | {"enable_prefix_caching": True, "kv_offloading_size": 0.01},
        {"enforce_eager": True},
    ),
)
"""Settings of engines in which answers must be those of peft."""
LENGTHS = (3, 41, 18, 70, 25, 9, 12)


class LoraCase:
    """One model, and its adapters by name."""

    def __init__(self, root, variant):
        self.root, self.variant = root, variant
        self.base = root / "base"
        peer(variant, self.base)
        self.vocab = json.loads((TINY / f"{variant}.json").read_text())["vocab_size"]
        write_ascii_tokenizer(self.base, self.vocab)
        self.prompts = [prompt_of(n, self.vocab) for n in LENGTHS]
        self.requests = {None: None}
        self._known = {}

    def copy(self):
        """The same, without the models and answers that are known."""
        made = LoraCase.__new__(LoraCase)
        made.__dict__.update(self.__dict__ | {"_known": {}})
        return made

    def add(self, name, change=None, **lora):
        """Write an adapter of random numbers, so strong that greedy tokens change.

        change: called with the model of peft before it is saved.
        """
        torch.manual_seed(100 + len(self.requests))
        lora = {"r": 4, "lora_alpha": 8, "init_lora_weights": False} | lora
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = peft_alone.get_peft_model(self._model(), peft_alone.LoraConfig(**lora))
            for param, value in made.named_parameters():  # else magnitudes are those of the sum
                if "magnitude" in param:
                    value.data.mul_(torch.rand(value.shape) + 0.5)
            if change is not None:
                change(made)
            made.save_pretrained(self.root / name)
        return self.register(name)

    def register(self, name):
        """Return the request of the folder of this name."""
        at = LoRARequest(name, len(self.requests), str(self.root / name))
        self.requests[name] = at
        return at

    def _model(self):
        return AutoModelForCausalLM.from_pretrained(
            self.base, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @functools.cache  # noqa: B019 - lives as long as its test module
    def peft(self, name=None):
        model = self._model()
        if name is None:
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft_alone.PeftModel.from_pretrained(model, self.root / name).eval()

    @torch.inference_mode()
    def logprobs(self, prompt, name=None):
        """Of every next token: [T, V]."""
        logits = self.peft(name)(torch.tensor([prompt]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def greedy(self, prompt, name=None):
        """(tokens, the logprob of each)."""
        key = tuple(prompt), name
        if key not in self._known:
            ids, values = list(prompt), []
            for _ in range(COUNT):
                row = self.logprobs(ids, name)[-1]
                ids.append(int(row.argmax()))
                values.append(float(row.max()))
            self._known[key] = ids[len(prompt) :], values
        return self._known[key]

    def llm(self, **settings):
        return LLM(str(self.base), **SETTINGS | settings)

    def run(self, llm, prompts, names, params=GREEDY):
        """Answers to prompts, each with the adapter of a name; nothing is held after them."""
        given = [{"prompt_token_ids": one} for one in prompts]
        requests = [self.requests[name] for name in names]
        outputs = llm.generate(given, params, lora_request=requests, use_tqdm=False)
        engine = llm.llm_engine
        assert not engine.engine.stats().held_blocks
        engine.engine.check()
        engine.built.adapters.check()
        return outputs

    def check(self, outputs, names, atol=1e-5):
        """Tokens and their logprobs are those of peft."""
        for output, name in zip(outputs, names, strict=True):
            tokens, logprobs = self.greedy(output.prompt_token_ids, name)
            answer = output.outputs[0]
            assert list(answer.token_ids) == tokens, name
            found = [one[token].logprob for one, token in zip(answer.logprobs, tokens)]
            torch.testing.assert_close(found, logprobs, rtol=0, atol=atol)

    def check_batch(self, llm, names, atol=1e-5):
        """One batch with each adapter of these names, as far as there are prompts."""
        prompts = self.prompts[: len(names)]
        self.check(self.run(llm, prompts, names), names, atol)
        cache, stats = llm.llm_engine.config.cache, llm.llm_engine.engine.stats()
        is_tight = cache.num_blocks == TIGHT["num_gpu_blocks_override"] and len(cache.groups) == 1
        assert stats.preemptions or not is_tight or len(names) < 6


def bank_bytes(model):
    """Of all slots of a float32 model."""
    banks = model.adapter_banks
    return 4 * (banks.numel + (len(banks._rows.starts) - 1) * banks.scales)


def planned_and_real_bytes(llm):
    """Bytes of the slots of adapters by the memory plan, and as they are."""
    model = llm.llm_engine.engine.executor.runner.model
    return llm.llm_engine.built.memory_plan.adapter_bytes, bank_bytes(model)


def dequantize(model):
    """Name of a parameter in transformers -> what each quantized layer multiplies by."""
    found = {}
    for name, module in model.named_modules():
        if not name.startswith("layers."):
            continue
        (path, *_) = paths = [f"model.{one}" for one in model.weights.checkpoint_paths(name)]
        if hasattr(module, "split_fused") and hasattr(module, "experts"):
            if hasattr(module, "down_proj"):
                found |= {
                    f"{path}.{matrix}": getattr(module, matrix).dequantize().float().clone()
                    for matrix in module.matrices
                }
        elif hasattr(module, "rank_rows"):
            rows = [out.rows for out in module.outputs]
            parts = module.weight.dequantize().float().split(rows)
            for path, part in zip(paths, parts, strict=True):
                found[f"{path}.weight"] = part.clone()
    return found


def give_weights(model, weights):
    """Make peft's model multiply by these weights."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = {n.replace(".base_layer", ""): p for n, p in inner.named_parameters()}
    for name, weight in weights.items():
        names[name].data.copy_(weight)
