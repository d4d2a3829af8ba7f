"""quire beside llama.cpp on the CPU: the same GGUF files, in turn, in one run.

usage: python bench/llama_cpp.py FOLDER --peer PYTHON [--formats Q8_0,Q4_0,Q4_K_M] [--rounds 3]
                                 [--cases cpu_decode1,cpu_decode8,cpu_prefill,...] [--threads 2]
                                 [--outs 64] [--processor]

PYTHON has llama-cpp-python: python -m venv V; V/bin/pip install --no-binary llama-cpp-python
llama-cpp-python. FOLDER has what make_models.py writes; files of Qwen3-0.6B's shape with random
weights are made there first: Q8_0 by `quire quantize`, the others of it by llama.cpp. Each engine
has one process, which is idle while the other runs a case. Both compute as many tokens of the same
lengths (see case_specs of offline.py); llama.cpp samples none, as in its own benchmark.

A line for each format and case: tokens/s of each engine's fastest round, their ratio, the ratios of
the rounds' pairs, and the goal. Load from other work takes from both, but not evenly: the fastest
rounds are nearest to what each can do. --processor: seconds of the processor instead, which with
--threads 1 means something on a busy machine; else it counts threads that wait for others.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SHAPE, VOCAB = "qwen3-0.6b", 100000
GOALS = {
    ("Q8_0", "cpu_decode1"): 1.4, ("Q4_0", "cpu_decode1"): 1.25, ("Q4_K_M", "cpu_decode1"): 1.4,
    **{(name, case): goal for name in ("Q8_0", "Q4_0", "Q4_K_M")
       for case, goal in (("cpu_prefill", 3.0), ("cpu_batch32", 2.2))},
}  # fmt: skip


def work_of(case, round_, most):
    """(prompts, tokens to generate for each: at most so many)."""
    sys.path.append(str(HERE))
    from offline import case_specs

    prompts, outs = case_specs(random.Random(f"{case}-{round_}"), VOCAB)[case]
    return prompts, [min(n, most) for n in outs]


class QuireEngine:
    def __init__(self, file, threads):
        from quire import LLM

        self.llm = LLM(file, max_model_len=2048)

    def run(self, prompts, outs):
        from quire import SamplingParams

        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in outs]
        found = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
        )
        assert sum(len(one.outputs[0].token_ids) for one in found) == sum(outs)


class LlamaEngine:
    """llama.cpp by its C functions: a context for each number of sequences, batches of 512."""

    def __init__(self, file, threads):
        sys.path[:] = [one for one in sys.path if Path(one) != HERE]  # this file has its name
        import llama_cpp

        self.c = llama_cpp
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), settings)
        self.threads, self.made = threads, {}

    def context(self, sequences, tokens):
        """An empty context, which is kept for the next round."""
        if (sequences, tokens) not in self.made:
            self.made[sequences, tokens] = self.new_context(sequences, tokens)
        found = self.made[sequences, tokens]
        self.c.llama_memory_clear(self.c.llama_get_memory(found), True)
        return found

    def new_context(self, sequences, tokens):
        settings = self.c.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = sequences * tokens, sequences
        settings.n_batch = settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = self.threads
        return self.c.llama_init_from_model(self.model, settings)

    def run(self, prompts, outs):
        length = len(prompts[0]) + outs[0]
        context = self.context(len(prompts), -(-length // 256) * 256)
        batch = self.c.llama_batch_init(512, 0, 1)
        pending = []  # (token, position, sequence, whether its logits are wanted)
        for s, prompt in enumerate(prompts):
            pending += [(t, p, s, p + 1 == len(prompt)) for p, t in enumerate(prompt)]
        for step in range(outs[0]):  # one token of each sequence comes from every turn
            for at in range(0, len(pending), 512):
                self.decode(context, batch, pending[at : at + 512])
            place = len(prompts[0]) + step
            pending = [(1000 + step, place, s, True) for s in range(len(prompts))]
        self.c.llama_batch_free(batch)

    def decode(self, context, batch, part):
        batch.n_tokens = len(part)
        for i, (token, place, sequence, wanted) in enumerate(part):
            batch.token[i], batch.pos[i] = token, place
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        assert self.c.llama_decode(context, batch) == 0


def child(engine, file, threads):
    """Run the cases that lines of stdin name; print the seconds of each, by clock and processor."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    body = {"quire": QuireEngine, "llama.cpp": LlamaEngine}[engine](file, threads)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        case, round_, most = line.split()
        prompts, outs = work_of(case, round_, int(most))
        if round_ == "warm":
            outs = [min(outs[0], 2)] * len(prompts)
        wall, processor = time.perf_counter(), time.process_time()
        body.run(prompts, outs)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(wall, processor, file=answers, flush=True)


class Engine:
    """A child process with one model."""

    def __init__(self, python, engine, file, threads, log):
        command = [python, __file__, str(file), "--child", engine, "--threads", str(threads)]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        if engine != "quire":
            env.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=log, text=True, env=env)  # fmt: skip
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("an engine has ended: see its log")
        return line.strip()

    def seconds(self, case, round_, a):
        print(case, round_, a.outs, file=self.process.stdin, flush=True)
        return float(self.answer().split()[1 if a.processor else 0])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def make_file(folder, name, peer):
    """A GGUF file of random weights; made once."""
    made = folder / f"{SHAPE}-{name}"
    found = sorted(made.glob("*.gguf"))
    if found:
        return found[0]
    if name != "Q8_0":
        made.mkdir(exist_ok=True)
        file = made / f"{name}.gguf"
        command = [peer, "-c", REQUANTIZE, make_file(folder, "Q8_0", peer), file, FILE_TYPES[name]]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
        return file
    plain = folder / f"{SHAPE}-random"
    if not (plain / "model.safetensors").exists():
        write_random(folder / SHAPE, plain)
    command = [sys.executable, "-m", "quire", "quantize", str(plain), str(made), "--to", name]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return next(made.glob("*.gguf"))


FILE_TYPES = {"Q4_0": 2, "Q4_K_M": 15}
REQUANTIZE = """
import sys, llama_cpp
source, to, kind = sys.argv[1:]
how = llama_cpp.llama_model_quantize_default_params()
how.ftype, how.allow_requantize = int(kind), True
assert llama_cpp.llama_model_quantize(source.encode(), to.encode(), how) == 0
"""


def write_random(source, to):
    import torch
    from safetensors.torch import save_file

    c = json.loads((source / "config.json").read_text())
    e, f, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, k = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    torch.manual_seed(0)

    def matrix(outputs, inputs):
        return (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(c["vocab_size"], e),
               "model.norm.weight": torch.ones(e).bfloat16()}  # fmt: skip
    for i in range(c["num_hidden_layers"]):
        made = {
            "self_attn.q_proj": matrix(q, e), "self_attn.k_proj": matrix(k, e),
            "self_attn.v_proj": matrix(k, e), "self_attn.o_proj": matrix(e, q),
            "mlp.gate_proj": matrix(f, e), "mlp.up_proj": matrix(f, e), "mlp.down_proj": matrix(e, f),
        }  # fmt: skip
        sizes = {"self_attn.q_norm": d, "self_attn.k_norm": d,
                 "input_layernorm": e, "post_attention_layernorm": e}  # fmt: skip
        made |= {name: torch.ones(size).bfloat16() for name, size in sizes.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": one for name, one in made.items()}
    to.mkdir(exist_ok=True)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    for file in source.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    write_bpe(to / "tokenizer.json")


def write_bpe(path):
    """Make a word-level tokenizer one of bytes with one merge: GGUF files have no words."""
    from quire.quantize.gguf_metadata import PATTERNS

    found = json.loads(path.read_text())
    short = {token: i for token, i in found["model"]["vocab"].items() if i < 258}
    regex = next(regex for regex, name in PATTERNS.items() if name == "qwen2")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
             "use_regex": False}  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    found["model"] = {"type": "BPE", "vocab": short | {"ab": 258}, "merges": ["a b"]}
    path.write_text(json.dumps(found))


def compare(a, name, report):
    file = make_file(a.folder, name, a.peer)
    log = (a.folder / "llama_cpp.log").open("ab")
    engines = {engine: Engine(python, engine, file, a.threads, log)
               for engine, python in (("quire", sys.executable), ("llama.cpp", a.peer))}  # fmt: skip
    for case in a.cases.split(","):
        times = {engine: [] for engine in engines}
        for engine in engines.values():  # kernels, contexts and tapes are made
            engine.seconds(case, "warm", a)
        for round_ in range(1 if case == "cpu_batch32" else a.rounds):
            for engine, process in engines.items():
                time.sleep(0.3)  # threads of the other may still wait for work
                times[engine].append(process.seconds(case, round_, a))
        prompts, outs = work_of(case, 0, a.outs)
        tokens = sum(map(len, prompts)) if case == "cpu_prefill" else sum(outs)
        rates = {engine: tokens / min(found) for engine, found in times.items()}
        ratio = rates["quire"] / rates["llama.cpp"]
        pairs = [theirs / ours for ours, theirs in zip(*times.values(), strict=True)]
        goal = GOALS.get((name, case))
        report({"format": name, "case": case, "bytes": file.stat().st_size,
                "threads": a.threads, "seconds": "processor" if a.processor else "wall",
                "tok_s": {engine: round(rate, 1) for engine, rate in rates.items()},
                "ratio": round(ratio, 2), "ratios of pairs": [round(one, 2) for one in pairs],
                "goal": goal, "met": None if goal is None else ratio >= goal})  # fmt: skip
    for engine in engines.values():
        engine.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--formats", default="Q8_0,Q4_0,Q4_K_M")
    parser.add_argument("--cases", default="cpu_decode1,cpu_prefill,cpu_batch32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--outs", type=int, default=64)
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--child")
    a = parser.parse_args()
    if a.child:
        child(a.child, str(a.folder), a.threads)
        return
    load = os.getloadavg()[0]
    for name in a.formats.split(","):
        compare(
            a, name, lambda line: print(json.dumps({"load": round(load, 1)} | line), flush=True)
        )


if __name__ == "__main__":
    main()
