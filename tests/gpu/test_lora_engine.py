"""Adapters through the engine on a GPU: the tokens of the CPU, beside graphs of base rows."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.core.params import LoRARequest

SETTINGS = {
    "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 16,
    "num_gpu_blocks_override": 512, "max_num_seqs": 8, "use_tqdm_on_load": False,
    "max_model_len": 512, "enable_prefix_caching": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = [[7 + (i * k) % 90 for k in range(n)] for i, n in enumerate((3, 41, 18, 70, 25, 9))]


def write_adapter(folder, model, rank, seed):
    """One as peft writes it, for every linear layer of the embedded model's decoder."""
    torch.manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in model.items():
        at = f"base_model.model.{name}"
        tensors[f"{at}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
        tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, rank) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed, str(folder))


def shapes(model):
    """Name in a checkpoint -> (outputs, inputs) of each linear layer."""
    return {
        f"model.{path}": (out.rows, module.inputs)
        for name, module in model.named_modules()
        if name.startswith("layers.") and hasattr(module, "rank_rows")
        for path, out in zip(model.weights.checkpoint_paths(name), module.outputs)
    }


@pytest.mark.slow("engines on both devices, and kernels that are compiled")
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_are_those_of_the_cpu(tmp_path, eager):
    cpu = LLM("embedded", device="cpu", **SETTINGS)
    gpu = LLM("embedded", device="cuda", enforce_eager=eager, **SETTINGS)
    (sizes,) = cpu.apply_model(shapes)
    a, b, c = (write_adapter(tmp_path / f"r{r}", sizes, r, r) for r in (4, 9, 16))
    given = [{"prompt_token_ids": one} for one in PROMPTS]
    base = None
    for requests in (None, [a, None, b, a, c, None], None, [c, c, b, b, None, a]):
        found = [
            [one.outputs[0] for one in llm.generate(given, GREEDY, lora_request=requests)]
            for llm in (cpu, gpu)
        ]
        for want, got in zip(*found):
            assert list(got.token_ids) == list(want.token_ids)
            assert abs(got.cumulative_logprob - want.cumulative_logprob) < 2e-2
        if requests is None:
            logprobs = [one.logprobs for one in found[1]]
            assert base in (None, logprobs), "steps without adapters are as before"
            base = logprobs
