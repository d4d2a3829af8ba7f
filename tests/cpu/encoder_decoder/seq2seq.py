"""Folders of tiny encoder-decoder models of transformers, and transformers' own answers."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB = 120
PAD, EOS, START, BOS = 0, 1, 2, 3
WORDS = [f"w{i}" for i in range(VOCAB)]

T5 = {
    "model_type": "t5",
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "relu",
    "n_positions": 128,
    "decoder_start_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
FLAN = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART = {
    "model_type": "bart",
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "activation_function": "gelu",
    "scale_embedding": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "decoder_start_token_id": EOS,
    "forced_bos_token_id": BOS,
    "forced_eos_token_id": EOS,
}
MARIAN = BART | {
    "model_type": "marian",
    "scale_embedding": True,
    "activation_function": "swish",
    "decoder_vocab_size": VOCAB,
    "decoder_start_token_id": PAD,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "bos_token_id": None,
    "bad_words_ids": [[PAD]],
}
MT5 = FLAN | {"model_type": "mt5"}
VARIANTS = {"t5": T5, "mt5": MT5, "flan": FLAN, "bart": BART, "marian": MARIAN}


def write_tokenizer(folder):
    """One word per token; EOS behind each text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {WORDS[EOS]}", special_tokens=[(WORDS[EOS], EOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": WORDS[EOS]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder, hf, seed=5, **generation):
    """Write a random model of this config, and return transformers' model of it."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

    settings = {key: value for key, value in hf.items() if key != "model_type"}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(hf["model_type"], **settings)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn_like(value)
            if "embed_positions" in name:
                value.copy_(value if hf["model_type"] == "marian" else noise)
            elif value.ndim == 1:
                value += 0.2 * noise
            elif "shared" in name or "lm_head" in name:
                value.copy_(noise * (1.0 if hf["model_type"] == "marian" else 0.3))
            elif "bias" in name:
                value.copy_(noise * (0.2 if "logits" in name else 1.0))
            else:  # parts outweigh the embedding: else a tied head repeats its input
                sizes = {"o": 2, "out_proj": 2, "wo": 3, "fc2": 1, "q": 1.3, "k": 1.3}
                value.copy_(noise * sizes.get(name.split(".")[-2], 2) / value.shape[-1] ** 0.5)
    keys = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
    keys += ("pad_token_id", "eos_token_id", "bad_words_ids")
    found = {key: hf[key] for key in keys if hf.get(key) is not None} | generation
    model.generation_config = GenerationConfig(**found)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@torch.inference_mode()
def generate(model, source, count, decoder=None, **how):
    """transformers' answer: new tokens."""
    ids = torch.tensor([source])
    start = None if decoder is None else torch.tensor([decoder])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), decoder_input_ids=start, max_new_tokens=count,
        do_sample=False, **how,
    )  # fmt: skip
    return out[:, (1 if decoder is None else len(decoder)) :].tolist()


@torch.inference_mode()
def logprobs(model, source, decoder):
    """Log-probabilities [n, V] of every position of the decoder's tokens."""
    out = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([decoder]))
    return out.logits[0].log_softmax(-1)


def source_of(length, seed=0):
    """Random token ids, without special ones."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(4, VOCAB, (length,), generator=generator).tolist()
