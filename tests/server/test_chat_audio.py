"""Recordings in chats over HTTP: answers are those of prompts offline, with the openai client."""

import base64
import io
import json

import openai
import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from tests import tiers
from tests.cpu.encoder_decoder.speech import RATE, recording
from tests.cpu.multimodal import test_audio, test_omni
from tests.server.running import serving

soundfile = pytest.importorskip("soundfile")
pytestmark = [
    pytest.mark.slow("servers of models that transformers makes"),
    pytest.mark.sampled(2),
]

MODELS = {
    "omni": (test_omni.write_model, "<|audio_bos|> <|AUDIO|> <|audio_eos|>"),
    "omni 3": (
        lambda folder: test_omni.write_model(folder, "qwen3_omni_moe"),
        "<|audio_start|> <|audio_pad|> <|audio_end|>",
    ),
    "voxtral": (test_audio.write_voxtral, "[BEGIN_AUDIO] [AUDIO]"),
}
TEMPLATE = """{%- for message in messages -%}
w5{% if message.content is string %} {{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'text' %} {{ part.text }}{% else %} MARK{% endif %}
{%- endfor %}{% endif %}{% endfor %} w6"""
AUDIO = recording(1.3, 4)
MORE = recording(0.7, 5)
OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 2048}


@pytest.fixture(scope="module", params=["omni", "voxtral", *tiers.long("omni 3")])
def served(request, tmp_path_factory):
    """(what stands for a recording, an LLM, the address of a server)"""
    write, mark = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", mark))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with serving(str(folder), *flags, "--served-model-name", "tiny") as running:
        yield mark, LLM(str(folder), **OPTIONS), running.url


def wav(samples):
    data = io.BytesIO()
    soundfile.write(data, samples, RATE, format="WAV", subtype="FLOAT")
    return base64.b64encode(data.getvalue()).decode()


def part(samples):
    return {"type": "input_audio", "input_audio": {"data": wav(samples), "format": "wav"}}


def offline(llm, text, *audios):
    prompt = {"prompt": text, "multi_modal_data": {"audio": [(one, RATE) for one in audios]}}
    how = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return llm.generate(prompt, how)[0]


def test_chats_batches_and_responses_hear(served, tmp_path):
    mark, llm, url = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    content = [{"type": "text", "text": "w9"}, part(AUDIO), part(MORE)]
    want = offline(llm, f"w5 w9 {mark} {mark} w6", AUDIO, MORE)
    other = offline(llm, f"w5 w9 {mark} {mark} w6", MORE, AUDIO)
    assert other.outputs[0].token_ids != want.outputs[0].token_ids
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}],
            "temperature": 0.0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}  # fmt: skip
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].message.content == want.outputs[0].text
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)
    chunks = client.chat.completions.create(**body, stream=True)
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == want.outputs[0].text
    responded = client.responses.create(
        model="tiny", input=[{"role": "user", "content": [
            {"type": "input_text", "text": "w9"}, part(AUDIO), part(MORE)]}],
        temperature=0.0, max_output_tokens=16, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert responded.output_text.startswith(want.outputs[0].text)
    given = {**body, "ignore_eos": True}
    del given["extra_body"]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": given}
    given_path, made_path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given_path.write_text(json.dumps(line) + "\n")
    words = ["run-batch", "-i", str(given_path), "-o", str(made_path), "--url", f"{url}/v1"]
    assert main(words) == 0
    found = json.loads(made_path.read_text())
    assert found["response"]["body"]["choices"][0]["message"]["content"] == text


def test_what_is_no_recording_is_refused(served):
    _, _, url = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for data, words in (("QQ==", "cannot be decoded"), ("?", "not valid base64")):
        bad = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": [bad]}]
            )
