"""Recurrent kernels: bits do not depend on cuts or on other rows; drafts, padding and empty rows."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.framework.op import OPS
from quire.kernels.state_rows import StateRows
from quire.layers import recurrent
from quire.runner.gpu.cuda_graphs import DecodeGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from tests import tiers
from tests.cpu import engine_of as tiny
from tests.cpu.gpu_kernels.test_cuda_worker import acted, engine_of, replayed  # noqa: F401
from tests.cpu.gpu_kernels.test_draft_steps import knows
from tests.cpu.test_recurrent import MAMBA2, QWEN3_NEXT
from tests.op_cases import all_ops, flat, poison

pytestmark = pytest.mark.slow("kernels in the interpreter")

SCANS = [
    name for name in all_ops() if name in ("causal_conv", "gated_delta_rule") or "_scan" in name
]
TOKENS, ROWS = tiers.amount(21, 200), 7


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def last_first(monkeypatch, device):
    """The interpreter runs the programs of later rows first: a GPU promises no order."""
    if device == "cpu":
        from triton.runtime.interpreter import interpreter_builder as builder

        real = builder.set_grid_idx
        reverse = lambda x, y, z: real(x, builder.grid_dim[1] - 1 - y, z)  # noqa: E731
        monkeypatch.setattr(builder, "set_grid_idx", reverse)


@pytest.fixture(params=SCANS)
def scan(request, device):
    """(run, state): run(state, tokens, rows) returns what the kernel puts out for some tokens of
    the op's smallest case, made longer."""
    torch.manual_seed(5)
    gpu = OPS[request.param].gpu
    case = next(iter(OPS[request.param].cases(torch.device(device))))
    count = case["rows"].decodes
    state = torch.randn_like(case["state"][:1].repeat(ROWS, *[1] * (case["state"].dim() - 1)))
    longer = {
        name: torch.randn(TOKENS, *one.shape[1:], device=device).to(one.dtype)
        for name, one in case.items()
        if isinstance(one, torch.Tensor) and name in ("x", *"qkvabcz", "dt") and len(one) == count
    }

    def run(state, first, end, rows):
        cut = {name: one[first:end] for name, one in longer.items()}
        given = {**case, **cut, "state": state, "rows": rows}
        out = gpu.outputs(**given)
        poison(flat(out), given)
        gpu.launch(out, **given)
        return out

    return run, state


def rows_of(rows, decodes, ends=(), sources=None):
    """StateRows on the device of `rows`; ends: of rows of several tokens."""
    starts = torch.tensor([*range(decodes), *(ends or [decodes])], dtype=torch.int32)
    starts = starts.to(rows.device)
    return StateRows(rows, decodes, sources=rows if sources is None else sources, starts=starts)


def one_row(state, row, tokens):
    rows = torch.tensor([row], device=state.device)
    return rows_of(rows, 1) if tokens == 1 else rows_of(rows, 0, (0, tokens))


def test_a_prompt_gives_the_same_bits_however_it_is_cut(scan):
    run, state = scan
    whole_state, cut_state = state.clone(), state.clone()
    whole = run(whole_state, 0, TOKENS, one_row(state, 2, TOKENS))
    cuts = [0, 1, 3, 19, TOKENS]
    parts = [
        run(cut_state, low, high, one_row(state, 2, high - low))
        for low, high in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(cut_state, whole_state)
    others = [i for i in range(ROWS) if i != 2]
    assert torch.equal(cut_state[others], state[others])


def test_drafts_are_tokens_one_by_one(scan, last_first):
    """A token with three drafts between two other rows."""
    run, state = scan
    found, want = state.clone(), state.clone()
    rows = torch.tensor([5, 1, 4, 0, 3, 2], device=state.device)
    sources = torch.tensor([5, 1, 1, 4, 0, 2], device=state.device)
    got = run(found, 0, 6, rows_of(rows, 6, sources=sources))
    kept = []
    for i, row in enumerate((5, 1, 1, 1, 1, 2)):
        assert torch.equal(run(want, i, i + 1, one_row(state, row, 1))[0], got[i]), i
        kept.append(want[row].clone())
    assert torch.equal(found[rows], torch.stack(kept))
    assert torch.equal(found[-1], state[-1])


def test_padding_is_zeros_and_reads_and_writes_no_state(scan):
    """As a graph has it: rows that decode, padded; an empty row; tokens that pad the step."""
    run, state = scan
    found, want, padding = state.clone(), state.clone(), ROWS - 1
    found[padding] = torch.nan
    rows = torch.tensor([1, padding, padding, 0, 3, padding], device=state.device)
    given = rows_of(rows, 3, (3, 17, 17, TOKENS), sources=rows.clone())
    got = run(found, 0, TOKENS, given)
    assert torch.equal(run(want, 0, 1, one_row(state, 1, 1)), got[:1])
    assert torch.equal(run(want, 3, 17, one_row(state, 0, 14)), got[3:17])
    assert torch.equal(found[:-1], want[:-1])
    assert found[-1].isnan().all()
    assert not got[1:3].any()
    assert not got[17:].any()


@pytest.fixture
def on_kernels(monkeypatch):
    """Recurrent layers run the GPU bodies of their ops."""

    def body(gpu):
        def call(*args):
            out = gpu.outputs(*args)
            poison(flat(out), {str(i): one for i, one in enumerate(args)})
            gpu.launch(out, *args)
            return out

        return call

    for name in (*SCANS, "gated_rms_norm", "scan_gate"):
        monkeypatch.setattr(recurrent, name, body(OPS[name].gpu))


ENGINES = {
    "drafts": dict(drafts=3),
    "overlap": dict(depth=2),
    "eager": dict(eager=True, budget=20),
    "drafts, eager": dict(drafts=3, eager=True, budget=20),
}
MODELS = {
    "mamba2": {**MAMBA2, "num_heads": 4, "num_hidden_layers": 1},
    "qwen3_next": {
        **QWEN3_NEXT,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.mark.parametrize(
    ("model", "name"),
    [("mamba2", "drafts"), *tiers.long(*itertools.product(MODELS, ENGINES))],
)
def test_an_engine_answers_as_on_the_cpu(acted, replayed, on_kernels, monkeypatch, model, name):  # noqa: F811
    """Prompts with one beginning, the second of which starts from a checkpoint."""
    hf, settings = MODELS[model], dict(ENGINES[name])
    shared = tiers.amount(5, 64)
    work = [
        tiny.request("a", range(shared + 2), 5),
        tiny.request("b", [*range(shared), 5, 6], 6),
        tiny.request("c", [9], 7),
    ]
    with monkeypatch.context() as patch:
        for op in (*SCANS, "gated_rms_norm", "scan_gate"):
            patch.setattr(recurrent, op, OPS[op].reference)
        want = {}
        for one in work:
            want |= tiny.run(tiny.engine_of(hf, checkpoints=0, prefix=False, eager=True), [one])[0]
    if "drafts" in settings:
        settings["propose"] = knows(want)
    engine = engine_of(hf, **{"budget": 64, "seqs": 3} | settings)
    got, cached, most = {}, 0, 0
    for requests in work[:1], work[1:]:
        for one in requests:
            engine.add(one)
        while not engine.idle:
            for update in engine.step():
                got.setdefault(update[:2], []).extend(update.token_ids)
                cached = max(cached, update.cached_tokens)
                most = max(most, len(update.token_ids))
    assert got == want
    assert cached >= shared or not tiers.LONG
    assert most > 1 or "drafts" not in settings
    if "eager" not in settings:
        kinds = {type(key) for key, known in replayed}
        assert kinds == {DecodeGraph, GraphShape}
        assert all(known for _, known in replayed)
        assert any(getattr(key, "drafts", False) for key, _ in replayed) == ("drafts" in settings)
    engine.shutdown()
