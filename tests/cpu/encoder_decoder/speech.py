"""Folder of a tiny Whisper, its tokenizer with the special tokens, and transformers' answers."""

import json

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LANGUAGES = ("en", "de", "fr", "zh")
SPECIALS = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{one}|>" for one in LANGUAGES),
    "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>",
)  # fmt: skip
WORDS = 256
IDS = {text: WORDS + i for i, text in enumerate(SPECIALS)}
FIRST_TIME = WORDS + len(SPECIALS)
VOCAB = FIRST_TIME + 1501
EOT, SOT = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"]
NO_TIMES, PREVIOUS = IDS["<|notimestamps|>"], IDS["<|startofprev|>"]
PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
RATE, BINS = 16_000, 80

WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": BINS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_source_positions": 1500,
    "max_target_positions": 64,
    "decoder_start_token_id": SOT,
    "bos_token_id": EOT,
    "eos_token_id": EOT,
    "pad_token_id": EOT,
}
GENERATION = {
    "decoder_start_token_id": SOT,
    "bos_token_id": EOT,
    "eos_token_id": EOT,
    "pad_token_id": EOT,
    "lang_to_id": {f"<|{one}|>": IDS[f"<|{one}|>"] for one in LANGUAGES},
    "task_to_id": {name: IDS[f"<|{name}|>"] for name in ("transcribe", "translate")},
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": PREVIOUS,
    "is_multilingual": True,
    "max_initial_timestamp_index": 50,
    "return_timestamps": False,
    "suppress_tokens": [5, 9, SOT, PREVIOUS],
    "begin_suppress_tokens": [32, EOT],
}


def write_tokenizer(folder):
    """One token per byte; special tokens and time stamps behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIALS])
    tokenizer.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(1501)])
    assert tokenizer.token_to_id("<|30.00|>") == VOCAB - 1
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder, seed=5, **settings):
    """Write a random model, and return transformers' model of it."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(**WHISPER | settings)
    model = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn_like(value)
            if value.ndim == 1:
                value += 0.2 * noise
            elif "embed" in name:
                value.copy_(noise * (0.3 if "tokens" in name else 1.0))
            elif "conv" in name:
                value.copy_(noise * 2 / (value.shape[1] * value.shape[2]) ** 0.5)
            else:
                value.copy_(noise * 2 / value.shape[-1] ** 0.5)
    model.generation_config = GenerationConfig(**GENERATION)
    model.eval().save_pretrained(folder)
    write_tokenizer(folder)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BINS}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return model


def recording(seconds, seed=0):
    """Tones and noise that change each tenth of a second."""
    draw = np.random.default_rng(seed * 1000 + int(seconds * 10))
    t = np.arange(int(seconds * RATE)) / RATE
    pitch = draw.uniform(80, 4000, int(seconds * 10) + 1)[(t * 10).astype(int)]
    noise = draw.standard_normal(len(t)) * 0.01
    return (0.3 * np.sin(2 * np.pi * pitch * t) + noise).astype(np.float32)


def features_of(*audios):
    """transformers' features [n, bins, 3000]."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=BINS)
    return extractor(list(audios), sampling_rate=RATE, return_tensors="pt").input_features


@torch.inference_mode()
def logprobs(model, audio, decoder):
    """Log-probabilities [n, V] of every position of the decoder's tokens."""
    out = model(input_features=features_of(audio), decoder_input_ids=torch.tensor([decoder]))
    return out.logits[0].log_softmax(-1)
