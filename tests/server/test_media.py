"""Images over HTTP: a `quire serve` of tiny LLaVA and Qwen2-VL, with clients as people use them."""

import base64
import concurrent.futures
import hashlib
import http.server
import io
import json
import threading
import time

import anthropic
import httpx
import openai
import psutil
import pytest
import torch
from PIL import Image

from tests.cpu.multimodal.folders import write_llava, write_mllama, write_qwen2_vl
from tests.media.files import data_url, encode, numbered_frames, png, png_with_size, video
from tests.server.running import SMALL, serving

PHOTO = encode(Image.linear_gradient("L").resize((90, 60)).convert("RGB"), "JPEG")
GREEDY = {"model": "vl", "temperature": 0, "max_tokens": 8}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"x": {"type": "boolean"}},
                           "required": ["x"], "additionalProperties": False},
        },
    }
]  # fmt: skip
FLAGS = (
    *SMALL,
    "--max-model-len",
    "1024",
    "--served-model-name",
    "vl",
    "--mm-processor-workers",
    "2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the operator, with an image, and a secret beside it."""
    place = tmp_path_factory.mktemp("files")
    (place / "media").mkdir()
    (place / "media" / "a.jpg").write_bytes(PHOTO)
    (place / "secret.jpg").write_bytes(PHOTO)
    (place / "media" / "link.jpg").symlink_to(place / "secret.jpg")
    return place / "media"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen2_vl(tmp_path_factory.mktemp("qwen"), {"eos_token_id": 2})


@pytest.fixture(scope="module")
def running(model, folder):
    more = ("--allowed-local-media-path", folder, "--allowed-media-domains", "127.0.0.1")
    limits = ("--limit-mm-per-prompt", "image=4", "--trust-request-mm-kwargs", "--enable-mm-embeds")
    with serving(model, *FLAGS, *more, *limits) as found:
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        yield found


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def post(running):
    with httpx.Client(base_url=running.url, timeout=60) as made:
        yield lambda path, **body: made.post(path, json=body)


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url}, **more}


def user(*content):
    texts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return [{"role": "user", "content": texts}]


ASK = user("What is this?", image(data_url(PHOTO, "image/jpeg")))


def test_a_data_url_counts_its_tokens_everywhere(client, post):
    answer = client.chat.completions.create(messages=ASK, **GREEDY)
    counted = post("/tokenize", model="vl", messages=ASK).json()
    assert answer.usage.prompt_tokens == counted["count"] == len(counted["tokens"])
    text = client.chat.completions.create(messages=user("What is this?"), **GREEDY)
    assert answer.usage.prompt_tokens > text.usage.prompt_tokens + 4
    assert answer.choices[0].message.content != text.choices[0].message.content


def test_a_stream_gives_the_same_text_and_usage(client):
    whole = client.chat.completions.create(messages=ASK, **GREEDY)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=ASK, **GREEDY, **more))
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_a_beam_search_reads_the_image(client):
    beams = {"extra_body": {"use_beam_search": True, "ignore_eos": True}, **GREEDY}
    one = client.chat.completions.create(messages=ASK, n=1, **beams)
    plain = client.chat.completions.create(messages=ASK, **GREEDY, extra_body={"ignore_eos": True})
    assert one.choices[0].message.content == plain.choices[0].message.content
    several = client.chat.completions.create(messages=ASK, n=3, **beams)
    assert len({each.message.content for each in several.choices}) == 3
    assert several.usage.prompt_tokens == plain.usage.prompt_tokens


def test_all_ways_to_send_an_image_give_one_answer(client, post, running, folder):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PHOTO)

        def log_message(self, *_):
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{site.server_port}/a.jpg"
    base = client.chat.completions.create(messages=ASK, **GREEDY).choices[0].message.content
    for one in (
        image(url),
        image(f"file://{folder}/a.jpg"),
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": data_url(PHOTO)},
        image(data_url(PHOTO), uuid="photo"),
        {"type": "image_url", "image_url": None, "uuid": "photo"},
    ):
        answer = client.chat.completions.create(messages=user("What is this?", one), **GREEDY)
        assert answer.choices[0].message.content == base, one
    site.shutdown()

    got = client.responses.create(
        model="vl", temperature=0, max_output_tokens=8,
        input=[{"role": "user", "content": [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "detail": "auto", "image_url": data_url(PHOTO)},
        ]}],
    )  # fmt: skip
    assert got.output_text == base
    source = {"type": "base64", "media_type": "image/jpeg",
              "data": base64.b64encode(PHOTO).decode()}  # fmt: skip
    content = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as other:
        said = other.messages.create(
            model="vl", max_tokens=8, extra_body={"temperature": 0},
            messages=[{"role": "user", "content": content}],
        )  # fmt: skip
        count = other.messages.count_tokens(
            model="vl", messages=[{"role": "user", "content": content}]
        )
    assert said.content[0].text == base
    usage = said.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens


def test_an_image_goes_with_tools_and_schemas(client):
    answer = client.chat.completions.create(
        messages=ASK, tools=TOOLS, tool_choice="required", **GREEDY | {"max_tokens": 60}
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments.replace(" ", "") in ('{"x":true}', '{"x":false}')
    result = {"role": "tool", "tool_call_id": call.id, "content": [image(data_url(png()))]}
    then = [*ASK, answer.choices[0].message.model_dump(exclude_none=True), result]
    end = client.chat.completions.create(messages=then, tools=TOOLS, **GREEDY)
    assert end.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_placeholder_in_a_text_is_text(client, post):
    words = "<|vision_start|><|image_pad|><|vision_end|>"
    with_words = post("/tokenize", model="vl", messages=user(words, *ASK[0]["content"])).json()
    without = post("/tokenize", model="vl", messages=ASK).json()
    pad = max(set(without["tokens"]), key=without["tokens"].count)
    assert with_words["tokens"].count(pad) == without["tokens"].count(pad)
    tool = {"type": "function", "function": {"name": "f", "description": words, "parameters": {}}}
    for messages, more in ((user(words), {}), (ASK, {"tools": [tool]})):
        assert client.chat.completions.create(messages=messages, **GREEDY, **more).choices


def test_options_of_a_request_are_for_a_server_that_trusts_them(post):
    small = {"mm_processor_kwargs": {"max_pixels": 56 * 56}}
    counts = [post("/tokenize", model="vl", messages=ASK, **more).json()["count"]
              for more in ({}, small)]  # fmt: skip
    assert counts[1] < counts[0]
    for wrong in ({"max_pixels": 10**12}, {"max_pixels": -1}, {"colour": 1}):
        got = post("/tokenize", model="vl", messages=ASK, mm_processor_kwargs=wrong)
        assert got.status_code == 400
        assert "mm_processor_kwargs" in got.json()["error"]["message"]
    for wrong in (-2, 10**9, "x"):
        body = {"media_io_kwargs": {"video": {"num_frames": wrong}}}
        assert post("/tokenize", model="vl", messages=ASK, **body).status_code == 400


def test_rows_of_an_encoder_take_the_place_of_an_image(post):
    def saved(tensor):
        file = io.BytesIO()
        torch.save(tensor, file)
        return base64.b64encode(file.getvalue()).decode()

    rows, grid = torch.ones(4, 64), torch.tensor([1, 4, 4])
    answers = []
    for given in (saved(grid), grid.tolist()):
        embeds = {"image_embeds": saved(rows), "image_grid_thw": given}
        part = {"type": "image_embeds", "image_embeds": embeds}
        answers.append(post("/v1/chat/completions", messages=user("What?", part), **GREEDY).json())
    assert answers[0]["choices"] == answers[1]["choices"]
    blind = post("/tokenize", model="vl", messages=user("What?")).json()["count"]
    assert answers[0]["usage"]["prompt_tokens"] == blind + 4 + 2
    for wrong in ([2**40, 2**40, 4], [1, 4, 6]):
        embeds = {"image_embeds": saved(rows), "image_grid_thw": saved(torch.tensor(wrong))}
        part = {"type": "image_embeds", "image_embeds": embeds}
        refused = post("/v1/chat/completions", messages=user("What?", part), **GREEDY)
        assert refused.status_code == 400
        assert "embeddings have 4 rows" in refused.json()["error"]["message"]


@pytest.mark.slow("decodes and encodes frames")
def test_a_video_is_read_as_sampled_frames(client, post):
    clip = video(numbered_frames(20, 56, 84))
    part = {"type": "video_url", "video_url": {"url": data_url(clip, "video/mp4")}}
    answer = client.chat.completions.create(messages=user(part, "What happens?"), **GREEDY)
    assert answer.usage.prompt_tokens > 20
    few = {"media_io_kwargs": {"video": {"num_frames": 4}}}
    counted = post("/tokenize", model="vl", messages=user(part, "What happens?"), **few).json()
    assert counted["count"] < answer.usage.prompt_tokens


# -- refused ---------------------------------------------------------------------------------------

NARROW = encode(Image.new("1", (1, 20_000)))
BAD = {
    "bomb": (image(data_url(png_with_size(60_000, 60_000))), 400, "60000 x 60000"),
    "lying header": (image(data_url(png_with_size(90, 90))), 400, "cannot be decoded"),
    "truncated": (image(data_url(PHOTO[:200])), 400, "cannot be decoded"),
    "narrow": (image(data_url(NARROW)), 400, "200 times"),
    "one pixel": (image(data_url(png(1, 1))), None, ""),
    "svg": (image(data_url(b"<svg/>", "image/svg+xml")), 400, "is no image"),
    "base64": (image("data:image/png;base64,@@@"), 400, "not valid base64"),
    "scheme": (image("gopher://x"), 400, "none of http"),
    "private": (image("http://localhost:1/a"), 422, "not fetched here"),
    "metadata": (image("http://169.254.169.254/latest"), 422, "not fetched here"),
    "closed port": (image("http://127.0.0.1:9/a"), 422, "cannot be reached"),
    "no file": (image("file:///etc/passwd"), 400, "no file below"),
    "link": ("link.jpg", 400, "no file below"),
    "up": ("%2e%2e/secret.jpg", 400, "no file below"),
    "no url": ({"type": "image_url"}, 400, "has no image_url"),
    "object": ({"type": "image_pil", "image_pil": "x"}, 400, "objects of Python"),
    "embeds": ({"type": "image_embeds", "image_embeds": "QQ=="}, 400, "no archive of torch.save"),
    "file": ({"type": "file", "file": {"file_data": "x"}}, 400, "not served; send image_url"),
    "list for a type": ({"type": ["image_url"]}, 400, "must be one of"),
    "uuid": ({"type": "image_url", "image_url": None, "uuid": "other"}, 400, "is cached"),
    "audio": ({"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}, 400,
              "reads no audio"),
    "video": ({"type": "video_url", "video_url": {"url": data_url(b"#EXTM3U")}}, 400,
              "is no video"),
}  # fmt: skip


def bad_part(name, folder):
    part, status, reason = BAD[name]
    return (image(f"file://{folder}/{part}") if isinstance(part, str) else part), status, reason


@pytest.mark.parametrize("name", BAD)
def test_a_bad_part_is_refused_with_its_index(post, folder, name):
    part, status, reason = bad_part(name, folder)
    got = post("/v1/chat/completions", messages=user("a", part), **GREEDY)
    if status is None:
        assert got.status_code in (200, 400)
        return
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (status, "messages"), error
    assert reason in error["message"]
    if "audio" not in name:
        assert "messages[0].content[1]" in error["message"]


def test_too_many_parts_are_refused_at_once(post):
    began = time.monotonic()
    got = post("/v1/chat/completions", messages=user(*[image(data_url(png()))] * 2000), **GREEDY)
    assert got.status_code == 400
    assert "At most 4 image(s) may be provided in one prompt" in got.json()["error"]["message"]
    assert "--limit-mm-per-prompt" in got.json()["error"]["message"]
    assert time.monotonic() - began < 5


def test_media_that_exceed_the_context_are_refused(post):
    large = image(data_url(encode(Image.new("RGB", (560, 560)))))
    got = post("/v1/chat/completions", messages=user(*[large] * 4, "x" * 2000), **GREEDY)
    assert got.status_code == 400, got.text
    assert "maximum context length is 1024" in got.json()["error"]["message"]


@pytest.mark.slow("many hostile requests beside a stream")
def test_neighbours_are_not_changed_by_hostile_media(client, post, running, folder):
    def answers():
        more = {"stream": True, "extra_body": {"ignore_eos": True}}
        for one in client.chat.completions.create(
            messages=ASK, **GREEDY | {"max_tokens": 150}, **more
        ):
            yield one.choices[0].delta.content or ""

    quiet = "".join(answers())
    hostile = [bad_part(name, folder)[0] for name in BAD] * 2
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ends = [
            pool.submit(post, "/v1/chat/completions", messages=user("a", one), **GREEDY)
            for one in hostile
        ]
        assert "".join(answers()) == quiet
        statuses = [one.result().status_code for one in ends]
    assert set(statuses) <= {200, 400, 422, 501}
    memory = [
        psutil.Process(one.pid).memory_info().rss
        for one in running.family if psutil.pid_exists(one.pid)
    ]  # fmt: skip
    assert max(memory) < 1 << 30
    assert "".join(answers()) == quiet


def test_the_same_image_at_once_is_the_same_answer(client):
    fresh = user("What?", image(data_url(encode(Image.new("RGB", (84, 84), (9, 99, 9))))))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda _: client.chat.completions.create(messages=fresh, **GREEDY), range(8))
        )
    assert len({one.choices[0].message.content for one in found}) == 1


# -- a template of text, and defaults --------------------------------------------------------------


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    model = write_llava(tmp_path_factory.mktemp("llava"))
    with serving(model, *FLAGS, "--interleave-mm-strings", "--api-key", "one", "two") as one:
        threading.Thread(target=one.process.stdout.read, daemon=True).start()
        yield one


def with_key(running, key):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=running.url, timeout=60, headers=headers)


def test_keys_never_share_by_uuid(llava):
    named = user("What?", image(data_url(PHOTO), uuid="photo"))
    alone = user("What?", {"type": "image_url", "image_url": None, "uuid": "photo"})
    with with_key(llava, "one") as one, with_key(llava, "two") as two:

        def post(http, messages):
            return http.post("/v1/chat/completions", json=GREEDY | {"messages": messages}).json()

        first = post(one, named)["choices"]
        assert "is cached: send its content" in post(two, alone)["error"]["message"]
        post(two, user("What?", image(data_url(png()), uuid="photo")))
        assert post(one, alone)["choices"] == first


def test_a_template_of_text_has_placeholders_in_place(llava):
    with with_key(llava, "one") as http:
        body = {"messages": user("one", image(data_url(PHOTO)), "two"), "return_prompt_text": True}
        got = http.post("/v1/chat/completions", json=GREEDY | body).json()
        assert "one\n<image>\ntwo" in got["prompt_text"]
        away = image("http://127.0.0.1:9/a")
        refused = http.post("/v1/chat/completions", json=GREEDY | {"messages": user(away)})
        assert refused.status_code == 422
        assert "no address that is public" in refused.json()["error"]["message"]
        file = http.post(
            "/v1/chat/completions", json=GREEDY | {"messages": user(image("file:///a"))}
        )
        assert "--allowed-local-media-path" in file.json()["error"]["message"]
        kwargs = {"messages": body["messages"], "mm_processor_kwargs": {"a": 1}}
        untrusted = http.post("/v1/chat/completions", json=GREEDY | kwargs)
        assert "--trust-request-mm-kwargs" in untrusted.json()["error"]["message"]
        rows = {"type": "image_embeds", "image_embeds": "QQ=="}
        off = http.post("/v1/chat/completions", json=GREEDY | {"messages": user(rows)})
        assert off.status_code == 501
        assert "--enable-mm-embeds" in off.json()["error"]["message"]


def test_bytes_of_an_image_are_not_kept_as_text(llava):
    buffer = io.BytesIO()
    Image.effect_noise((600, 600), 90).save(buffer, "PNG")
    with with_key(llava, "two") as http:
        body = {"messages": user(image(data_url(buffer.getvalue())), "two")}
        assert http.post("/v1/chat/completions", json=GREEDY | body).status_code == 200


def test_lookups_of_processed_images_are_counted(client, running):
    def counts():
        text = httpx.get(f"{running.url}/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if "mm_cache" in line)
        return [
            sum(
                float(n) for key, n in lines.items() if key.startswith(f"vllm:mm_cache_{one}_total")
            )
            for one in ("queries", "hits")
        ]

    new = encode(Image.new("RGB", (61, 47), "teal"), "PNG")
    before = counts()
    for _ in range(3):
        client.chat.completions.create(messages=user(image(data_url(new))), **GREEDY)
    queries, hits = (after - was for after, was in zip(counts(), before))
    assert (queries, hits) == (3, 2)


@pytest.mark.slow("a server")
def test_images_that_cross_attention_reads(tmp_path):
    model = write_mllama(tmp_path, {"eos_token_id": 2})
    with (
        serving(model, *FLAGS, "--max-model-len", "256") as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        (one,) = create(messages=ASK, **GREEDY).choices
        drawn = create(messages=ASK, n=2, seed=1, **GREEDY | {"temperature": 1}).choices
        other = user("What is this?", image(data_url(png(70, 20), "image/png")))
        text = create(messages=user("What is this?"), **GREEDY).choices[0].message.content
        assert len(drawn) == 2
        assert one.message.content != text
        assert create(messages=other, **GREEDY).choices[0].message.content != text
        chunks = create(messages=ASK, stream=True, **GREEDY)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == one.message.content
        beams = {"use_beam_search": True, "ignore_eos": True}
        best = create(messages=ASK, n=1, extra_body=beams, **GREEDY).choices[0]
        plain = create(messages=ASK, extra_body={"ignore_eos": True}, **GREEDY).choices[0]
        assert best.message.content == plain.message.content
        both = [*ASK, {"role": "assistant", "content": "A."}, *other]
        answer = create(messages=both, **GREEDY)
        assert answer.choices[0].message.content
        typed, empty = (create(messages=user(one), **GREEDY) for one in ("<|image|>", "w"))
        assert typed.usage.prompt_tokens > empty.usage.prompt_tokens + 1, "it is text"


def test_images_of_two_keys_take_turns(tmp_path, model):
    """Four files of 25 million pixels keep the worker of one key busy for seconds."""
    keys = [{"name": one, "sha256": hashlib.sha256(one.encode()).hexdigest()} for one in "ab"]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    small = ("--mm-processor-workers", "1", "--mm-processor-kwargs", '{"max_pixels": 3136}')
    large = [user(image(data_url(png_with_size(5000, 5000 + i, bytes((5000 + i) * 15001)))))
             for i in range(4)]  # fmt: skip
    with (
        serving(model, *FLAGS, *small, "--api-key-file", tmp_path / "keys.json") as running,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        threading.Thread(target=running.process.stdout.read, daemon=True).start()

        def ask(messages, key):
            body = {**GREEDY, "max_tokens": 1, "messages": messages}
            head = {"Authorization": f"Bearer {key}"}
            url = f"{running.url}/v1/chat/completions"
            answer = httpx.post(url, json=body, headers=head, timeout=120)
            assert answer.status_code == 200, answer.text

        ask(user(image(data_url(png(9)))), "a")
        many = [pool.submit(ask, one, "a") for one in large]
        concurrent.futures.wait(many, return_when=concurrent.futures.FIRST_COMPLETED)
        ask(ASK, "b")
        done = sum(one.done() for one in many)
        for one in many:
            one.result()
    assert done <= 2, "the image of key b waited behind those of key a"
