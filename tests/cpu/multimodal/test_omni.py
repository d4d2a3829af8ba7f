"""Images, videos and recordings of thinkers of Qwen-Omni: answers are those of transformers."""

import functools
import importlib
import json
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.architectures import CLASSES
from quire.config.facts import read_hf_config
from quire.errors import RequestError
from quire.kernels.framework import lazy_fusion
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedAudio, DecodedImage
from quire.models.base import EncoderInput
from quire.models.build import build_model, read_model_config
from tests.cpu.encoder_decoder.speech import RATE, recording
from tests.cpu.models.peers import scale_weights
from tests.cpu.multimodal.beside_streams import check_slices
from tests.cpu.multimodal.families import image, tokenizer_of
from tests.cpu.multimodal.qwen_models import DEEPSTACK, EXPERTS, SIZES, TEXT, VISION, video_of
from tests.media.files import numbered_frames, video

pytestmark = [
    pytest.mark.slow("imports transformers, and makes models of it"),
    pytest.mark.sampled(2),
]

AUDIO = {
    "num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "d_model": 32, "output_dim": 64, "max_source_positions": 1500,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What a family's tiny model is made of. tokens: those of images, videos and recordings."""

    kind: str
    tokens: tuple[str, str, str]
    marks: tuple[str, str]
    text: dict
    vision: dict
    audio: dict
    processor: dict

    @property
    def ids(self):
        """Special tokens of the tokenizer."""
        start, end = self.marks
        around = (f"vision_{start}", f"vision_{end}", f"audio_{start}", f"audio_{end}")
        names = [*(f"<|{one}|>" for one in around), *self.tokens]
        return {name: 160 + i for i, name in enumerate(names)}

    def mark(self, kind):
        """What stands for an item in a prompt."""
        (start, end), part = self.marks, "audio" if kind == "audio" else "vision"
        token = self.tokens[("image", "video", "audio").index(kind)]
        return f"<|{part}_{start}|> {token} <|{part}_{end}|>"


FAMILIES = {
    "qwen2_5_omni": Family(
        "Qwen2_5Omni", ("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"), ("bos", "eos"),
        {"model_type": "qwen2_5_omni_text"},
        VISION | {"intermediate_size": 44, "fullatt_block_indexes": [1, 3], "patch_size": 14,
                  "window_size": 112},
        AUDIO | {"n_window": 20}, {},
    ),
    "qwen3_omni_moe": Family(
        "Qwen3OmniMoe", ("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"), ("start", "end"),
        EXPERTS | {"model_type": "qwen3_omni_moe_text"},
        VISION | DEEPSTACK | {"intermediate_size": 44},
        AUDIO | {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6},
        {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ),
}  # fmt: skip
MEDIA = {
    "a": lambda: image(56, 56),
    "b": lambda: image(40, 120),
    "v": lambda: video_of(4, 60, 90, step=12),
    "x": lambda: recording(1.0, 1),
    "y": lambda: recording(0.111, 2),
    "z": lambda: recording(3.37, 3),
}
SOUNDS = {
    "s": lambda: (video_of(6, 60, 90), recording(3.37, 4)),
    "t": lambda: (video_of(9, 60, 90), recording(2.0, 5)),
    "u": lambda: (video_of(2, 40, 120), recording(2.9, 6)),
}
"""Videos with sounds: that end with either, in one chunk or in several."""
SOUND_MIXES = ["s", "ts", "aub", "sbt"]
KINDS = {"a": "image", "b": "image", "v": "video", "x": "audio", "y": "audio", "z": "audio"}
MIXES = ["", "x", "a", "zyx", "bx", "xab", "v", "vz"]
STEPS = 6
HUB_PARTS = {"model", "lm_head", "visual", "audio_tower"}
MORE_TENSORS = {
    "qwen2_5_omni": {
        "token2wav.code2wav_dit_model.x": torch.ones(4),
        "thinker.audio_tower.audio_bos_eos_token.weight": torch.ones(2, 64),
    },
    "qwen3_omni_moe": {"code2wav.code_embedding.weight": torch.ones(4)},
}
"""What whole checkpoints have beside the thinker."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(transformers' thinker, its tokenizer, folder, family)"""
    folder = tmp_path_factory.mktemp(request.param)
    return *write_model(folder, request.param), folder, FAMILIES[request.param]


def write_model(folder, name="qwen2_5_omni"):
    """Write a random model. Returns transformers' model of it, and the tokenizer."""
    import transformers

    family = FAMILIES[name]
    ids = {
        "vision_start_token_id": 160, "vision_end_token_id": 161, "audio_start_token_id": 162,
        "audio_end_token_id": 163, "audio_token_id": 166,
    }  # fmt: skip
    last = "index" if name == "qwen2_5_omni" else "id"
    config = transformers.AutoConfig.for_model(
        f"{name}_thinker", audio_config=family.audio, vision_config=family.vision,
        text_config=TEXT | family.text, **ids,
        **{f"image_token_{last}": 164, f"video_token_{last}": 165},
    )  # fmt: skip
    torch.manual_seed(4)
    kind = getattr(transformers, f"{family.kind}ThinkerForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="eager")
    scale_weights(model, 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval().save_pretrained(folder)
    tokenizer = tokenizer_of(family.ids)
    tokenizer.save_pretrained(folder)
    files = {
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80,
            "image_processor_type": "Qwen2VLImageProcessor", "size": SIZES, **family.processor,
        },
        "video_preprocessor_config.json": {
            "do_sample_frames": False, "size": SIZES, **family.processor
        },
    }  # fmt: skip
    for name, one in files.items():
        (folder / name).write_text(json.dumps(one))
    return model, tokenizer


def text_of(family, mix):
    items = (f"{family.mark(KINDS[one])} w{7 + i}" for i, one in enumerate(mix))
    return " ".join(["w3", *items, "w40"])


def audio_tokens(family, frames):
    """How many a recording has."""
    from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe as theirs

    if family.kind == "Qwen2_5Omni":
        return ((frames - 1) // 2 + 1) // 2
    return theirs._get_feat_extract_output_lengths(frames)


@functools.cache
def extractors(kind):
    import transformers

    settings = next(one.processor for one in FAMILIES.values() if one.kind == kind)
    return (
        transformers.Qwen2VLImageProcessor(size=SIZES, **settings),
        transformers.Qwen2VLVideoProcessor(do_sample_frames=False, size=SIZES, **settings),
        transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=10),
    )


def inputs_of(family, tokenizer, mix):
    """What transformers' processor makes of a prompt, of its parts."""
    images, videos, audios = extractors(family.kind)
    names = ("image", "video", "audio")
    given = {kind: [MEDIA[c]() for c in mix if KINDS[c] == kind] for kind in names}
    made, counts = {}, {kind: [] for kind in names}
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
        counts["audio"] = [audio_tokens(family, n) for n in found.attention_mask.sum(1).tolist()]
    ids, pads = [], {164: "image", 165: "video", 166: "audio"}
    for token in tokenizer.encode(text_of(family, mix), add_special_tokens=False):
        ids += [token] * (counts[pads[token]].pop(0) if token in pads else 1)
    ids = torch.tensor([ids])
    return {**made, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def one_by_one(model):
    """Encode each recording by itself, as the engine does: their tower fills up short ones."""
    tower = getattr(model, "model", model).audio_tower
    whole = tower.forward

    def forward(input_features, feature_lens, **more):
        found = [
            whole(one, feature_lens=count[None], **more)
            for one, count in zip(
                input_features.split(feature_lens.tolist(), 1), feature_lens, strict=True
            )
        ]
        rows = torch.cat([one.last_hidden_state for one in found])
        return type(found[0])(last_hidden_state=rows, pooler_output=rows)

    with mock.patch.object(tower, "forward", forward):
        yield


def prompt_of(family, mix):
    data = {}
    for one in mix:
        media = MEDIA[one]()
        if KINDS[one] == "audio":
            media = (media, RATE)
        elif KINDS[one] == "video":
            media = (media.frames, vars_of(media.info))
        data.setdefault(KINDS[one], []).append(media)
    return {"prompt": text_of(family, mix)} | ({"multi_modal_data": data} if data else {})


def sounding_prompt(family, mix):
    """A prompt of images, and of videos whose sounds are read with them."""
    data = {kind: [] for kind in ("image", "video", "audio")}
    for one in mix:
        if one in MEDIA:
            data["image"].append(MEDIA[one]())
        else:
            video, sound = SOUNDS[one]()
            data["video"].append((video.frames, vars_of(video.info)))
            data["audio"].append((sound, RATE))
    return {
        "prompt": sounding_text(family, mix),
        "multi_modal_data": {kind: some for kind, some in data.items() if some},
        "mm_processor_kwargs": {"use_audio_in_video": True},
    }


def sounding_text(family, mix):
    items = (family.mark("image" if one in MEDIA else "video") + f" w{7 + i}"
             for i, one in enumerate(mix))  # fmt: skip
    return " ".join(["w3", *items, "w40"])


def sounding_inputs(pair, mix):
    """What transformers makes of it: its processor's own function orders the tokens."""
    model, tokenizer, _, family = pair
    images, videos, audios = extractors(family.kind)
    seen = [MEDIA[one]() for one in mix if one in MEDIA]
    made = dict(images(seen, return_tensors="pt")) if seen else {}
    heard = [SOUNDS[one]() for one in mix if one in SOUNDS]
    frames = [torch.from_numpy(one.frames).permute(0, 3, 1, 2) for one, _ in heard]
    grids = []
    for one in frames:
        found = videos([one], return_tensors="pt")
        grids.append(found["video_grid_thw"])
        made.setdefault("pixel_values_videos", []).append(found["pixel_values_videos"])
    made["pixel_values_videos"] = torch.cat(made["pixel_values_videos"])
    made["video_grid_thw"] = torch.cat(grids)
    seconds = [2 * one.info.total_num_frames / len(one.frames) / one.info.fps for one, _ in heard]
    made["video_second_per_grid"] = torch.tensor(seconds)
    found = audios(
        [one for _, one in heard], sampling_rate=RATE, padding="max_length",
        return_attention_mask=True, return_tensors="pt",
    )  # fmt: skip
    made["input_features"] = found.input_features
    made["feature_attention_mask"] = found.attention_mask
    counts = [audio_tokens(family, n) for n in found.attention_mask.sum(1).tolist()]
    kind = getattr(
        importlib.import_module(
            "transformers.models."
            + ("qwen2_5_omni" if family.kind == "Qwen2_5Omni" else "qwen3_omni_moe")
        ),
        f"{family.kind}Processor",
    )
    alone = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2), audio_bos_token="(", audio_eos_token=")",
        video_token="v", audio_token="a",
        get_chunked_index=functools.partial(kind.get_chunked_index, None),
    )  # fmt: skip
    sizes = {"video_grid_thw": made["video_grid_thw"].numpy(), "video_second_per_grid": seconds}
    rate = model.config.position_id_per_seconds
    texts = iter(
        kind.replace_video_with_audio_token(
            alone, sizes, i, {"num_audio_tokens": counts}, i, position_id_per_seconds=rate,
            seconds_per_chunk=2.0,
        ) for i in range(len(heard))
    )  # fmt: skip
    cells = iter((made["image_grid_thw"].prod(1) // 4).tolist() if seen else [])
    ids, tokens = [], {"(": 162, ")": 163, "v": 165, "a": 166}
    for token in tokenizer.encode(sounding_text(family, mix), add_special_tokens=False):
        if token == 165:
            ids += [tokens[one] for one in next(texts)]
        else:
            ids += [token] * (next(cells) if token == 164 else 1)
    ids = torch.tensor([ids])
    return {**made, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def vars_of(info):
    return {
        "fps": info.fps, "frames_indices": list(info.frames_indices),
        "total_num_frames": info.total_num_frames, "duration": info.duration,
    }  # fmt: skip


def expected(pair, mix):
    """transformers' tokens and their log probabilities."""
    return generated(pair, inputs_of(pair[3], pair[1], mix))


def generated(pair, inputs):
    model, _, _, family = pair
    with torch.no_grad(), one_by_one(model) if family.kind == "Qwen3OmniMoe" else nullcontext():
        out = model.generate(
            **inputs, max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return ids, [
        logits[0].log_softmax(-1)[one].item() for logits, one in zip(out.logits, ids, strict=True)
    ]


def check_answer(answer, ids, logprobs, mix):
    got = answer.outputs[0]
    assert list(got.token_ids) == ids, mix
    for token, entry, want in zip(ids, got.logprobs, logprobs, strict=True):
        assert abs(entry[token].logprob - want) < 1e-3, mix


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}])
def test_an_engine_answers_as_transformers(pair, settings):
    llm = LLM(
        str(pair[2]), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024, **settings
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=0)
    prompts = [prompt_of(pair[3], mix) for mix in MIXES]
    answers = llm.generate(prompts, params) + llm.generate(prompts[::-1], params)[::-1]
    assert all(one.num_cached_tokens for one in answers[-2:]), "of the second time"
    wants = [expected(pair, mix) for mix in MIXES]
    assert len({tuple(ids) for ids, _ in wants}) > len(wants) // 2
    for mix, answer, (ids, logprobs) in zip(MIXES * 2, answers, wants * 2, strict=True):
        check_answer(answer, ids, logprobs, mix)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}])
def test_sounds_of_videos_are_read_as_in_transformers(pair, settings):
    llm = LLM(
        str(pair[2]), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024, **settings
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=0)
    prompts = [sounding_prompt(pair[3], mix) for mix in SOUND_MIXES]
    answers = llm.generate(prompts, params) + llm.generate(prompts, params)
    assert all(one.num_cached_tokens for one in answers[-2:]), "of the second time"
    for mix, *both in zip(SOUND_MIXES, answers[: len(prompts)], answers[len(prompts) :]):
        inputs = sounding_inputs(pair, mix)
        ids, logprobs = generated(pair, {**inputs, "use_audio_in_video": True})
        for answer in both:
            assert list(answer.prompt_token_ids) == inputs["input_ids"][0].tolist(), mix
            check_answer(answer, ids, logprobs, mix)


def test_the_sound_of_a_file_is_read_where_it_has_one(pair):
    llm = LLM(str(pair[2]), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024)
    frames, counts = numbered_frames(20, 56, 84), []
    for sound, reads in ((recording(2.0, 1), True), (recording(2.0, 1), False), (None, True)):
        prompt = {
            "prompt": sounding_text(pair[3], "s"),
            "multi_modal_data": {"video": [video(frames, sound=sound)]},
            "mm_processor_kwargs": {"load_audio_from_video": reads},
        }
        (found,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        counts.append(found.prompt_token_ids.count(166))
    assert counts[0] >= audio_tokens(pair[3], 200)
    assert counts[1:] == [0, 0]


@pytest.mark.long("engines of several processes")
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_answer_as_transformers(pair, ranks):
    if "pipeline_parallel_size" in ranks and pair[3].kind == "Qwen3OmniMoe":
        pytest.skip("three layers, of which DeepStack needs two in the first stage")
    llm = LLM(
        str(pair[2]), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024,
        max_num_batched_tokens=64, **ranks,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    answers = llm.generate([prompt_of(pair[3], mix) for mix in MIXES], params)
    llm.llm_engine.engine.shutdown()
    assert [list(one.outputs[0].token_ids) for one in answers] == [
        expected(pair, mix)[0] for mix in MIXES
    ]


def test_a_whole_checkpoint_is_read_as_its_thinker(pair, tmp_path):
    from safetensors.torch import load_file, save_file

    own = json.loads((pair[2] / "config.json").read_text())
    outer = own["model_type"].removesuffix("_thinker")
    for path in pair[2].iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = {
        "model_type": outer, "architectures": [CLASSES[outer]], "thinker_config": own,
        "talker_config": {"model_type": f"{outer}_talker"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(pair[2] / "model.safetensors")
    assert {name.partition(".")[0] for name in tensors} == HUB_PARTS
    tensors = {f"thinker.{name}": one for name, one in tensors.items()}
    more = {"talker.model.norm.weight": torch.ones(4), **MORE_TENSORS[outer]}
    save_file({**more, **tensors}, tmp_path / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 1024}
    prompt = prompt_of(pair[3], "xab")
    answers = [
        LLM(str(one), **settings).generate(prompt, params)[0].outputs[0].token_ids
        for one in (pair[2], tmp_path)
    ]
    assert answers[0] == answers[1]


def test_items_are_encoded_in_slices_beside_a_stream(pair, monkeypatch):
    prompts = [prompt_of(pair[3], mix) for mix in ("x", "bx", "vz")]
    check_slices(pair[2], prompts, monkeypatch, num_gpu_blocks_override=300, max_model_len=1024)


@torch.inference_mode()
def test_items_of_any_kind_have_as_many_slices(pair):
    processor = LLM(str(pair[2]), dtype="float32", num_gpu_blocks_override=9, max_model_len=64)
    processor = processor.llm_engine.inputs.media.pipeline.processor
    kind, config = read_model_config(read_hf_config(pair[2]))
    model = build_model(kind, config, folder=pair[2], dtype=torch.float32, progress=False)
    encoder = model.media_encoder
    decoded = {
        "a": DecodedImage(np.asarray(MEDIA["a"]())),
        "x": DecodedAudio(MEDIA["x"](), RATE),
        "v": MEDIA["v"](),
    }
    inputs = {}
    for name, one in decoded.items():
        made = processor.process(one, {})
        tensors = {t.name: torch.from_numpy(from_tensor(t).copy()) for t in made.tensors}
        inputs[name] = EncoderInput(made.modality, tensors)
    for names in ("x", "a", "xav", "vx"):
        items = [inputs[name] for name in names]
        slices = encoder.encode_in_slices(items)
        for _ in range(encoder.slices):
            next(slices)
            lazy_fusion.flush()
        with pytest.raises(StopIteration) as ended:
            next(slices)
        found = zip(ended.value.value, encoder.encode(items), strict=True)
        assert all(torch.equal(*both) for both in found)


def test_recordings_that_are_refused(pair):
    llm = LLM(str(pair[2]), dtype="float32", num_gpu_blocks_override=300, max_model_len=1024)
    processor = llm.llm_engine.inputs.media.pipeline.processor
    least, most = (2, 300) if pair[3].kind == "Qwen2_5Omni" else (0, 1200)
    for audio, words in (
        (np.zeros(160 * least, np.float32), f"longer than {least / 100:g} s"),
        (np.zeros((most + 1) * RATE, np.float32), f"reads {most} s at once"),
    ):
        with pytest.raises(RequestError, match=words):
            processor.process(DecodedAudio(audio, RATE), {})
