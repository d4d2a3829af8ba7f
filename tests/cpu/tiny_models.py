"""Folders of tiny random models, complete as a hub has them: config, weights, tokenizer."""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM

TEXT = [
    "Hello, my name is Quire. The president of the United States is a person.",
    "The capital of France is Paris, and the future of AI is not yet written.",
    "The largest ocean is the Pacific. What is the weather like today?",
    "你好，请你介绍一下你自己。请问什么是机器学习？请问如何理解大模型？",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES = {
    "llama": SIZES | {"intermediate_size": 64, "num_key_value_heads": 2},
    "qwen2": SIZES | {"intermediate_size": 64, "num_key_value_heads": 2},
    "qwen3": SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen3_5_text": SIZES
    | {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "full_attention_interval": 2,
    },
}


def write_tokenizer(folder, template=TEMPLATE, *, bos=False):
    """A byte-level BPE trained on TEXT; returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(one, special=True) for one in special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    if bos:
        single = f"{special[0]} $A"
        pair = [(special[0], 0)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pair)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": special[0] if bos else None,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def write_ascii_tokenizer(folder, size):
    """A tokenizer of `size` tokens: three specials, one per character of ASCII text, and others."""
    text = [
        pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(i))[0][0]
        for i in range(32, 127)
    ]
    names = ["<|pad|>", "<|begin|>", "<|end|>", *text]
    names += [f"<|{i}|>" for i in range(len(names), size)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def write_model(
    folder, model_type="llama", *, generation=None, template=TEMPLATE, bos=False, **more
):
    """A model of this type with random float32 weights, spread so that greedy picks no ties."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder, template, bos=bos)
    shape = SHAPES[model_type] | {"vocab_size": vocab, "max_position_embeddings": 512}
    shape |= {"eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0} | more
    config = AutoConfig.for_model(model_type, **shape)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "embed" in name else 0.15)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation or {"eos_token_id": 2}))
    return folder


def write_hub(root, models, **more):
    """A hub cache that holds these models: name -> model type, or what writes the folder.

    Returns the cache folder.
    """
    for name, kind in models.items():
        repository = root / f"models--{name.replace('/', '--')}"
        commit = "0123456789abcdef0123456789abcdef01234567"
        folder = repository / "snapshots" / commit
        if callable(kind):
            folder.mkdir(parents=True)
            kind(folder)
        else:
            write_model(folder, kind, **more)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    return root
