"""Images and recordings of Gemma 3n: tokens, rows and answers are those of transformers.

Its vision tower is not in transformers but in timm, which is not needed here: PlainTower computes
what that does, in plain torch with channels first. It was compared with timm 1.0.31, as were our
rows, with a tower of this size and with the released one (docs/LOG.md).
"""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.kernels.framework import lazy_fusion
from quire.media.processor import DecodedAudio, ProcessorFiles
from quire.media.processors.gemma3n import EmphasizedFrames, Processor
from quire.models.base import EncoderInput
from quire.models.multimodal import _mobilenet_v5 as tower
from quire.models.multimodal._mobilenet_v5 import Fused, Inverted, MultiQuery
from tests.cpu.encoder_decoder.speech import RATE, recording
from tests.cpu.models.peers import scale_weights
from tests.cpu.multimodal.beside_streams import check_slices
from tests.cpu.multimodal.families import Pair, check_answers, image, tokenizer_of

pytestmark = pytest.mark.slow("imports transformers, and makes models of it")

NAME, SIDE, STATES, STEPS = "mobilenetv5_300m_enc", 96, 48, 6
TEXT_ONLY = 256
"""Ids from here on have vectors in tables of images and recordings."""
LAYOUT = tower.Layout(
    8,
    (
        (Fused(16, 4, 2), Fused(16, 4)),
        (Inverted(24, 6, 3, 5, 2), Inverted(24, 4, 5)),
        (Inverted(32, 6, 5, 5, 2), Inverted(32, 1), MultiQuery(32, 4, 8, 2), Inverted(32, 2)),
        (Inverted(40, 6, 5, 5, 2), MultiQuery(40, 2, 12), Inverted(40, 2)),
    ),
)
TEXT = {
    "model_type": "gemma3n_text", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 40, "laurel_rank": 16, "max_position_embeddings": 4096,
    "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0], "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION = {"architecture": NAME, "hidden_size": STATES, "vocab_size": 22, "vocab_offset": 256}
AUDIO = {
    "vocab_size": 22, "vocab_offset": 278, "hidden_size": 32, "conf_num_hidden_layers": 2,
    "conf_num_attention_heads": 4, "sscp_conv_channel_size": [16, 4],
}  # fmt: skip
IDS = {
    "boi_token_id": 150, "eoi_token_id": 256, "image_token_id": 257, "boa_token_id": 151,
    "eoa_token_id": 278, "audio_token_id": 279, "vision_soft_tokens_per_image": 4,
    "audio_soft_tokens_per_image": 12,
}  # fmt: skip
NAMES = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>", "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>", "audio_token": "<audio_soft_token>",
}  # fmt: skip


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * weight[:, None, None]


def convolved(x, weight, bias=None, stride=1):
    """A convolution with the padding that TensorFlow calls same."""
    groups, kernel = x.shape[1] // weight.shape[1], weight.shape[-1]
    missing = [max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:]]
    sides = [part for n in reversed(missing) for part in (n // 2, n - n // 2)]
    return functional.conv2d(functional.pad(x, sides), weight, bias, stride, groups=groups)


class PlainTower(nn.Module):
    """MobileNet-v5 as timm has it, with its names."""

    def __init__(self, layout):
        super().__init__()
        built = tower.MobileNetV5(layout, STATES, 2)
        self.layout = layout
        for name, one in built.state_dict().items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(torch.empty(one.shape)))

    def of(self, name):
        found = getattr(self, name.replace(".", "/"))
        return found[..., None, None] if found.dim() == 2 else found

    def conv(self, x, name, stride=1, act=False):
        y = norm(
            convolved(x, self.of(f"{name}.conv.weight"), None, stride), self.of(f"{name}.bn.weight")
        )
        return functional.gelu(y, approximate="tanh") if act else y

    def forward(self, x):
        bias = self.of("conv_stem.conv.bias")
        x = convolved(x, self.of("conv_stem.conv.weight"), bias, 2)
        x = functional.gelu(norm(x, self.of("conv_stem.bn.weight")), approximate="tanh")
        maps = []
        for s, stage in enumerate(self.layout.stages):
            for b, block in enumerate(stage):
                at, kind = f"blocks.{s}.{b}", type(block).__name__.lower()
                y = getattr(self, kind)(x, at, block)
                x = x + y if x.shape == y.shape else y
            maps.append(x)
        small = functional.interpolate(maps[-1], maps[-2].shape[2:], mode="nearest")
        x = self.conv(torch.cat((maps[-2], small), 1), "msfa.ffn.pw_exp", act=True)
        x = self.conv(x, "msfa.ffn.pw_proj")
        return norm(functional.avg_pool2d(x, x.shape[-1] // 2), self.of("msfa.norm.weight"))

    def fused(self, x, at, c):
        y = norm(
            convolved(x, self.of(f"{at}.conv_exp.weight"), None, c.stride),
            self.of(f"{at}.bn1.weight"),
        )
        y = functional.gelu(y, approximate="tanh")
        return norm(convolved(y, self.of(f"{at}.conv_pwl.weight")), self.of(f"{at}.bn2.weight"))

    def inverted(self, x, at, c):
        if c.first:
            x = self.conv(x, f"{at}.dw_start", 1 if c.middle else c.stride)
        x = self.conv(x, f"{at}.pw_exp", act=True)
        if c.middle:
            x = self.conv(x, f"{at}.dw_mid", c.stride, act=True)
        return self.conv(x, f"{at}.pw_proj") * self.of(f"{at}.layer_scale.gamma")[:, None, None]

    def multiquery(self, x, at, c):
        x = norm(x, self.of(f"{at}.norm.weight"))
        q = convolved(x, self.of(f"{at}.attn.query.proj.weight"))
        q = q.unflatten(1, (c.heads, c.size)).flatten(3)  # [N, H, D, n]
        read = []
        for name in ("key", "value"):
            y = x
            if c.stride > 1:
                y = convolved(x, self.of(f"{at}.attn.{name}.down_conv.weight"), None, c.stride)
                y = norm(y, self.of(f"{at}.attn.{name}.norm.weight"))
            read.append(convolved(y, self.of(f"{at}.attn.{name}.proj.weight")).flatten(2))
        scores = torch.einsum("nhdq,ndk->nhqk", q, read[0]) * c.size**-0.5
        y = torch.einsum("nhqk,ndk->nhdq", scores.softmax(-1), read[1])
        y = y.reshape(len(x), -1, *x.shape[2:])
        y = convolved(y, self.of(f"{at}.attn.output.proj.weight"))
        return y * self.of(f"{at}.layer_scale.gamma")[:, None, None]


class TowerModel(nn.Module):
    """The tower as transformers wraps it."""

    def __init__(self, layout):
        super().__init__()
        self.timm_model = PlainTower(layout)

    def forward(self, pixel_values, **_):
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(last_hidden_state=self.timm_model(pixel_values))


def tiny_layout():
    """The released architecture is a tiny one meanwhile."""
    return mock.patch.dict(tower.LAYOUTS, {NAME: LAYOUT})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with tiny_layout():
        yield made(tmp_path_factory.mktemp("gemma3n"))


def made(folder):
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.models.gemma3n import modeling_gemma3n

    config = transformers.AutoConfig.for_model(
        "gemma3n", text_config=TEXT, vision_config=VISION, audio_config=AUDIO, **IDS
    )
    torch.manual_seed(3)
    build = modeling_gemma3n.AutoModel.from_config

    def from_config(config, **more):
        if config.model_type == "gemma3n_vision":
            return TowerModel(LAYOUT)
        return build(config, **more)

    with mock.patch.object(modeling_gemma3n.AutoModel, "from_config", from_config):
        kind = transformers.Gemma3nForConditionalGeneration
        model = kind._from_config(config, attn_implementation="eager").eval()
    scale_weights(model, 0.3)
    for name, one in model.named_parameters():
        fan = one[0].numel() if one.dim() > 1 else 1
        if "timm_model" in name:
            one.data.normal_(1.0 if one.dim() == 1 else 0.0, 0.3 if one.dim() == 1 else fan**-0.5)
        elif name.endswith(("per_dim_scale", "embedding.weight")):
            one.data.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name.replace("/", "."): one for name, one in load_file(path).items()}
    for name, one in tensors.items():  # matrices are convolutions there
        if "timm_model" in name and one.dim() == 2:
            tensors[name] = one[..., None, None]
    save_file(tensors, path, {"format": "pt"})
    tokens = {NAMES[key.removesuffix("_id")]: at for key, at in IDS.items() if key.endswith("_id")}
    tokenizer = tokenizer_of(tokens, **NAMES)
    tokenizer.save_pretrained(folder)
    images = transformers.SiglipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, do_normalize=False
    )
    audio = transformers.Gemma3nAudioFeatureExtractor()
    files = images.to_dict() | {"feature_extractor_type": "Gemma3nAudioFeatureExtractor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(files, default=str))
    processor = transformers.Gemma3nProcessor(
        audio, images, tokenizer, audio_seq_length=12, image_seq_length=4
    )
    return Pair(model, processor, folder)


IMAGES = [image(96, 96), image(60, 130), image(200, 90)]
AUDIOS = [recording(1.0, 1), recording(0.4, 2), recording(1.0, 3), recording(1.9, 4)]
MIXES = [((), ()), ((0,), ()), ((1, 2), ()), ((), (1,)), ((0,), (3,)), ((2, 0), (0, 2))]
"""Images and recordings of a prompt. Recordings of one are of the same length: transformers fills
up the shorter ones, which changes their last rows a little."""


def prompt_of(images, audios):
    """A prompt for an engine; images and audios: indexes."""
    words = ["w3 w4 <image_soft_token> w5"] * len(images) + ["w6 <audio_soft_token>"] * len(audios)
    data = {
        "image": [IMAGES[i] for i in images],
        "audio": [(AUDIOS[i], RATE) for i in audios],
    }
    data = {key: one for key, one in data.items() if one}
    text = " ".join(["<s>", *words, "w40 w41"])
    return {"prompt": text} | ({"multi_modal_data": data} if data else {})


def asked(pair, images, audios):
    """What transformers' processor makes of a prompt."""
    text = prompt_of(images, audios)["prompt"]
    images, audios = [IMAGES[i] for i in images], [AUDIOS[i] for i in audios]
    given = {"images": [list(images)]} if images else {}
    given |= {"audio": list(audios)} if audios else {}
    return pair.processor(text=[text], return_tensors="pt", **given)


def test_answers_are_those_of_transformers(pair):
    llm = LLM(
        str(pair.folder), dtype="float32", num_gpu_blocks_override=200, max_model_len=512,
        max_num_batched_tokens=48,
    )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=0,
        allowed_token_ids=list(range(TEXT_ONLY)),
    )  # fmt: skip
    prompts, wants = [], []
    for images, audios in MIXES:
        inputs = asked(pair, images, audios)
        with torch.inference_mode():
            found = pair.theirs.generate(
                **inputs, max_new_tokens=STEPS, do_sample=False, output_logits=True,
                return_dict_in_generate=True, suppress_tokens=list(range(TEXT_ONLY, 300)),
            )  # fmt: skip
        ids = found.sequences[0, -STEPS:]
        best = torch.cat(found.logits).log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
        wants.append((inputs["input_ids"][0].tolist(), ids.tolist(), best))
        prompts.append(prompt_of(images, audios))
    assert len({tuple(ids) for _, ids, _ in wants}) > 3
    check_answers(llm, prompts, wants, sampling, 1e-4)


@torch.inference_mode()
def test_rows_in_slices_are_those_of_transformers(pair):
    encoder = pair.ours[0].media_encoder
    items = pair.encoder_inputs(pair.process(IMAGES))
    slices = encoder.encode_in_slices(items)
    for _ in range(encoder.slices):
        next(slices)
        lazy_fusion.flush()
    with pytest.raises(StopIteration) as ended:
        next(slices)
    pixels = pair.processor.image_processor(IMAGES, return_tensors="pt")["pixel_values"]
    wants = pair.theirs.model.get_image_features(pixels).pooler_output
    for got, want in zip(ended.value.value, wants, strict=True):
        assert (got[:-1] - want).abs().max().item() < 1e-4


@pytest.mark.long("slices of one item are tested every day")
def test_items_are_encoded_in_slices_beside_a_stream(pair, monkeypatch):
    prompts = [prompt_of(*mix) for mix in (((), (1,)), ((0,), ()), ((2, 0), (0, 2)))]
    check_slices(pair.folder, prompts, monkeypatch, num_gpu_blocks_override=200, max_model_len=512)


@torch.inference_mode()
def test_recordings_have_as_many_slices_as_images(pair):
    encoder = pair.ours[0].media_encoder
    features = torch.from_numpy(EmphasizedFrames({})(AUDIOS[0]))
    items = [EncoderInput("audio", {"features": features})]
    slices = encoder.encode_in_slices(items)
    for _ in range(encoder.slices):
        next(slices)
    with pytest.raises(StopIteration) as ended:
        next(slices)
    assert torch.equal(ended.value.value[0], encoder.encode(items)[0])


@pytest.mark.parametrize("samples", [513, 1000, 16000, 16161, 480000])
def test_features_of_recordings_are_those_of_transformers(samples):
    from transformers import Gemma3nAudioFeatureExtractor

    audio = recording(30, 3)[:samples]
    want = Gemma3nAudioFeatureExtractor()([audio], return_tensors="np")
    assert want["input_features_mask"].all()
    got = EmphasizedFrames({})(audio)
    assert got.shape == want["input_features"][0].shape
    assert np.abs(got - want["input_features"][0]).max() < 1e-3
    least = EmphasizedFrames({}).least
    assert len(EmphasizedFrames({})(audio[: least - 1])) == 0


def test_items_and_files_that_are_refused(pair):
    own = pair.own_processor
    for samples, words in ((512, r"0\.03\d* s at least"), (31 * RATE, "reads 30 s at once")):
        with pytest.raises(RequestError, match=words):
            own.process(DecodedAudio(np.zeros(samples, np.float32), RATE), {})
    for images, audio, words in (
        ({"size": {"height": 97, "width": 97}}, {}, "a multiple of 32"),
        ({}, {"dither": 0.1}, "dither"),
        ({}, {"per_bin_mean": [1.0]}, "128 numbers"),
    ):
        files = ProcessorFiles(pair.hf, {"image": images, "audio": audio})
        with pytest.raises(ConfigError, match=words):
            Processor(files)
