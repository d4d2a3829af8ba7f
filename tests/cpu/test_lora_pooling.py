"""Adapters of pooling models through LLM: results are those of peft."""

import warnings

import pytest
import torch

from quire import LLM, LoRARequest, PoolingParams
from tests import tiers
from tests.cpu.encoders.tiny_encoders import VARIANTS, texts_of
from tests.cpu.lora_cases import bank_bytes
from tests.cpu.models.peers import prompt_of
from tests.cpu.pooling.folders import VOCAB, encoder_folder
from tests.cpu.pooling.test_converted import classifier
from tests.cpu.tiny_models import write_ascii_tokenizer

SETTINGS = {
    "dtype": "float32", "enable_lora": True, "max_loras": 3, "max_lora_rank": 33,
    "use_tqdm_on_load": False, "max_num_seqs": 8, "runner": "pooling",
}  # fmt: skip
EMBED = {"pooler_config": {"pooling_type": "CLS", "normalize": False}}
TARGETS = {
    "bert": ["query", "value", "dense", "word_embeddings"],
    "distilbert": ["q_lin", "out_lin", "lin1"],
    "roberta": ["key", "dense"],
    "modernbert": ["Wqkv", "Wi"],
    "albert": ["query", "ffn"],
    "deberta_v2": ["output.dense", "intermediate.dense"],
    "eurobert": ["q_proj", "down_proj"],
}


def adapted(model, folder, task, change=None, **lora):
    """peft's model with an adapter of random numbers, saved to the folder.

    change: called with the model before.
    """
    from peft import LoraConfig, get_peft_model

    lora = {"lora_alpha": 2 * lora["r"], "init_lora_weights": False, "task_type": task} | lora
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(model, LoraConfig(**lora)).eval()
        if change is not None:
            change(made)
        made.save_pretrained(folder)
    return made


@pytest.mark.slow("peft and sentence-transformers are imported")
@pytest.mark.parametrize("variant", ["bert", *tiers.long(*(set(TARGETS) - {"bert"}))])
def test_embeddings(tmp_path, variant):
    base = tmp_path / "base"
    encoder_folder(base, variant)
    texts, wanted, requests = texts_of([5, 17, 30], VOCAB), [], []
    for i, rank in enumerate((1, 8, 33)):
        torch.manual_seed(i)
        model = encoder_folder(base, variant)
        folder = tmp_path / f"r{rank}"
        torch.manual_seed(i)
        made = adapted(model, folder, "FEATURE_EXTRACTION", r=rank, target_modules=TARGETS[variant])
        with torch.inference_mode():
            wanted.append([made(torch.tensor([one])).last_hidden_state[0, 0] for one in texts])
        requests.append(LoRARequest(folder.name, i + 1, str(folder)))
    model = encoder_folder(base, variant)
    with torch.inference_mode():
        wanted.append([model(torch.tensor([one])).last_hidden_state[0, 0] for one in texts])
    requests.append(None)
    llm = LLM(str(base), **SETTINGS | EMBED)
    names = [0, 3, 1, 2, 3, 0, 2]
    given = [{"prompt_token_ids": texts[i % 3]} for i in range(len(names))]
    outputs = llm.embed(given, lora_request=[requests[i] for i in names], use_tqdm=False)
    for i, (output, name) in enumerate(zip(outputs, names)):
        found, want = torch.tensor(output.outputs.embedding), wanted[name][i % 3]
        torch.testing.assert_close(found, want, rtol=0, atol=2e-5)
        assert name == 3 or (found - wanted[3][i % 3]).abs().max() > 1e-2
    plan, model = llm.llm_engine.built.memory_plan, llm.llm_engine.engine.executor.runner.model
    assert plan.adapter_bytes == bank_bytes(model)
    assert VARIANTS[variant]


def change_heads(model):
    """Random numbers in what an adapter replaces."""
    for name, value in model.named_parameters():
        if "modules_to_save" in name:
            value.data += 0.5 * torch.randn_like(value)


def classifiers(root, variant):
    """(folder, model as a function of an adapter's name, texts) of a model with labels."""
    if variant in VARIANTS:
        head = "token_classify" if variant == "roberta" else "classify"
        make, vocab = lambda: encoder_folder(root / "base", variant, head), VOCAB
    else:
        kind, vocab = "Sequence", 199
        make = lambda: classifier(variant, root / "base", kind)  # noqa: E731
    texts = texts_of([5, 17, 30], VOCAB) if variant in VARIANTS else [
        prompt_of(n, vocab) for n in (5, 17, 30)
    ]  # fmt: skip
    return make, texts


TASKS = {"bert": "SEQ_CLS", "roberta": "TOKEN_CLS", "llama": "SEQ_CLS", "qwen3": "SEQ_CLS"}
LABEL_TARGETS = {"bert": ["query"], "roberta": ["key"], "llama": ["q_proj"], "qwen3": ["v_proj"]}


@pytest.mark.slow("peft and sentence-transformers are imported")
@pytest.mark.parametrize("variant", ["bert", "llama", *tiers.long("roberta", "qwen3")])
def test_labels(tmp_path, variant):
    make, texts = classifiers(tmp_path, variant)
    wanted, requests = {None: []}, {None: None}
    for i, name in enumerate(("one", "two", None)):
        torch.manual_seed(i)
        model = make()
        if name is not None:
            torch.manual_seed(10 + i)
            own = {"r": 4 + i, "target_modules": LABEL_TARGETS[variant]}
            model = adapted(model, tmp_path / name, TASKS[variant], change=change_heads, **own)
            requests[name] = LoRARequest(name, i + 1, str(tmp_path / name))
        with torch.inference_mode():
            wanted[name] = [model(torch.tensor([one])).logits[0] for one in texts]
    if variant not in VARIANTS:
        write_ascii_tokenizer(tmp_path / "base", 199)
    llm = LLM(str(tmp_path / "base"), **SETTINGS | {"convert": "classify"} if variant not in VARIANTS
              else SETTINGS)  # fmt: skip
    names = ["one", None, "two", None, "one", "two", "one"]
    given = [{"prompt_token_ids": texts[i % 3]} for i in range(len(names))]
    task = "token_classify" if TASKS[variant] == "TOKEN_CLS" else "classify"
    outputs = llm.encode(
        given, pooling_task=task, pooling_params=PoolingParams(use_activation=False),
        lora_request=[requests[name] for name in names], use_tqdm=False,
    )  # fmt: skip
    for i, (output, name) in enumerate(zip(outputs, names)):
        want = wanted[name][i % 3]
        torch.testing.assert_close(output.outputs.data, want, rtol=0, atol=1e-4)
        assert name is None or (want - wanted[None][i % 3]).abs().max() > 1e-2
    plan, model = llm.llm_engine.built.memory_plan, llm.llm_engine.engine.executor.runner.model
    assert plan.adapter_bytes == bank_bytes(model)
