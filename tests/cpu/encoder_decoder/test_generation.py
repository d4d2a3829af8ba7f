"""Encoder-decoder models offline give the answers of transformers' generate."""

import functools

import pytest

from quire import LLM, SamplingParams
from quire.core.params import BeamSearchParams
from quire.errors import QuireError
from tests.cpu.encoder_decoder.seq2seq import (
    BART,
    BOS,
    EOS,
    T5,
    VARIANTS,
    generate,
    logprobs,
    source_of,
    write_model,
)

pytestmark = [
    pytest.mark.slow("imports transformers, and makes models of it"),
    pytest.mark.sampled(3),
]

SOURCES = [source_of(length) for length in (1, 5, 17, 60, 33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """variant -> (transformers' model, LLM); the last one is kept."""

    @functools.lru_cache(maxsize=1)
    def pair(variant):
        folder = tmp_path_factory.mktemp(variant)
        return write_model(folder, VARIANTS[variant]), llm_of(folder)

    return pair


def llm_of(folder, **settings):
    settings = {"dtype": "float32", "num_gpu_blocks_override": 200, **settings}
    return LLM(str(folder), **settings)


def ids_of(output):
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("variant", VARIANTS, scope="class")
class TestVariant:
    def test_greedy_tokens_and_logprobs_equal_those_of_transformers(self, variant, pairs):
        theirs, llm = pairs(variant)
        answers = llm.generate([{"encoder_prompt": one} for one in SOURCES], GREEDY)
        assert len({tuple(ids_of(one)) for one in answers}) > 1, "the source changes nothing"
        for source, answer in zip(SOURCES, answers):
            got = ids_of(answer)
            assert got == generate(theirs, source, 20)[0]
            assert answer.encoder_prompt_token_ids == source
            whole = [*answer.prompt_token_ids, *got]
            want = logprobs(theirs, source, whole)
            for i, (token, entry) in enumerate(zip(got, answer.outputs[0].logprobs)):
                assert abs(entry[token].logprob - want[i, token].item()) < 1e-4

    def test_a_decoder_prompt_is_continued_and_scored(self, variant, pairs):
        theirs, llm = pairs(variant)
        start = VARIANTS[variant]["decoder_start_token_id"]
        decoder = [start, *source_of(30, seed=4)]
        params = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=0)
        given = [{"encoder_prompt": one, "decoder_prompt": decoder} for one in SOURCES[1:3]]
        for source, answer in zip(SOURCES[1:3], llm.generate(given, params)):
            assert answer.prompt_token_ids == decoder
            assert ids_of(answer) == generate(theirs, source, 9, decoder)[0]
            want = logprobs(theirs, source, decoder)
            for i, token in enumerate(decoder[1:]):
                got = answer.prompt_logprobs[i + 1][token].logprob
                assert abs(got - want[i, token].item()) < 1e-4

    def test_an_answer_is_the_same_alone_and_in_a_batch(self, variant, pairs):
        _, llm = pairs(variant)
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, logprobs=0)
        prompts = [{"encoder_prompt": one} for one in SOURCES]
        together = llm.generate(prompts, params)
        llm.reset_prefix_cache()
        for prompt, answer in zip(prompts, together):
            (alone,) = llm.generate(prompt, params)
            assert ids_of(alone) == ids_of(answer)
            assert alone.outputs[0].logprobs == answer.outputs[0].logprobs

    def test_four_beams_equal_those_of_transformers(self, variant, pairs):
        theirs, llm = pairs(variant)
        params = BeamSearchParams(beam_width=4, max_tokens=7, ignore_eos=True)
        how = {"eos_token_id": None, "forced_eos_token_id": None, "num_return_sequences": 4}
        for source in SOURCES[1:4]:
            (found,) = llm.beam_search([{"encoder_prompt": source}], params)
            want = generate(theirs, source, 7, num_beams=4, **how)
            assert [one.tokens[1:] for one in found.sequences] == want

    def test_beams_that_end_score_as_in_transformers(self, variant, pairs):
        """Scores are sums: a penalty of the length counts EOS there and not here. Transformers
        drops ends that are not among the four best of a step, so ours may be better."""
        theirs, llm = pairs(variant)
        params = BeamSearchParams(
            beam_width=4, max_tokens=9, length_penalty=0.0, include_stop_str_in_output=True
        )
        start, forced = [VARIANTS[variant]["decoder_start_token_id"]], variant == "bart"

        def score(source, tokens):
            scores = logprobs(theirs, source, start + tokens)[range(len(tokens)), tokens]
            free = scores[1 : -1 if len(tokens) == 9 else None] if forced else scores
            return free.sum().item()

        for source in SOURCES[1:4]:
            (found,) = llm.beam_search([{"encoder_prompt": source}], params)
            best = found.sequences[0]
            assert abs(best.cum_logprob - score(source, best.tokens[1:])) < 1e-3
            (want,) = generate(theirs, source, 9, num_beams=4, length_penalty=0.0)
            assert best.cum_logprob > score(source, want) - 1e-3


def test_forced_tokens_bound_an_answer(tmp_path):
    theirs = write_model(tmp_path, BART, suppress_tokens=[7, 22], begin_suppress_tokens=[23, 106])
    llm = llm_of(tmp_path)
    for count in (1, 2, 3, 12):
        params = SamplingParams(temperature=0.0, max_tokens=count)
        for source, answer in zip(SOURCES, llm.generate(SOURCES, params)):
            assert ids_of(answer) == generate(theirs, source, count)[0]
            assert ids_of(answer)[-1] == EOS
            assert count == 1 or ids_of(answer)[0] == BOS
            assert answer.outputs[0].finish_reason == "stop"
    free = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    assert ids_of(llm.generate([SOURCES[0]], free)[0])[-1] != EOS


def test_banned_tokens_are_never_sampled_and_first_ones_not_first(tmp_path):
    write_model(tmp_path, T5, suppress_tokens=list(range(60)), begin_suppress_tokens=[60, 61])
    llm = llm_of(tmp_path)
    params = SamplingParams(temperature=2.0, max_tokens=30, n=8, seed=3)
    first, rest = set(), set()
    for answer in llm.generate(SOURCES, params):
        for one in answer.outputs:
            first.add(one.token_ids[0])
            rest.update(one.token_ids[1:])
    assert min(first) > 61
    assert min(rest) >= 60
    assert {60, 61} <= rest


class TestForms:
    @pytest.fixture(scope="class")
    def llm(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("t5")
        write_model(folder, T5)
        return llm_of(folder)

    def test_all_forms_of_a_source_are_the_same(self, llm):
        text, ids = "w9 w8 w7", [9, 8, 7, EOS]
        forms = [
            text,
            ids,
            {"prompt": text},
            {"prompt_token_ids": ids},
            {"encoder_prompt": text},
            {"encoder_prompt": ids, "decoder_prompt": None},
            {"encoder_prompt": {"prompt": text}, "decoder_prompt": ""},
            {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": [0]},
        ]
        answers = llm.generate(forms, SamplingParams(temperature=0.0, max_tokens=5))
        assert len({tuple(ids_of(one)) for one in answers}) == 1
        assert all(one.encoder_prompt_token_ids == ids for one in answers)
        assert all(one.prompt_token_ids == [0] for one in answers)
        assert answers[0].encoder_prompt == text
        assert answers[0].prompt is None

    def test_a_decoder_prompt_begins_with_the_start_token_and_has_no_special_ones(self, llm):
        params = SamplingParams(temperature=0.0, max_tokens=2)
        forms = [{"encoder_prompt": "w9", "decoder_prompt": one} for one in ("w5 w6", [5, 6])]
        for answer in llm.generate(forms, params):
            assert answer.prompt_token_ids == [0, 5, 6]

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            ({"decoder_prompt": "w1"}, "encoder_prompt is missing"),
            ({"encoder_prompt": "w1", "prompt": "w2"}, "'prompt' beside"),
            ({"encoder_prompt": ""}, "encoder_prompt"),
            ({"encoder_prompt": []}, "encoder prompt is empty"),
            ({"encoder_prompt": [4000]}, "token ids of this model"),
            ({"encoder_prompt": [5] * 129}, "this model's encoder takes 128"),
            ({"encoder_prompt": [5], "decoder_prompt": [5] * 128}, "maximum context length is 128"),
            ({"prompt": "w1", "suffix": "w2"}, "suffix"),
        ],
    )
    def test_bad_prompts_are_refused(self, llm, prompt, words):
        if prompt == {"encoder_prompt": ""}:
            assert llm.generate(prompt, SamplingParams(max_tokens=1))  # EOS alone
            return
        with pytest.raises(QuireError, match=words):
            llm.generate(prompt)

    def test_a_source_can_be_truncated(self, llm):
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=100)
        (answer,) = llm.generate([{"encoder_prompt": [5] * 100 + [6] * 90}], params)
        assert answer.encoder_prompt_token_ids == [5] * 10 + [6] * 90


def test_a_head_of_its_own_is_used_where_the_checkpoint_has_one(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    write_model(tmp_path, VARIANTS["flan"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors, "transformers ties them"
    before = ids_of(llm_of(tmp_path).generate([SOURCES[1]], GREEDY)[0])
    tensors["lm_head.weight"] = tensors["shared.weight"].roll(1, 0)
    save_file(tensors, path, metadata={"format": "pt"})
    after = ids_of(llm_of(tmp_path).generate([SOURCES[1]], GREEDY)[0])
    assert after[0] == (before[0] + 1) % 120
    assert torch.is_tensor(tensors["lm_head.weight"])


def test_float16_is_refused_for_t5_and_replaced_by_auto(tmp_path):
    write_model(tmp_path, T5 | {"dtype": "float16"})
    with pytest.raises(QuireError, match="overflow"):
        llm_of(tmp_path, dtype="float16")
    assert llm_of(tmp_path, dtype="auto").llm_engine.config.model.dtype == "bfloat16"


@pytest.mark.parametrize("variant", ["t5", "bart", "marian"])
def test_checkpoints_as_older_versions_wrote_them_are_read(variant, tmp_path):
    """With a copy of each shared matrix, and with what is computed or never used."""
    from safetensors.torch import load_file, save_file

    hf = VARIANTS[variant]
    theirs = write_model(tmp_path, hf)
    path = tmp_path / "model.safetensors"
    tensors, state = load_file(path), theirs.state_dict()
    copies = [name for name in state if "embed_" in name or name.startswith("lm_head")]
    tensors |= {name: state[name].clone() for name in copies}
    if variant == "t5":
        name = "decoder.block.0.layer.{}.{}.relative_attention_bias.weight"
        tensors[name.format(1, "EncDecAttention")] = tensors[
            name.format(0, "SelfAttention")
        ].clone()
    else:
        tensors["model.encoder.version"] = tensors["final_logits_bias"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    answers = llm_of(tmp_path).generate(SOURCES[:2], GREEDY)
    assert [ids_of(one) for one in answers] == [generate(theirs, one, 20)[0] for one in SOURCES[:2]]


def test_weights_may_be_quantized(tmp_path):
    write_model(tmp_path, BART | {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64})
    llm = llm_of(tmp_path, quantization="fp8")
    assert all(len(ids_of(one)) == 20 for one in llm.generate(SOURCES, GREEDY))
