"""Prompts with media whose items are encoded slice by slice, beside a stream of text."""

from quire import LLM, SamplingParams
from quire.engine.startup import scheduler_setup
from quire.runner.media.encoder_pool import EncoderPool


def check_slices(folder, prompts, monkeypatch, **settings):
    """Assert that they are answered as without the stream, and that slices ran."""
    ran, run_slice = [], EncoderPool.encode_slice
    monkeypatch.setattr(
        EncoderPool, "encode_slice", lambda own, *at: (ran.append(at), run_slice(own, *at))
    )
    monkeypatch.setitem(scheduler_setup.SLICES, "cpu", (1, 0))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    stream = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", **settings)
    wanted = {
        str(i): list(one.outputs[0].token_ids)
        for i, one in enumerate(llm.generate(prompts, params, use_tqdm=False))
    }
    engine = LLM(str(folder), dtype="float32", inter_token_target_ms=40, **settings).llm_engine
    engine.add_request("stream", "w3 w4", stream)
    for _ in range(4):
        engine.step()
    for name, prompt in zip(wanted, prompts, strict=True):
        engine.add_request(name, prompt, params)
    found = {}
    while engine.has_unfinished_requests():
        found |= {one.request_id: one for one in engine.step() if one.finished}
    got = {name: list(found[name].outputs[0].token_ids) for name in wanted}
    assert got == wanted
    assert len(ran) > len(prompts)
