"""Images, videos and recordings of Qwen2.5-Omni's thinker: answers are those of transformers."""

import functools
import json

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.media.processor import DecodedAudio
from tests.cpu.encoder_decoder.speech import RATE, recording
from tests.cpu.models.peers import scale_weights
from tests.cpu.multimodal.families import image, tokenizer_of
from tests.cpu.multimodal.qwen_models import SIZES, TEXT, video_of

pytestmark = [
    pytest.mark.slow("imports transformers, and makes models of it"),
    pytest.mark.sampled(2),
]

TOKENS = {
    "<|vision_bos|>": 160, "<|vision_eos|>": 161, "<|IMAGE|>": 162, "<|VIDEO|>": 163,
    "<|AUDIO|>": 164, "<|audio_bos|>": 165, "<|audio_eos|>": 166,
}  # fmt: skip
VISION = {
    "depth": 4, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 44,
    "fullatt_block_indexes": [1, 3], "patch_size": 14, "window_size": 112,
}  # fmt: skip
AUDIO = {
    "num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "d_model": 32, "n_window": 20, "output_dim": 64, "max_source_positions": 1500,
}  # fmt: skip
MEDIA = {
    "a": lambda: image(56, 56),
    "b": lambda: image(40, 120),
    "v": lambda: video_of(4, 60, 90, step=12),
    "x": lambda: recording(1.0, 1),
    "y": lambda: recording(0.111, 2),
    "z": lambda: recording(3.37, 3),
}
KINDS = {"a": "image", "b": "image", "v": "video", "x": "audio", "y": "audio", "z": "audio"}
MARKS = {
    "image": "<|vision_bos|> <|IMAGE|> <|vision_eos|>",
    "video": "<|vision_bos|> <|VIDEO|> <|vision_eos|>",
    "audio": "<|audio_bos|> <|AUDIO|> <|audio_eos|>",
}
MIXES = ["", "x", "a", "zyx", "bx", "xab", "v", "vz"]
STEPS = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(transformers' thinker, its tokenizer, folder)"""
    folder = tmp_path_factory.mktemp("omni")
    return *write_model(folder), folder


def write_model(folder):
    """Write a random model. Returns transformers' model of it, and the tokenizer."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen2_5_omni_thinker", audio_config=AUDIO, vision_config=VISION,
        text_config=TEXT | {"model_type": "qwen2_5_omni_text"}, image_token_index=162,
        video_token_index=163, audio_token_index=164, audio_start_token_id=165,
        audio_end_token_id=166, vision_start_token_id=160, vision_end_token_id=161,
    )  # fmt: skip
    torch.manual_seed(4)
    kind = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    model = kind._from_config(config, attn_implementation="eager")
    scale_weights(model, 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval().save_pretrained(folder)
    tokenizer = tokenizer_of(TOKENS)
    tokenizer.save_pretrained(folder)
    files = {
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80,
            "image_processor_type": "Qwen2VLImageProcessor", "size": SIZES,
        },
        "video_preprocessor_config.json": {"do_sample_frames": False, "size": SIZES},
    }  # fmt: skip
    for name, one in files.items():
        (folder / name).write_text(json.dumps(one))
    return model, tokenizer


def text_of(mix):
    return " ".join(["w3", *(f"{MARKS[KINDS[one]]} w{7 + i}" for i, one in enumerate(mix)), "w40"])


@functools.cache
def extractors():
    import transformers

    return (
        transformers.Qwen2VLImageProcessor(size=SIZES),
        transformers.Qwen2VLVideoProcessor(do_sample_frames=False, size=SIZES),
        transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=10),
    )


def inputs_of(tokenizer, mix):
    """What transformers' processor makes of a prompt, of its parts."""
    images, videos, audios = extractors()
    given = {kind: [MEDIA[c]() for c in mix if KINDS[c] == kind] for kind in MARKS}
    made, counts = {}, {kind: [] for kind in MARKS}
    if given["image"]:
        made |= images(given["image"], return_tensors="pt")
        counts["image"] = (made["image_grid_thw"].prod(1) // 4).tolist()
    if given["video"]:
        frames = [torch.from_numpy(one.frames).permute(0, 3, 1, 2) for one in given["video"]]
        made |= videos(frames, return_tensors="pt")
        counts["video"] = (made["video_grid_thw"].prod(1) // 4).tolist()
        made["video_second_per_grid"] = torch.tensor(
            [2 * one.info.total_num_frames / len(one.frames) / one.info.fps
             for one in given["video"]]
        )  # fmt: skip
    if given["audio"]:
        found = audios(
            given["audio"], sampling_rate=RATE, padding="max_length", return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        made["input_features"] = found.input_features
        made["feature_attention_mask"] = found.attention_mask
        counts["audio"] = [((n - 1) // 2 + 1) // 2 for n in found.attention_mask.sum(1).tolist()]
    ids = []
    pads = {162: "image", 163: "video", 164: "audio"}
    for token in tokenizer.encode(text_of(mix), add_special_tokens=False):
        ids += [token] * (counts[pads[token]].pop(0) if token in pads else 1)
    ids = torch.tensor([ids])
    return {**made, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def prompt_of(mix):
    data = {}
    for one in mix:
        media = MEDIA[one]()
        if KINDS[one] == "audio":
            media = (media, RATE)
        elif KINDS[one] == "video":
            media = (media.frames, vars_of(media.info))
        data.setdefault(KINDS[one], []).append(media)
    return {"prompt": text_of(mix)} | ({"multi_modal_data": data} if data else {})


def vars_of(info):
    return {
        "fps": info.fps, "frames_indices": list(info.frames_indices),
        "total_num_frames": info.total_num_frames, "duration": info.duration,
    }  # fmt: skip


def expected(pair, mix):
    """transformers' tokens and their log probabilities."""
    model, tokenizer, _ = pair
    inputs = inputs_of(tokenizer, mix)
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return ids, [
        logits[0].log_softmax(-1)[one].item() for logits, one in zip(out.logits, ids, strict=True)
    ]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}])
def test_an_engine_answers_as_transformers(pair, settings):
    llm = LLM(
        str(pair[2]), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024, **settings
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=0)
    answers = llm.generate([prompt_of(mix) for mix in MIXES], params)
    wants = [expected(pair, mix) for mix in MIXES]
    assert len({tuple(ids) for ids, _ in wants}) > len(wants) // 2
    for mix, answer, (ids, logprobs) in zip(MIXES, answers, wants, strict=True):
        got = answer.outputs[0]
        assert list(got.token_ids) == ids, mix
        for token, entry, want in zip(ids, got.logprobs, logprobs, strict=True):
            assert abs(entry[token].logprob - want) < 1e-3, mix


def test_a_whole_checkpoint_is_read_as_its_thinker(pair, tmp_path):
    from safetensors.torch import load_file, save_file

    own = json.loads((pair[2] / "config.json").read_text())
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]}
    for path in pair[2].iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = whole | {"thinker_config": own, "talker_config": {"model_type": "qwen2_5_omni_talker"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(pair[2] / "model.safetensors")
    tensors = {f"thinker.{name}": one for name, one in tensors.items()}
    more = {"talker.model.norm.weight": torch.ones(4), "token2wav.code2wav_dit_model.x": torch.ones(4),
            "thinker.audio_tower.audio_bos_eos_token.weight": torch.ones(2, 64)}  # fmt: skip
    save_file({**more, **tensors}, tmp_path / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 1024}
    answers = [
        LLM(str(one), **settings).generate(prompt_of("xab"), params)[0].outputs[0].token_ids
        for one in (pair[2], tmp_path)
    ]
    assert answers[0] == answers[1]


def test_recordings_that_are_refused(pair):
    llm = LLM(str(pair[2]), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024)
    processor = llm.llm_engine.inputs.media.pipeline.processor
    for audio, words in (
        (np.zeros(320, np.float32), "longer than 0.02 s"),
        (np.zeros(301 * RATE, np.float32), "longer than 300 s"),
    ):
        with pytest.raises(RequestError, match=words):
            processor.process(DecodedAudio(audio, RATE), {})
