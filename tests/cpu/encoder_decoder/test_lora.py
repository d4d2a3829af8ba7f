"""Adapters of models with an encoder: both stacks, and cross attention, are those of peft."""

import warnings

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from tests import tiers
from tests.cpu.encoder_decoder.seq2seq import VARIANTS, generate, source_of, write_model

pytestmark = pytest.mark.slow("imports transformers and peft, and makes models")

COUNT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TARGETS = {
    "bart": ["q_proj", "v_proj", "fc1", "fc2"],
    "t5": ["q", "k", "v", "wo"],
    "flan": ["q", "wi_1", "lm_head"],
}
SETTINGS = {
    "dtype": "float32", "num_gpu_blocks_override": 200, "enable_lora": True, "max_loras": 2,
    "use_tqdm_on_load": False,
}  # fmt: skip


def adapters(folder, variant):
    """peft's model by the name of its adapter; None: without."""
    from peft import LoraConfig, PeftModel, get_peft_model

    made = {}
    for rank in (None, 2, 8):
        model = write_model(folder / "base", VARIANTS[variant])
        if rank is not None:
            torch.manual_seed(rank)
            config = LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules=TARGETS[variant],
                init_lora_weights=False,
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                get_peft_model(model, config).save_pretrained(folder / f"r{rank}")
                base = write_model(folder / "base", VARIANTS[variant])
                model = PeftModel.from_pretrained(base, folder / f"r{rank}").eval().get_base_model()
        made[rank] = model
    return made


@pytest.mark.parametrize("variant", ["bart", *tiers.long("t5", "flan")])
def test_answers_are_those_of_peft(tmp_path, variant):
    models = adapters(tmp_path, variant)
    requests = {None: None} | {r: LoRARequest(f"r{r}", r, str(tmp_path / f"r{r}")) for r in (2, 8)}
    llm = LLM(str(tmp_path / "base"), **SETTINGS)
    sources = [source_of(length) for length in (40, 5, 17, 40)]
    ranks = [2, None, 8, None]
    wanted = [
        generate(models[r], one, COUNT, min_new_tokens=COUNT)[0] for one, r in zip(sources, ranks)
    ]
    assert wanted[0][:-1] != wanted[3][:-1]  # of one source
    for _ in range(2):  # the second time the encoder's output is cached
        outputs = llm.generate(
            [{"encoder_prompt": one} for one in sources],
            GREEDY,
            lora_request=[requests[r] for r in ranks],
            use_tqdm=False,
        )
        for output, want in zip(outputs, wanted):
            assert list(output.outputs[0].token_ids)[:-1] == want[:-1]  # BART's last is forced
