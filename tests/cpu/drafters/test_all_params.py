"""Answers of LLM with each method are those without, over all of SamplingParams, in float32.

Requests are drawn at random and answered by an engine without speculation; tokens, text, logprobs
(to the bit), prompt logprobs and ends must be the same with each method, on each path of the
engine. Drafts of heads with random weights are hardly accepted, so most of the proposals of models
are replaced by the answer, with errors.
"""

import json
import random
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.core.params import UNIMPLEMENTED_FIELDS, BeamSearchParams, LoRARequest
from quire.core.types import ThinkingBudget
from tests import tiers
from tests.cpu.drafters import heads
from tests.cpu.drafters.heads import E, drawn, layer_tensors, write
from tests.cpu.drafters.test_eagle3 import DRAFT_VOCAB, PLAIN, head_tensors
from tests.cpu.drafters.test_mtp import MIMO
from tests.cpu.lora_folders import write_adapter
from tests.cpu.same_bits import needs_same_bits
from tests.cpu.tiny_models import write_model

pytestmark = [needs_same_bits, pytest.mark.sampled(4)]

METHODS = ("ngram", "suffix", "prediction", "draft_model", "eagle", "eagle3", "medusa", "mtp")
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 192,
    "max_logprobs": -1,
    "num_gpu_blocks_override": 400,
}
PATHS = {
    "together": {},
    "one in flight": {"steps_in_flight": 1, "enforce_eager": True},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 6},
    "priorities": {"scheduling_policy": "priority", "max_num_seqs": 5},
    "preempted": {"num_gpu_blocks_override": 44, "block_size": 8},
    "swapped": {"num_gpu_blocks_override": 44, "block_size": 8, "preemption_mode": "swap"},
    "offloaded": {"num_gpu_blocks_override": 44, "block_size": 8, "kv_offloading_size": 0.01},
}
HYBRID_METHODS = ("prediction", "mtp", "suffix", "eagle", "ngram", "draft_model", "medusa")
HYBRID_PATHS = {name: PATHS[name] for name in ("together", "preempted", "small chunks")}
"""Of a model with recurrent layers, whose states cannot be swapped."""
REQUESTS = tiers.amount(14, 24)
NOT_DRAWN = {
    *("prediction", "speculative", "thinking_token_budget"),  # drawn apart from the others
    *("output_kind", "stream_interval", "skip_clone", "extra_args"),  # no token depends on them
    *("guided_decoding", "bad_words_token_ids"),  # become other fields
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with their adapters, and drafters by method."""
    root = tmp_path_factory.mktemp("all_params")
    target = write_model(root / "target", "llama", num_hidden_layers=4)
    mimo = write_model(root / "mimo", "qwen2", num_hidden_layers=4)
    adapters = [write_adapter(one, root / f"lora of {one.name}") for one in (target, mimo)]
    add_mtp_layer(mimo)
    hybrid = write_model(root / "hybrid", "qwen3_5_text", num_hidden_layers=4)
    add_hybrid_mtp_layer(hybrid)
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    return {
        "target": (target, adapters[0]),
        "mimo": (mimo, adapters[1]),
        "hybrid": (hybrid, None),
        "draft_model": write_model(root / "small", "llama"),
        **write_heads(root, vocab),
    }


def write_heads(root, vocab):
    hf = {**heads.TARGET, "vocab_size": vocab, "num_hidden_layers": 1}
    draw = drawn(6)
    eagle = {**layer_tensors(draw, "layers.0."), "fc.weight": draw(E, 2 * E)}
    eagle3 = head_tensors("midlayer.")
    ids = eagle3["d2t"] + torch.arange(DRAFT_VOCAB)
    eagle3["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    medusa = {f"lm_heads.{i}.weight": draw(vocab, E) for i in range(3)}
    for i in range(3):
        medusa |= {f"blocks.{i}.layers.0.weight": draw(E, E), f"blocks.{i}.layers.0.bias": draw(E)}
    shapes = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    eagle_hf = {**hf, "architectures": ["EagleLlamaForCausalLM"]}
    return {
        "eagle": write(root / "eagle", eagle_hf, eagle),
        "eagle3": write(root / "eagle3", {**PLAIN, "vocab_size": vocab}, eagle3),
        "medusa": write(root / "medusa", shapes, medusa),
    }


def add_mtp_layer(folder):
    """Make a checkpoint of MiMo of one of Qwen 2."""
    path, draw, at = folder / "model.safetensors", drawn(4), "model.mtp_layers.0."
    tensors = load_file(path)
    first = [name for name in tensors if name.startswith("model.layers.0.")]
    tensors |= {one.replace("model.layers.0.", at): tensors[one].clone() for one in first}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}{MIMO[name]}.weight"] = draw(E, around=1.0)
    tensors[f"{at}{MIMO['eh_proj']}.weight"] = draw(E, 2 * E)
    save_file(tensors, path)
    hf = json.loads((folder / "config.json").read_text())
    hf |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    hf["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(hf))


def add_hybrid_mtp_layer(folder):
    """Add the layer that predicts further tokens to a checkpoint of Qwen3.5."""
    path, draw = folder / "model.safetensors", drawn(4)
    tensors = load_file(path)
    own = [name for name in tensors if name.startswith("model.layers.1.")]
    tensors |= {
        one.replace("model.layers.1.", "mtp.layers.0."): tensors[one].clone() for one in own
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = draw(E)
    tensors["mtp.fc.weight"] = draw(E, 2 * E)
    save_file(tensors, path)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"mtp_num_hidden_layers": 1}))


# -- requests ---------------------------------------------------------------------------------


def shifts(outputs, logits):
    """A custom processor that depends on all outputs."""
    logits[(sum(outputs) + 3) % len(logits)] += 4.0
    return logits


FORMS = (
    {"choice": ["Rome", "Paris", "the capital"]},
    {"regex": r"(ab?c |[0-9]{2,5} ){3,9}"},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"json_object": True},
)


def draw_params(rng):
    """Return keywords of SamplingParams over all of its fields."""

    def maybe(chance, **values):
        return values if rng.random() < chance else {}

    longest = rng.choice([1, 7, 30, 60])
    made = {"temperature": rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.5, 2.0]), "max_tokens": longest}
    made["seed"] = rng.randrange(2**40)
    if made["temperature"]:
        made |= {"n": rng.choice([1, 1, 1, 3])} | maybe(0.1, best_of=4)
        made |= maybe(0.3, top_p=rng.choice([0.2, 0.8])) | maybe(0.3, top_k=rng.choice([1, 5, 40]))
        made |= maybe(0.3, min_p=rng.choice([0.02, 0.3]))
    made |= maybe(0.3, repetition_penalty=rng.choice([0.7, 1.4]))
    made |= maybe(0.2, frequency_penalty=rng.choice([-0.5, 0.9]))
    made |= maybe(0.2, presence_penalty=rng.choice([-0.5, 0.9]))
    made |= maybe(0.2, logit_bias={rng.randrange(300): rng.choice([-9.0, 4.0]) for _ in range(9)})
    made |= maybe(0.2, bad_words=rng.sample(["a", "the", "is", "e", "Paris", "is not"], 3))
    made |= maybe(0.2, min_tokens=rng.randrange(1, longest + 1))
    made |= maybe(0.2, stop_token_ids=rng.sample(range(260), 8))
    made |= maybe(0.3, stop=rng.sample(["e", "th", " is", "x", "Qu", "z"], 2))
    made |= maybe(0.2, include_stop_str_in_output=True) | maybe(0.5, ignore_eos=True)
    made |= maybe(0.4, logprobs=rng.choice([0, 1, 5, -1])) | maybe(0.1, flat_logprobs=True)
    if "logprobs" not in made:
        made |= maybe(0.1, logprob_token_ids=[3, 90, 41])
    made |= maybe(0.1, prompt_logprobs=rng.choice([0, 2])) | maybe(0.1, skip_special_tokens=False)
    made |= maybe(0.1, spaces_between_special_tokens=False)
    made |= maybe(0.1, skip_reading_prefix_cache=True) | maybe(0.1, truncate_prompt_tokens=24)
    if longest >= 30 and rng.random() < 0.2:
        made["structured_outputs"] = rng.choice(FORMS)
    else:
        made |= maybe(0.1, allowed_token_ids=[*range(rng.choice([9, 70]), 200)])
    made |= maybe(0.15, logits_processors=[shifts])
    return made | ({} if "stop" in made else maybe(0.1, detokenize=False))


def test_all_fields_are_drawn():
    drawn_ones = {name for seed in range(400) for name in draw_params(random.Random(seed))}
    names = {one.name for one in fields(SamplingParams)} - UNIMPLEMENTED_FIELDS.keys()
    assert names - drawn_ones == NOT_DRAWN


class Work:
    """Requests, and their answers by an engine without speculation."""

    def __init__(self, seed, target, lora):
        rng = random.Random(seed)
        shared = [[rng.randrange(3, 300) for _ in range(n)] for n in (20, 48)]
        self.prompts, self.params, self.keys, self.thinking = [], [], [], {}
        for i in range(REQUESTS):
            words = [rng.randrange(3, 300) for _ in range(rng.randrange(2, 12))]
            ids = [*rng.choice([[], *shared]), *words * rng.choice([1, 3]), 3 + i, 7]
            self.prompts.append({"prompt_token_ids": ids})
            self.params.append(draw_params(rng))
            self.keys.append(tuple(ids[-self.params[-1].get("truncate_prompt_tokens", 0) :]))
            if "structured_outputs" not in self.params[-1] and rng.random() < 0.1:
                self.thinking[self.keys[-1]] = ThinkingBudget(rng.randrange(1, 9), (72, 73))
        self.has_lora = lora is not None
        adapter = LoRARequest("one", 1, str(lora)) if self.has_lora else None
        self.lora = [adapter if rng.random() < 0.2 else None for _ in self.prompts]
        self.priority = [rng.randrange(3) for _ in self.prompts]
        self.beams = self.prompts[:2]
        self.known, self.requests = {}, {}
        self.target = target
        self.want = self.run(self.engine())
        for key, outputs in zip(self.keys, self.want[0]):
            for i, output in enumerate(outputs):
                self.known[key, i] = output["token_ids"]

    def engine(self, **more):
        settings = {**SETTINGS, **more}
        if self.has_lora:
            settings |= {"enable_lora": True, "max_lora_rank": 8}
        return LLM(str(self.target), **settings)

    def run(self, llm, predict=None):
        """Answers to all requests, and beams that are searched beside them."""
        engine = llm.llm_engine.engine
        add = engine.add

        def with_thinking(request):
            thinking = self.thinking.get(request.prompt)
            made = request if thinking is None else replace(request, thinking=thinking)
            if not request.hold and request.num_beams == 1:
                self.requests[request.prompt] = made
            return add(made)

        engine.add = with_thinking
        params = [
            SamplingParams(**one, prediction=predict and predict(key))
            for one, key in zip(self.params, self.keys)
        ]
        ranks = self.priority if llm.llm_engine.config.scheduler.policy == "priority" else None
        llm.enqueue(self.prompts, params, use_tqdm=False, lora_request=self.lora, priority=ranks)
        beams = llm.beam_search(self.beams, BeamSearchParams(beam_width=3, max_tokens=8))
        outs = llm.wait_for_completion(use_tqdm=False)
        del engine.add
        found = [[one.sequences[0].tokens for one in beams], [one.prompt_logprobs for one in outs]]
        return [[told(one) for one in out.outputs] for out in outs], found


def told(output):
    """What an output says, without its figures of drafts."""
    return {
        "token_ids": list(output.token_ids),
        "text": output.text,
        "logprobs": None if output.logprobs is None else [*output.logprobs],
        "sum": output.cumulative_logprob,
        "end": (output.finish_reason, output.stop_reason),
    }


def without_values(outputs):
    """Outputs with the logprobs of their tokens, which may differ in the last bits."""
    return [
        one | {"logprobs": None, "sum": one["sum"] and pytest.approx(one["sum"], abs=2e-3)}
        for one in outputs
    ]


class Answers:
    """The answer in place of what a model proposes, with errors."""

    def __init__(self, known, rate):
        self.known, self.rate = known, rate

    def __call__(self, prompt, index, at, count):
        draw = random.Random(f"{prompt} {index} {at}")
        answer = self.known.get((prompt, index), [])[at : at + count]
        answer += [draw.randrange(300) for _ in range(count - len(answer))]
        return tuple(t if draw.random() < self.rate else draw.randrange(300) for t in answer)


def replace_proposals(llm, answers):
    drafting = llm.llm_engine.engine._scheduler._drafting
    set_proposals = drafting.set_proposals

    def replaced(seq, drafts):
        at = len(seq.tokens) - seq.prompt_len
        while seq.tokens[at + seq.prompt_len - 1] < 0:  # steps in flight yield it
            at -= 1
        set_proposals(seq, answers(seq.request.prompt, seq.index, at, len(drafts)))

    drafting.set_proposals = replaced


def check_resumed(llm, work, rng):
    """Let requests continue from some of their tokens, as after the death of an engine."""
    engine, want, got = llm.llm_engine.engine, {}, {}
    for key in work.keys:
        request = work.requests[key]
        if request.params.best_of is not None:
            continue  # its answers are sorted
        answers = [work.known[request.prompt, i] for i in range(request.n)]
        least = min(len(answer) for answer in answers)
        cuts = [rng.randrange(least) for _ in answers]
        spoken = tuple(tuple(answer[:cut]) for answer, cut in zip(answers, cuts))
        engine.add(replace(request, resumed_tokens=spoken))
        want |= {(request.id, i): answers[i][cuts[i] :] for i in range(request.n)}
    texts = {request.id for request in work.requests.values() if request.params.stop_strings}
    while not engine.empty:
        if engine.idle:
            engine.wait(0.05)
        for update in engine.step():
            got.setdefault(update[:2], []).extend(update.token_ids)
    for key, rest in want.items():  # stop strings are found elsewhere
        assert got[key][: len(rest)] == rest if key[0] in texts else got[key] == rest


def check(folders, method, path, seed, target=None):
    """Answer the same requests twice with a method, the second time with prefix hits, then resume
    them."""
    rng = random.Random(f"{method} {path} {seed}")
    target = target or ("mimo" if method == "mtp" else "target")
    work = Work(f"{seed} {target}", *folders[target])
    given = {"method": method, "num_speculative_tokens": 3, "adaptive": rng.random() < 0.2}
    if method in ("ngram", "suffix"):
        given |= {"prompt_lookup_max": 2} if method == "ngram" else {}
    elif method == "prediction":
        given = None
    elif method != "mtp":
        given["model"] = str(folders[method])
    if method == "ngram":
        given["prompt_lookup_min"] = 1
    llm = work.engine(speculative_config=given, **PATHS[path])
    answers, predict = Answers(work.known, rng.choice([0.5, 0.9])), None
    if method == "prediction":
        predict = lambda prompt: answers(prompt, 0, 0, 60)  # noqa: E731
    elif method not in ("ngram", "suffix"):
        replace_proposals(llm, answers)
    for _ in range(2):
        found = work.run(llm, predict)
        for i, (got, want) in enumerate(zip(found[0], work.want[0], strict=True)):
            if target == "hybrid":  # the bits of a state depend on how its tokens were divided
                got, want = (without_values(one) for one in (got, want))
            assert got == want, (work.prompts[i], work.params[i])
        assert found[1][0] == work.want[1][0]
        if target != "hybrid":
            assert found[1] == work.want[1]
    check_resumed(llm, work, rng)
    stats = llm.llm_engine.engine.stats()
    assert not stats.failed_steps
    vars(llm.llm_engine.engine._scheduler._drafting).pop(
        "set_proposals", None
    )  # a cycle of the LLM
    return llm.llm_engine.engine._scheduler.draft_counts, stats.preemptions


@pytest.mark.slow("engines with each method, and one without, for random requests")
@pytest.mark.parametrize(
    ("method", "path"),
    [(method, path) for i, method in enumerate(METHODS) for path in [*PATHS][i % 7 :][:1]]
    + tiers.long(*((method, path) for method in METHODS for path in PATHS)),
)
def test_answers_are_those_without_speculation(folders, method, path):
    counts, preemptions = zip(
        *(check(folders, method, path, seed) for seed in range(tiers.amount(1, 4)))
    )
    assert sum(sum(one.accepted) for one in counts) > 5  # few where their number follows times
    assert sum(preemptions) or path not in ("preempted", "swapped", "offloaded")


@pytest.mark.slow("engines with each method, and one without, for random requests")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("prediction", "together"),
        ("mtp", "preempted"),
        ("suffix", "small chunks"),
        *tiers.long(*((method, path) for method in HYBRID_METHODS for path in HYBRID_PATHS)),
    ],
)
def test_answers_of_recurrent_models_are_those_without_speculation(folders, method, path):
    counts, preemptions = zip(
        *(check(folders, method, path, seed, "hybrid") for seed in range(tiers.amount(1, 4)))
    )
    assert sum(sum(one.accepted) for one in counts) > 5  # few where their number follows times
    assert sum(preemptions) or path != "preempted"
