"""A tokenizer may come from another revision of the model's repository."""

from huggingface_hub import constants

from quire import LLM, SamplingParams
from tests.cpu.tiny_models import write_hub, write_model


def test_the_tokenizer_is_of_its_own_revision(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    write_hub(tmp_path / "hub", {"us/model": "llama"})
    repository = tmp_path / "hub" / "models--us--model"
    other = "89abcdef0123456789abcdef0123456789abcdef"
    write_model(repository / "snapshots" / other, bos=True)
    (repository / "refs" / "with-bos").write_text(other)

    def first(**options):
        llm = LLM("us/model", max_model_len=64, **options)
        params = SamplingParams(max_tokens=1)
        return llm.generate("Hello", params, use_tqdm=False)[0].prompt_token_ids[0]

    assert first() != 0
    assert first(tokenizer_revision="with-bos") == 0
    assert first(revision="with-bos") == 0
    assert first(revision="with-bos", tokenizer_revision="main") != 0
