"""Texts to vectors: quire beside sentence-transformers and fastembed (onnxruntime), in turn.

usage: python bench/embed.py WORK_DIR [--model bge-small] [--cases uniform,short] [--rounds 3]
           [--engines quire,sentence-transformers,fastembed] [--peer-python PATH] [--http]

WORK_DIR keeps folders of the published shapes with random weights and a WordPiece tokenizer. Each
engine has a process of its own; in a round every engine embeds the same texts, one engine after the
other. Prints a JSON line for each engine and case: medians over the rounds, the ratio to quire in
the same round, and the smallest cosine to quire's vectors. `cpu_tok_s` is per second of processor
time, of all cores: it holds on a machine that others use.

--peer-python: the interpreter of an environment with sentence-transformers, fastembed and onnx.
--threads: of each engine. --http: also `quire serve` and closed-loop clients, each with one request
of --inputs texts under way. --dummy: quire alone, with weights that it makes up. --profile: a
trace of quire's last case, in ./quire_profile.

On one GPU:
    embed.py DIR --model qwen3-embedding-0.6b --dummy --cases gpu-short,gpu-512,gpu-8000,alone128
    embed.py DIR --model bert-base --dummy --cases gpu-512,gpu-short,alone128 --http \\
        --http-cases fixed512 --inputs 16 --clients 32
    embed.py DIR --model bert-base --dummy --engines "" --http --http-cases fixed50 --clients 256
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import time

SHAPES = {
    "bge-small": {"hidden_size": 384, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "intermediate_size": 3072},
    "qwen3-embedding-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "eos_token_id": 3,
        "bos_token_id": None,
    },
}
CASES = {
    "uniform": (256, 8, 512),
    "short": (512, 16, 64),
    "tiny": (512, 16, 16),
    "fixed512": (64, 512, 512),
    "alone16": (1, 16, 16),
    "alone128": (1, 128, 128),
    "fixed50": (512, 50, 50),
    "gpu-short": (2048, 16, 64),
    "gpu-512": (1024, 512, 512),
    "gpu-8000": (64, 8000, 8000),
}
"""Name -> texts, tokens of the shortest and the longest."""
SPECIALS = 2
"""Tokens that the tokenizer adds to a text."""
FEW_WORDS = 20_000
BATCH = 32
"""Of sentence-transformers: its default."""
ENGINES = ("quire", "sentence-transformers", "fastembed")


def words_of(vocab):
    return [f"w{i}" for i in range(min(vocab - 5, FEW_WORDS))]


def texts_of(name, round_number, count=None):
    """Texts of the case: each word is one token."""
    texts, low, high = CASES[name]
    rng = random.Random(f"{name}-{round_number}")
    words = words_of(30522)
    sizes = [rng.randint(low, high) - SPECIALS for _ in range(count or texts)]
    return [" ".join(rng.choices(words, k=size)) for size in sizes]


def tokens_of(texts):
    return sum(text.count(" ") + 1 + SPECIALS for text in texts)


# -- folders ----------------------------------------------------------------------------------


def write_tokenizer(folder, vocab, limit):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    pieces = [*names.values(), *words_of(vocab)]
    pieces += [f"[unused{i}]" for i in range(vocab - len(pieces))]
    ids = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {f"{name}_token": piece for name, piece in names.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": limit, **specials}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(specials))


def write_folder(folder, name, *, weights):
    """A sentence-transformers folder: BERT with CLS, Qwen3 with the last token; normalised."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    shape, qwen = SHAPES[name], "qwen3" in name
    if qwen:
        config = transformers.Qwen3Config(**shape)
    else:
        config = transformers.BertConfig(**shape)
    config.architectures = ["Qwen3ForCausalLM" if qwen else "BertModel"]
    config.dtype = "bfloat16" if qwen else "float32"
    if weights:
        torch.manual_seed(0)
        made = transformers.AutoModel.from_config(config, dtype=getattr(torch, config.dtype))
        made.save_pretrained(folder)
    config.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size, min(config.max_position_embeddings, 8192))
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (folder / module["path"]).mkdir(exist_ok=True)
    mode = "pooling_mode_lasttoken" if qwen else "pooling_mode_cls_token"
    pooling = {"word_embedding_dimension": shape["hidden_size"], mode: True}
    pooling |= {} if qwen else {"pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def export_onnx(folder):
    """Export a BERT to the folder's model.onnx, once."""
    import torch
    import transformers

    class Exported(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.AutoModel.from_pretrained(
                folder, attn_implementation="eager"
            ).eval()

        def forward(self, input_ids, attention_mask, token_type_ids):
            added = (1.0 - attention_mask[:, None, None].float()) * -1e9  # [batch, 1, 1, tokens]
            return self.model(input_ids, added, token_type_ids).last_hidden_state

    example = torch.ones(2, 16, dtype=torch.long)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        Exported(), (example, example, 0 * example), str(folder / "model.onnx"), dynamo=False,
        input_names=names, output_names=["last_hidden_state"], opset_version=17,
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in (*names, "last_hidden_state")},
    )  # fmt: skip


# -- an engine, in a process of its own -------------------------------------------------------


def quire_engine(folder, dummy):
    from quire import LLM

    made_up = {"load_format": "dummy"} if dummy else {}
    llm = LLM(str(folder), **made_up)

    def embed(texts):
        return [out.outputs.embedding for out in llm.embed(texts, use_tqdm=False)]

    embed.llm = llm
    return embed


def sentence_transformers_engine(folder, _):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder))
    return lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False)


def fastembed_engine(folder, _):
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    if not (folder / "model.onnx").exists():
        export_onnx(folder)
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    TextEmbedding.add_custom_model(
        model="bench", pooling=PoolingType.CLS, normalization=True, dim=size,
        sources=ModelSource(url="file://none"), model_file="model.onnx",
    )  # fmt: skip
    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or None
    model = TextEmbedding("bench", specific_model_path=str(folder), threads=threads)
    return lambda texts: list(model.embed(texts))


def serve_worker(engine, folder, dummy):
    """Read requests as JSON lines, answer with times. `ready` is sent first."""
    import numpy as np

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    embed = globals()[f"{engine.replace('-', '_')}_engine"](folder, dummy)
    print("ready", file=answers, flush=True)
    texts = []
    for line in sys.stdin:
        request = json.loads(line)
        if request == "profile":
            embed.llm.start_profile()
            embed(texts)
            embed.llm.stop_profile()
            print("{}", file=answers, flush=True)
            continue
        texts = texts_of(request["case"], request["round"], request["count"])
        began, cpu = time.perf_counter(), time.process_time()
        vectors = embed(texts)
        took = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        np.save(request["file"], np.asarray(vectors, dtype=np.float32))
        print(json.dumps(took), file=answers, flush=True)


class Worker:
    def __init__(self, engine, folder, python, dummy):
        began = time.perf_counter()
        command = [python, __file__, str(folder), "--worker", engine]
        self.process = subprocess.Popen(
            [*command, "--dummy"] if dummy else command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n", f"{engine} did not start"
        self.start_s = time.perf_counter() - began

    def embed(self, case, round_number, file, count=None):
        request = {"case": case, "round": round_number, "file": str(file), "count": count}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def profile(self):
        """Embed the last texts once more; the trace is in ./quire_profile."""
        print('"profile"', file=self.process.stdin, flush=True)
        self.process.stdout.readline()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(a, work):
    import numpy as np

    folder = work / a.model
    python = dict.fromkeys(ENGINES, a.peer_python) | {"quire": sys.executable}
    workers = {one: Worker(one, folder, python[one], a.dummy) for one in a.engines.split(",")}
    for engine, worker in workers.items():
        report(a, engine=engine, case="start", start_s=round(worker.start_s, 2))
    for case in a.cases.split(","):
        took = {engine: [] for engine in workers}
        cosines = dict.fromkeys(workers, 1.0)
        for number in range(-1, a.rounds):
            few = max(1, CASES[case][0] // 8) if number < 0 else None  # warm-up
            for engine, worker in workers.items():
                took[engine].append(
                    worker.embed(case, number, work / f"{engine}.npy", few)
                    | {"tokens": tokens_of(texts_of(case, number, few))}
                )
            vectors = {engine: np.load(work / f"{engine}.npy") for engine in workers}
            for engine, found in vectors.items():
                least = (found * vectors[next(iter(workers))]).sum(1).min()
                cosines[engine] = min(cosines[engine], float(least))
        for engine, rounds in took.items():
            rounds, first = rounds[1:], took[next(iter(workers))][1:]
            middle = statistics.median
            report(
                a, engine=engine, case=case, texts=CASES[case][0],
                tok_s=round(middle(one["tokens"] / one["s"] for one in rounds)),
                cpu_tok_s=round(middle(one["tokens"] / one["cpu_s"] for one in rounds)),
                ms=round(1e3 * middle(one["s"] for one in rounds), 2),
                over_first=round(middle(f["s"] / o["s"] for f, o in zip(first, rounds)), 3),
                cpu_over_first=round(
                    middle(f["cpu_s"] / o["cpu_s"] for f, o in zip(first, rounds)), 3
                ),
                least_cosine=round(cosines[engine], 6),
            )  # fmt: skip
    if a.profile:
        workers["quire"].profile()
    for worker in workers.values():
        worker.close()


# -- over HTTP --------------------------------------------------------------------------------


async def client(port, texts, inputs, times):
    """Send the texts over one connection, `inputs` of them a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at in range(0, len(texts), inputs):
        body = {"model": "bench", "input": texts[at : at + inputs], "encoding_format": "base64"}
        body = json.dumps(body).encode()
        head = "POST /v1/embeddings HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        began = time.perf_counter()
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(answer.split("content-length:")[1].split("\r\n")[0])
        found = json.loads(await reader.readexactly(size))
        assert len(found["data"]) == len(texts[at : at + inputs]), found
        times.append(time.perf_counter() - began)
    writer.close()


async def load(port, clients, inputs, texts):
    """Seconds of each request, and of all."""
    times = []
    began = time.perf_counter()
    shares = (texts[i::clients] for i in range(clients))
    await asyncio.gather(*(client(port, share, inputs, times) for share in shares))
    return times, time.perf_counter() - began


def over_http(a, folder):
    """A server and its clients, in a closed loop."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    began = time.perf_counter()
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", str(port)]
    command += ["--served-model-name", "bench", *(["--load-format", "dummy"] if a.dummy else [])]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                asyncio.run(load(port, 1, 1, ["w1 w2"]))
                break
            except (OSError, IndexError, KeyError, asyncio.IncompleteReadError):
                assert server.poll() is None, "the server has ended"
                time.sleep(0.05)
        report(a, engine="quire serve", case="first answer", start_s=time.perf_counter() - began)
        for case in a.http_cases.split(","):
            for clients in (1, a.clients):
                texts = texts_of(case, 0, clients * a.requests * a.inputs)
                asyncio.run(load(port, clients, a.inputs, texts[: len(texts) // 8]))
                times, took = asyncio.run(load(port, clients, a.inputs, texts))
                report(
                    a, engine="quire serve", case=case, clients=clients, inputs=a.inputs,
                    requests=len(times),
                    tok_s=round(tokens_of(texts) / took), req_s=round(len(times) / took, 1),
                    p50_ms=round(1e3 * statistics.median(times), 2),
                    p99_ms=round(1e3 * sorted(times)[int(0.99 * len(times))], 2),
                )  # fmt: skip
    finally:
        server.terminate()
        server.wait()


def report(a, **line):
    print(json.dumps({"model": a.model, **line}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--model", default="bge-small", choices=SHAPES)
    parser.add_argument("--cases", default="uniform,short")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--http-cases", default="tiny")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=1, help="texts of a request")
    parser.add_argument("--requests", type=int, default=64, help="of each client")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        return serve_worker(a.worker, a.work, a.dummy)
    if a.dummy:
        a.engines = "quire"
    if a.threads:
        os.environ["OMP_NUM_THREADS"] = str(a.threads)
    if not (a.work / a.model / "modules.json").exists():
        write_folder(a.work / a.model, a.model, weights=not a.dummy)
    if a.engines:
        compare(a, a.work)
    if a.http:
        over_http(a, a.work / a.model)


if __name__ == "__main__":
    main()
