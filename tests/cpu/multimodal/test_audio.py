"""Recordings of Qwen2-Audio: features, tokens, rows and answers are those of transformers."""

import json

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedAudio, ProcessorFiles, processor_type
from tests.cpu.encoder_decoder.speech import RATE, recording
from tests.cpu.models.peers import scale_weights
from tests.cpu.multimodal.families import TEXT, Pair, tokenizer_of

pytestmark = [
    pytest.mark.slow("imports transformers, and makes models of it"),
    pytest.mark.sampled(2),
]

TOKENS = {"<|AUDIO|>": 150, "<|audio_bos|>": 151, "<|audio_eos|>": 152}
AUDIO = {
    "num_mel_bins": 80,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 1500,
}
AUDIOS = [recording(seconds, i) for i, seconds in enumerate((1.0, 0.111, 3.33, 30, 0.05))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from transformers import (
        AutoConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    folder = tmp_path_factory.mktemp("qwen2_audio")
    config = AutoConfig.for_model(
        "qwen2_audio", audio_config=AUDIO, text_config=TEXT | {"model_type": "qwen2"},
        audio_token_index=150,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="eager")
    scale_weights(model, 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval().save_pretrained(folder)
    tokenizer = tokenizer_of(TOKENS)
    processor = Qwen2AudioProcessor(
        WhisperFeatureExtractor(feature_size=80), tokenizer, audio_token="<|AUDIO|>"
    )
    tokenizer.save_pretrained(folder)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    found = Pair(model, processor, folder)
    files = ProcessorFiles(found.hf, {"audio": extractor}, {}, None, tokenizer.get_vocab().get)
    found.own_processor = processor_type("qwen2_audio")(files)
    return found


def text_of(which):
    part = "w3 <|audio_bos|> <|AUDIO|> <|audio_eos|> w7"
    return " ".join(["<s>", *[part] * len(which), "w40 w41"])


def inputs_of(pair, which):
    audios = [AUDIOS[i] for i in which] or None
    return pair.processor(
        text=[text_of(which)], audio=audios, sampling_rate=RATE, return_tensors="pt"
    )


@pytest.mark.parametrize("which", [(), (0,), (1, 2), (3, 0, 4)])
def test_logprobs_of_prompts_with_recordings_equal_transformers(pair, which):
    inputs = inputs_of(pair, which)
    items = [pair.own_processor.process(DecodedAudio(AUDIOS[i], RATE), {}) for i in which]
    ids = pair.processor.tokenizer.encode(text_of(which), add_special_tokens=False)
    ids, runs = pair.expanded(ids, items)
    assert ids == inputs["input_ids"][0].tolist()
    rows = pair.rows(items) if items else []
    assert all(len(own) <= pair.ours[0].media_encoder.max_rows("audio") for own in rows)
    with torch.inference_mode():
        wanted = pair.theirs(**inputs).logits[0].log_softmax(-1)
    got = pair.logits(ids, runs, rows).log_softmax(-1)
    assert (got - wanted).abs().max().item() < 1e-4


def test_an_engine_answers_as_transformers(pair):
    llm = LLM(
        str(pair.folder), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024,
        limit_mm_per_prompt={"audio": 3}, max_num_batched_tokens=64,
    )  # fmt: skip
    prompts, wants = [], []
    for which in ((0,), (), (3, 0, 4), (2, 1)):
        data = {"audio": [(AUDIOS[i], RATE) for i in which]}
        prompts.append({"prompt": text_of(which)} | ({"multi_modal_data": data} if which else {}))
        inputs = inputs_of(pair, which)
        with torch.no_grad():
            out = pair.theirs.generate(**inputs, max_new_tokens=8, do_sample=False)
        wants.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = llm.generate(prompts, params)
    assert len({tuple(want) for want in wants}) == len(wants)
    for prompt, answer, want in zip(prompts, answers, wants):
        assert list(answer.outputs[0].token_ids) == want, prompt


def test_recordings_that_are_refused(pair):
    for audio, words in (
        (np.zeros(320, np.float32), "longer than 0.02 s"),
        (np.zeros(31 * RATE, np.float32), "reads 30 s at once"),
    ):
        with pytest.raises(RequestError, match=words):
            pair.own_processor.process(DecodedAudio(audio, RATE), {})


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory):
    return write_voxtral(tmp_path_factory.mktemp("voxtral"))


def write_voxtral(folder):
    from transformers import AutoConfig, VoxtralForConditionalGeneration

    audio = {
        "num_mel_bins": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32,
        "intermediate_size": 128, "max_source_positions": 1500,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "voxtral", audio_config=audio, text_config=TEXT | {"model_type": "llama", "head_dim": 16},
        audio_token_id=150,
    )  # fmt: skip
    torch.manual_seed(2)
    model = VoxtralForConditionalGeneration._from_config(config, attn_implementation="eager")
    scale_weights(model, 2.0)
    model.eval().save_pretrained(folder)
    tokenizer_of({"[AUDIO]": 150, "[BEGIN_AUDIO]": 151}).save_pretrained(folder)
    found = Pair(model, None, folder)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    found.own_processor = processor_type("voxtral")(ProcessorFiles(found.hf, {"audio": extractor}))
    return found


@pytest.mark.parametrize("seconds", [(2.0,), (31.0, 0.5)])
def test_recordings_of_any_length_in_voxtral(voxtral, seconds):
    from transformers import WhisperFeatureExtractor

    audios = [recording(one, 7) for one in seconds]
    items = [voxtral.own_processor.process(DecodedAudio(one, RATE), {}) for one in audios]
    extract, features = WhisperFeatureExtractor(feature_size=80), []
    for audio, item in zip(audios, items):
        made = extract(
            audio, sampling_rate=RATE, padding=True, truncation=False, pad_to_multiple_of=480_000,
            return_tensors="pt",
        ).input_features.reshape(80, -1, 3000).transpose(0, 1)  # fmt: skip
        features.append(made)
        assert np.abs(from_tensor(item.tensors[0]) - made.numpy()).max() < 1e-3
    ids = [1, 5, *[one for _ in audios for one in (151, 150, 7)], 40, 41]
    ids, runs = voxtral.expanded(ids, items)
    assert ids.count(150) == 375 * sum(len(one) for one in features)
    rows = voxtral.rows(items)
    with torch.inference_mode():
        out = voxtral.theirs(input_ids=torch.tensor([ids]), input_features=torch.cat(features))
    got = voxtral.logits(ids, runs, rows).log_softmax(-1)
    assert (got - out.logits[0].log_softmax(-1)).abs().max().item() < 1e-4
