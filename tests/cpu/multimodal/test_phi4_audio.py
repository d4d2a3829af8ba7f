"""Recordings of Phi-4-multimodal: features, rows and answers are those of transformers."""

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedAudio
from quire.models.multimodal import _phi4_audio
from tests.cpu.encoder_decoder.speech import recording
from tests.cpu.multimodal.families import image, made

pytestmark = pytest.mark.slow("imports transformers, and makes a model of it")
RATE = 16_000
AUDIOS = [recording(seconds, i) for i, seconds in enumerate((1.0, 0.111, 3.33, 0.025))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi4")
    found = made("phi4_multimodal", folder)
    audio = found.theirs.model.embed_tokens_extend.audio_embed
    torch.manual_seed(3)
    with torch.no_grad():
        for name, one in [*audio.named_parameters(), *audio.named_buffers()]:
            if name.endswith(("b1", "b2", "bias", "global_mean", "global_invstd")):
                one.add_(torch.randn_like(one) * 0.3)
    found.theirs.save_pretrained(folder)
    found.processor.tokenizer.save_pretrained(folder)
    found.processor.image_processor.save_pretrained(folder)
    return found


def item_of(pair, samples, **kwargs):
    return pair.own_processor.process(DecodedAudio(samples, RATE), kwargs)


def features_of(pair, samples):
    extract = pair.processor.audio_processor
    return extract([samples], sampling_rate=RATE, return_tensors="pt")["audio_input_features"]


@torch.inference_mode()
def wanted_rows(pair, samples, mode):
    part = pair.theirs.model.embed_tokens_extend.audio_embed
    states = part.encoder(features_of(pair, samples), None)[0]
    up = getattr(part, f"up_proj_for_{mode}")
    down = getattr(part, f"down_proj_for_{mode}")
    return down(torch.nn.functional.gelu(up(states)))


@pytest.mark.parametrize("samples", AUDIOS, ids=len)
def test_features_are_those_of_transformers(pair, samples):
    (found,) = item_of(pair, samples).tensors
    want = features_of(pair, samples)[0].numpy()
    assert found.shape == want.shape
    assert np.abs(from_tensor(found) - want).max() < 1e-3


@pytest.mark.parametrize("piece", [500, 5, 7])
def test_rows_of_packed_recordings_are_those_of_transformers(pair, piece, monkeypatch):
    monkeypatch.setattr(_phi4_audio, "PIECE", piece)
    items = [item_of(pair, one) for one in AUDIOS]
    items.append(item_of(pair, AUDIOS[0], beside_images=True))
    (still,) = pair.process([image(40, 112)])
    found = pair.rows([*items[:2], still, *items[2:]])
    modes = ["speech"] * 4 + ["vision_speech"]
    rows = [*found[:2], *found[3:]]
    for samples, mode, own, item in zip([*AUDIOS, AUDIOS[0]], modes, rows, items, strict=True):
        with pieces_of(piece, pair.theirs):
            want = wanted_rows(pair, samples, mode)
        assert own.shape == want.shape
        assert (own - want).abs().max().item() < 5e-5 * max(want.abs().max().item(), 2)
        assert want.abs().max().item() > 0.1
        assert len(own) == item.sizes["rows"] <= pair.ours[0].media_encoder.max_rows("audio")
    assert (found[2] - pair.rows([still])[0]).abs().max().item() < 1e-5


class pieces_of:
    """Transformers' encoder with pieces of another length, which it has in its code."""

    def __init__(self, piece, model):
        self.forward = type(model.model.embed_tokens_extend.audio_embed.encoder).forward
        self.piece = piece

    def __enter__(self):
        self.code = self.forward.__code__
        constants = [self.piece if one == 500 else one for one in self.code.co_consts]
        self.forward.__code__ = self.code.replace(co_consts=tuple(constants))

    def __exit__(self, *_):
        self.forward.__code__ = self.code


def test_too_short_and_too_long_recordings_are_refused(pair):
    with pytest.raises(RequestError, match=r"must have 0\.025 s at least"):
        item_of(pair, np.zeros(399, np.float32))
    with pytest.raises(RequestError, match=r"the audio has 601\.00 s, .* 600 s at once"):
        item_of(pair, np.zeros(601 * RATE, np.float32))


PROMPTS = {
    "a recording": ("w3 <|audio|> w5", [0], []),
    "two": ("w3 <|audio|> w5 <|audio|> w7", [1, 2], []),
    "beside an image": ("w3 <|audio|> w5 <|image|> w7", [0], [(40, 112)]),
    "text": ("w3 w5", [], []),
}


@torch.inference_mode()
def wanted_answer(pair, text, audios, images, count):
    given = {"images": images or None, "audio": [AUDIOS[i] for i in audios] or None}
    if len(audios) < 2:
        inputs = pair.processor(text=[text], return_tensors="pt", **given)
        inputs = pair.theirs.generate(
            **inputs, max_new_tokens=count, do_sample=False, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        scores = torch.cat(inputs.scores).log_softmax(-1)
        return inputs.sequences[0, -count:].tolist(), scores.max(-1).values.tolist()
    # Several recordings make a mask, which transformers adds to scores as ones and zeros.
    ids = pair.processor(text=[text], return_tensors="pt", **given)["input_ids"]
    embeds = pair.theirs.model.embed_tokens(ids)
    rows = [wanted_rows(pair, AUDIOS[i], "speech") for i in audios]
    embeds[ids == 151] = torch.cat(rows)
    made, logprobs = [], []
    for _ in range(count):
        scores = pair.theirs(inputs_embeds=embeds).logits[0, -1].log_softmax(-1)
        made.append(int(scores.argmax()))
        logprobs.append(scores.max().item())
        embeds = torch.cat((embeds, pair.theirs.model.embed_tokens(torch.tensor([[made[-1]]]))), 1)
    return made, logprobs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}])
def test_prompts_are_answered_as_by_transformers(pair, settings):
    llm = LLM(
        str(pair.folder), dtype="float32", max_model_len=512, num_gpu_blocks_override=300,
        mm_processor_workers=1, **settings,
    )  # fmt: skip
    asked, want = [], []
    for text, audios, sizes in PROMPTS.values():
        images = [image(*size) for size in sizes]
        given = {"audio": [(AUDIOS[i], RATE) for i in audios], "image": images}
        data = {key: one for key, one in given.items() if one}
        asked.append({"prompt": text} | ({"multi_modal_data": data} if data else {}))
        want.append(wanted_answer(pair, text, audios, images, 5))
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=1)
    for output, (tokens, logprobs) in zip(llm.generate(asked, sampling), want, strict=True):
        (one,) = output.outputs
        assert list(one.token_ids) == tokens
        found = [at[i].logprob for at, i in zip(one.logprobs, tokens, strict=True)]
        assert found == pytest.approx(logprobs, abs=2e-4)
