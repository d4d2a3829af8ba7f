"""Speech routes of a tiny Whisper: formats, streams, long recordings, errors; the openai client."""

import io
import json
import math
from contextlib import suppress

import httpx
import numpy as np
import openai
import psutil
import pytest

from quire import LLM, SamplingParams
from quire.media.audio_ops import split_at_quiet
from tests.cpu.encoder_decoder import speech
from tests.cpu.encoder_decoder.speech import FIRST_TIME, IDS, NO_TIMES, PREVIOUS, RATE, SOT
from tests.server.running import serving, wait_until

soundfile = pytest.importorskip("soundfile")
pytestmark = pytest.mark.slow("starts a server of a model that transformers makes")

SHORT = speech.recording(3.2, 1)
LONG = np.concatenate([speech.recording(40, 2), np.zeros(RATE // 2), speech.recording(30, 3)])
LONG = LONG.astype(np.float32)
GREEDY = {"temperature": "0", "language": "en"}


def file_of(audio, kind="WAV"):
    data = io.BytesIO()
    soundfile.write(data, audio, RATE, format=kind, subtype="FLOAT" if kind == "WAV" else None)
    return data.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    model = speech.write_model(folder)
    model.model.decoder.embed_tokens.weight.data[FIRST_TIME:] *= 0.4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), dtype="float32", num_gpu_blocks_override=800)


@pytest.fixture(scope="module")
def running(folder):
    options = "--dtype float32 --num-gpu-blocks-override 800 --served-model-name tiny"
    options += " --max-recording-seconds 120"
    with serving(str(folder), *options.split()) as running:
        yield running


@pytest.fixture(scope="module")
def url(running):
    return running.url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


def post(http, audio=SHORT, route="transcriptions", **fields):
    files = {"file": ("speech.wav", audio if isinstance(audio, bytes) else file_of(audio))}
    return http.post(f"/v1/audio/{route}", files=files, data={**GREEDY, **fields})


def offline(llm, pieces, times=False, task="transcribe", before=()):
    """The tokens of each piece, of LLM.generate()."""
    prompt = [*before, SOT, IDS["<|en|>"], IDS[f"<|{task}|>"], *(() if times else (NO_TIMES,))]
    prompts = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (one, RATE)}} for one in pieces
    ]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64 - len(prompt)))
    return [list(one.outputs[0].token_ids) for one in answers]


def text_of(llm, pieces):
    ids = [[token for token in one if token < 256] for one in pieces]
    return "".join(llm.get_tokenizer().decode(one) for one in ids).strip()


def cut(audio):
    return [audio[one.start : one.stop] for one in split_at_quiet(audio, RATE, 30 * RATE)]


def test_text_is_that_of_generate(http, llm):
    want = text_of(llm, offline(llm, [SHORT]))
    answer = post(http)
    assert answer.json() == {"text": want, "usage": {"type": "duration", "seconds": 4}}
    assert post(http, response_format="text").text == want + "\n"
    assert post(http, file_of(SHORT, "FLAC")).json()["text"]
    translated = post(http, route="translations").json()["text"]
    assert translated == text_of(llm, offline(llm, [SHORT], task="translate"))
    before = [PREVIOUS, *llm.get_tokenizer().encode(" ab", add_special_tokens=False)]
    prompted = text_of(llm, offline(llm, [SHORT], before=before))
    assert post(http, prompt="ab").json()["text"] == prompted


def test_segments_of_a_long_recording_continue_in_time(http, llm):
    pieces = cut(LONG)
    assert len(pieces) == 3
    whole = post(http, LONG, response_format="verbose_json").json()
    tokens = offline(llm, pieces, times=True)
    assert whole["text"] == text_of(llm, tokens)
    assert (whole["task"], whole["language"]) == ("transcribe", "english")
    assert whole["duration"] == len(LONG) / RATE
    segments = whole["segments"]
    assert [one["id"] for one in segments] == list(range(len(segments)))
    assert [token for one in segments for token in one["tokens"]] == [
        token for one in tokens for token in one if token < 256
    ]
    starts = np.cumsum([0, *map(len, pieces)]) / RATE
    seeks = {one["seek"] for one in segments}
    assert seeks <= {round(one * 100) for one in starts[:3]}
    assert len(seeks) > 1
    for one in segments:
        low = one["seek"] / 100
        end = starts[list(np.round(starts * 100)).index(one["seek"]) + 1]
        assert low - 0.01 <= one["start"] <= one["end"] <= end + 0.01
        assert one["avg_logprob"] < 0 < one["compression_ratio"]
        assert 0 <= one["no_speech_prob"] < 1


def test_subtitles(http):
    segments = post(http, LONG, response_format="verbose_json").json()["segments"]
    srt = post(http, LONG, response_format="srt").text
    vtt = post(http, LONG, response_format="vtt").text
    assert srt.count(" --> ") == vtt.count(" --> ") == len(segments)
    assert srt.startswith("1\n00:00:")
    assert vtt.startswith("WEBVTT\n\n00:00:")
    last = segments[-1]
    minutes, seconds = divmod(last["start"], 60)
    assert f"00:{int(minutes):02}:{seconds:06.3f} --> ".replace(".", ",") in srt


def plain(texts):
    """Whole characters of texts; random bytes beside each other may be one or not."""
    return "".join(
        c for text in texts for c in text if c.isascii() and c.isprintable() and c != " "
    )


def test_words_of_a_long_recording_have_times(http):
    fields = {"timestamp_granularities[]": ["word", "segment"]}
    whole = post(http, LONG, response_format="verbose_json", **fields).json()
    words, segments = whole["words"], whole["segments"]
    assert plain(one["word"] for one in words) == plain(one["text"] for one in segments)
    assert [one["start"] for one in words] == sorted(one["start"] for one in words)
    assert all(0 <= one["start"] <= one["end"] <= whole["duration"] for one in words)
    seeks = {one["seek"] / 100 for one in segments}
    assert max(one["start"] for one in words) > max(seeks) > 25
    alone = post(
        http, LONG, response_format="verbose_json", **{"timestamp_granularities[]": "word"}
    ).json()
    assert alone["words"] == words
    assert "segments" not in alone
    for form in ("srt", "vtt"):
        text = post(http, LONG, response_format=form, **fields).text
        assert text.count(" --> ") == len(words)
    silent = post(http, np.zeros(RATE, np.float32), max_completion_tokens="1", **fields,
                  response_format="verbose_json").json()  # fmt: skip
    assert isinstance(silent["words"], list)


def test_a_language_is_detected(http, folder, llm):
    prompt = {"prompt_token_ids": [SOT], "multi_modal_data": {"audio": (SHORT, RATE)}}
    allowed = [IDS[f"<|{one}|>"] for one in speech.LANGUAGES]
    params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=allowed)
    (answer,) = llm.generate(prompt, params)
    code = speech.LANGUAGES[allowed.index(answer.outputs[0].token_ids[0])]
    names = {"en": "english", "de": "german", "fr": "french", "zh": "chinese"}
    found = post(http, language="", response_format="verbose_json").json()
    assert found["language"] == names[code]
    assert post(http, language=names[code]).json() == post(http, language=code).json()


def test_failing_pieces_are_sampled_at_higher_temperatures(http):
    """A random model is never sure, so it ends at the highest."""
    whole = post(http, temperature="", response_format="verbose_json", seed="5").json()
    assert whole["segments"] == [] or {one["temperature"] for one in whole["segments"]} == {1.0}


def test_a_stream_has_the_text_in_order(http, llm):
    want = post(http, LONG).json()["text"]
    data = {**GREEDY, "stream": "true", "stream_include_usage": "true"}
    files = {"file": ("speech.wav", file_of(LONG))}
    events = []
    with http.stream("POST", "/v1/audio/transcriptions", files=files, data=data) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert {one["object"] for one in events} == {"transcription.chunk"}
    assert "".join(one["choices"][0]["delta"]["content"] for one in events).strip() == want.strip()
    assert events[-1]["usage"] == {"type": "duration", "seconds": math.ceil(len(LONG) / RATE)}


def test_the_openai_client(url, llm):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    want = text_of(llm, offline(llm, [SHORT]))
    create = client.audio.transcriptions.create
    file = ("speech.wav", file_of(SHORT))
    given = {"model": "tiny", "file": file, "temperature": 0.0, "language": "en"}
    assert create(**given).text == want
    assert create(**given, response_format="text") == want + "\n"
    verbose = create(**given, response_format="verbose_json", timestamp_granularities=["segment"])
    assert verbose.duration == pytest.approx(3.2)
    assert all(one.start <= one.end for one in verbose.segments)
    words = create(**given, response_format="verbose_json", timestamp_granularities=["word"]).words
    assert plain(one.word for one in words) == plain([verbose.text])
    events = list(create(**given, stream=True))
    assert "".join(one.delta for one in events if one.type == "transcript.text.delta") == want
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", want)
    translated = client.audio.translations.create(model="tiny", file=file, temperature=0.0)
    assert isinstance(translated.text, str)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"response_format": "xml"}, 400, "response_format"),
        ({"language": "tlh"}, 400, "language 'tlh' is none of de, en, fr, zh"),
        ({"stream": "true", "response_format": "srt"}, 400, "a stream has no segments"),
        ({"timestamp_granularities[]": "word"}, 400, "need response_format verbose_json, srt"),
        ({"timestamp_granularities[]": "line"}, 400, "timestamp_granularities"),
        ({"model": "other"}, 404, "no model 'other' here"),
        ({"temperature": "7"}, 400, "temperature"),
        ({"max_completion_tokens": "99"}, 400, "max_completion_tokens|maximum context"),
        ({"n": "2"}, 400, "needs use_beam_search"),
        ({"to_language": "de"}, 501, "to English"),
    ],
)
def test_fields_that_are_refused(http, fields, status, words):
    answer = post(http, **fields)
    assert answer.status_code == status, answer.text
    import re

    assert re.search(words, answer.json()["error"]["message"]), answer.text


def test_bodies_that_are_refused(http):
    def refused(status, words, **body):
        answer = http.post("/v1/audio/transcriptions", **body)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]

    refused(400, "multipart/form-data", json={"file": "x"})
    refused(400, "file is missing", files={"other": ("a", b"1")})
    refused(400, "cannot be decoded", files={"file": ("a.wav", b"nothing")})
    refused(400, "has no samples", files={"file": ("a.wav", file_of(np.zeros(0)))})
    refused(
        400, "longer than 120 seconds", files={"file": ("a.wav", file_of(np.zeros(121 * RATE)))}
    )
    refused(413, "at most 26214400 bytes", files={"file": ("a.wav", bytes((25 << 20) + 1))})
    head = {"content-type": "multipart/form-data; boundary=x"}
    refused(400, "does not end", content=b"--x\r\nabc", headers=head)
    head = {"content-type": "multipart/form-data"}
    refused(400, "no boundary", content=b"", headers=head)
    completion = http.post("/v1/completions", json={"prompt": "a"})
    assert completion.status_code == 400
    assert "reads audio" in completion.json()["error"]["message"]


def test_beams(http):
    answer = post(http, use_beam_search="true", n="2")
    assert answer.status_code == 200, answer.text
    assert post(http, use_beam_search="true", response_format="srt").status_code == 501


def test_a_client_that_gives_up_frees_the_worker_that_reads_its_recording(http, running):
    def workers():
        found = []
        for one in psutil.Process(running.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found += [one] * (one.name() == "quire-media")
        return found

    assert post(http).status_code == 200
    stopped = workers()
    for one in stopped:
        one.suspend()  # as a file does that takes minutes
    file = {"file": ("a.wav", file_of(SHORT))}
    head = {"X-Request-Timeout": "0.5"}
    answer = http.post("/v1/audio/transcriptions", files=file, data=GREEDY, headers=head)
    assert answer.status_code == 408, answer.text
    assert wait_until(lambda: len(set(workers()) & set(stopped)) < len(stopped))
    assert stopped
    for one in set(workers()) & set(stopped):
        one.resume()
    assert post(http).status_code == 200


def test_other_fields_are_named(http):
    answer = post(http, colour="red")
    assert answer.headers["X-Quire-Ignored"] == "colour"
