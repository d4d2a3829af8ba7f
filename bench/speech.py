"""Recordings through an engine: how much of their time a transcription takes.

    python bench/speech.py [--seconds 60] [--tokens 180] [--repeat 3] [--kw JSON]

The model has the shape of whisper-large-v3 and random weights, so the tokens mean nothing: each
window of 30 s has `tokens` of them, about what fast speech has. One JSON line a turn: seconds taken
from samples to tokens, and that as a part of the recording's time. `one` has the windows one after
another, as a window that is conditioned on the text before it needs; `all` has them at once.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire import LLM, SamplingParams

RATE, WINDOW = 16_000, 30
CONFIG = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "torch_dtype": "bfloat16",
    "is_encoder_decoder": True,
    "vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280,
    "encoder_layers": 32, "decoder_layers": 32,
    "encoder_attention_heads": 20, "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    "max_source_positions": 1500, "max_target_positions": 448,
    "decoder_start_token_id": 50258, "bos_token_id": 50257, "eos_token_id": 50257,
    "pad_token_id": 50256, "activation_function": "gelu", "scale_embedding": False,
}  # fmt: skip
FIRST_SPECIAL = 50257
NAMED = {50257: "<|endoftext|>", 50258: "<|startoftranscript|>", 50259: "<|en|>",
         50359: "<|translate|>", 50360: "<|transcribe|>", 50362: "<|startofprev|>",
         50363: "<|nospeech|>", 50364: "<|notimestamps|>"}  # fmt: skip
PROMPT = [50258, 50259, 50360, 50364]


def write_model(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    generation = {
        "eos_token_id": 50257, "decoder_start_token_id": 50258, "no_timestamps_token_id": 50364,
        "lang_to_id": {"<|en|>": 50259}, "is_multilingual": True,
        "task_to_id": {"transcribe": 50360, "translate": 50359},
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {c: i for i, c in enumerate(alphabet)}
    words |= {f"w{i}": i for i in range(len(words), FIRST_SPECIAL)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    last = CONFIG["vocab_size"] - 1501
    tokenizer.add_special_tokens([NAMED.get(i, f"<|x{i}|>") for i in range(FIRST_SPECIAL, last)])
    tokenizer.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(1501)])
    tokenizer.save(str(folder / "tokenizer.json"))
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": NAMED[50257]}
    (folder / "tokenizer_config.json").write_text(json.dumps(made))


def recording(seconds, seed):
    draw = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    noise = 0.05 * draw.standard_normal(len(t))
    return (0.3 * np.sin(2 * np.pi * 440 * t) + noise).astype(np.float32)


def prompts_of(samples):
    return [
        {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (part, RATE)}}
        for part in np.split(samples, range(WINDOW * RATE, len(samples), WINDOW * RATE))
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=180)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kw", default="{}", help="options of the engine")
    a = parser.parse_args()
    how = SamplingParams(temperature=0.0, max_tokens=a.tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="quire-asr-") as folder:
        write_model(Path(folder))
        llm = LLM(folder, **({"load_format": "dummy"} | json.loads(a.kw)))
        for turn in range(a.repeat):
            for case in ("one", "all"):
                given = prompts_of(recording(a.seconds, 10 * turn + (case == "one")))
                began = time.perf_counter()
                for some in [given] if case == "all" else [[one] for one in given]:
                    llm.generate(some, how, use_tqdm=False)
                taken = time.perf_counter() - began
                line = {"model": "whisper-large-v3", "case": case, "turn": turn,
                        "tokens": a.tokens * len(given), "s": round(taken, 3),
                        "of its time": round(taken / a.seconds, 4)}  # fmt: skip
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
