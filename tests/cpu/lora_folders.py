"""Tiny models with LoRA adapters that peft made, and what peft computes with them."""

import functools
import warnings

import torch
from transformers import AutoModelForCausalLM

from tests.cpu import peft_alone
from tests.cpu.tiny_models import write_model

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base, folder, seed=0, targets=ALL_LINEAR, r=4, **settings):
    """An adapter with B that is not zero, so strong that greedy tokens change."""
    torch.manual_seed(100 + seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"lora_alpha": 2 * r, "init_lora_weights": False} | settings
    config = peft_alone.LoraConfig(r=r, target_modules=targets, task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft_alone.get_peft_model(model, config)
        for name, param in adapted.named_parameters():  # else magnitudes are those of the sum
            if "magnitude" in name:
                param.data.mul_(torch.rand(param.shape) + 0.5)
            elif name.endswith("lora_B.default.bias"):
                param.data.normal_(0, 0.1)
        adapted.save_pretrained(folder)
    return folder


class Peft:
    """Greedy generation by transformers, with an adapter of a folder or without."""

    def __init__(self, base):
        self._base = base

    @functools.cache  # noqa: B019 - lives as long as its test module
    def model(self, adapter=None):
        model = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32).eval()
        if adapter is None:
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft_alone.PeftModel.from_pretrained(model, adapter).eval()

    @torch.inference_mode()
    def logprobs(self, prompt, adapter=None):
        """Of every next token: [T, V]."""
        return self.model(adapter)(torch.tensor([prompt])).logits[0].log_softmax(-1)

    def greedy(self, prompt, count, adapter=None):
        """(tokens, the logprob of each)."""
        ids, values = list(prompt), []
        for _ in range(count):
            row = self.logprobs(ids, adapter)[-1]
            ids.append(int(row.argmax()))
            values.append(float(row.max()))
        return ids[len(prompt) :], values


def base_model(folder, model_type="llama"):
    return write_model(folder / model_type, model_type)
