"""Requests of several adapters and of the base whose steps take every path of a worker."""

import json
from contextlib import contextmanager

import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.core.params import LoRARequest

SETTINGS = {
    "dtype": "float32", "device": "cpu", "enable_lora": True, "max_loras": 2, "max_lora_rank": 16,
    "max_cpu_loras": 8, "num_gpu_blocks_override": 128, "max_num_seqs": 8, "max_model_len": 512,
    "enable_prefix_caching": False, "use_tqdm_on_load": False,
}  # fmt: skip
PATHS = {
    "plain": {},
    "one slot": {"max_loras": 1},
    "chunked prompts": {"max_num_batched_tokens": 64},
    "overlap": {"steps_in_flight": 2},
    "preempted": {"block_size": 4, "num_gpu_blocks_override": 22},
}
RANKS = [4, 16, 9, 1]


def shapes(model):
    """Name in a checkpoint -> (outputs, inputs) of each linear layer."""
    return {
        f"model.{path}": (out.rows, module.inputs)
        for name, module in model.named_modules()
        if name.startswith("layers.") and hasattr(module, "rank_rows")
        for path, out in zip(model.weights.checkpoint_paths(name), module.outputs)
    }


def write_adapter(folder, sizes, rank, seed, *, biases=False):
    """One as peft writes it, for the linear layers of `sizes`; returns its request."""
    torch.manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in sizes.items():
        at = f"base_model.model.{name}"
        tensors[f"{at}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
        tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, rank) * 0.3
        if biases:
            tensors[f"{at}.lora_B.bias"] = torch.randn(outputs)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "lora_bias": biases}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    return LoRARequest(folder.name, seed, str(folder))


def write_adapters(folder):
    """Four for the embedded model, then one with biases."""
    (sizes,) = LLM("embedded", **SETTINGS | {"enable_lora": False}).apply_model(shapes)
    made = [write_adapter(folder / f"r{i}", sizes, rank, i + 1) for i, rank in enumerate(RANKS)]
    few = dict(list(sizes.items())[:3])
    return [*made, write_adapter(folder / "biases", few, 8, 9, biases=True)]


def run(llm, adapters, logprobs=None):
    """Requests that come while others run. Returns tokens and logprobs of each answer."""
    a, b, c, d, biased = adapters
    base = None
    stages = [
        [([5, 9, 11], 14, a, 1), (range(10, 80), 9, base, 1)],
        [(range(30, 47), 12, b, 1)],
        [([7], 16, base, 1), (range(9, 40), 8, a, 3)],
        [(range(3, 25), 10, c, 1), ([8, 8], 9, d, 1)],
        [(range(60, 90), 6, c, 1), ([4], 5, base, 1), (range(12), 12, b, 1)],
        [(range(5, 9), 7, biased, 1), ([6], 9, a, 1), (range(50, 71), 7, biased, 1)],
    ]
    for stage in stages:
        for prompt, count, adapter, n in stage:
            params = SamplingParams(
                max_tokens=count, ignore_eos=True, logprobs=logprobs, n=n, seed=3,
                temperature=0.8 if n > 1 else 0,
            )  # fmt: skip
            llm.enqueue(
                {"prompt_token_ids": list(prompt)}, params, lora_request=adapter, use_tqdm=False
            )
        for _ in range(4):
            for output in llm.llm_engine.step():
                llm._queue._done[output.request_id] = output
    found = llm.wait_for_completion(use_tqdm=False)
    store = llm.llm_engine.built.adapters
    assert store is None or not store._holds
    return [(list(one.token_ids), one.logprobs) for output in found for one in output.outputs]


@contextmanager
def counted(owner, name):
    """The first arguments of each call of a method within."""
    found, real = [], getattr(owner, name)

    def call(self, *args, **named):
        found.append(args)
        return real(self, *args, **named)

    setattr(owner, name, call)
    try:
        yield found
    finally:
        setattr(owner, name, real)
