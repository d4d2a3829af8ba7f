"""A process forked after the model was loaded can generate, and so can its parent."""

import os
import select
import signal

import pytest

from quire import LLM, SamplingParams
from quire.kernels.native import library
from tests.cpu.tiny_models import write_model

pytestmark = pytest.mark.skipif(
    not library.available(), reason="PyTorch's own thread pool does not survive a fork"
)
PARAMS = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def ids(llm):
    return [list(o.outputs[0].token_ids) for o in llm.generate(["Hi", "What"], PARAMS, use_tqdm=0)]


def in_child(work):
    """The exit code of work() in a forked process; None if it does not end."""
    ended, held = os.pipe()  # the child's end closes when the child does
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 1)
    os.close(held)
    in_time = select.select([ended], [], [], 30)[0]
    os.close(ended)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_parent_and_child_generate_the_same_after_a_fork(folder, depth):
    llm = LLM(str(folder), steps_in_flight=depth, max_model_len=64, use_tqdm_on_load=False)
    want = ids(llm)
    assert in_child(lambda: ids(llm) == want and llm.apply_model(id)) == 0
    assert ids(llm) == want


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_steps_under_way_at_the_fork_are_the_parents(folder):
    llm = LLM(str(folder), steps_in_flight=2, max_model_len=64, use_tqdm_on_load=False)
    want = ids(llm)
    engine = llm.llm_engine
    engine.add_request("a", "Hello", SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()

    def work():
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return outputs[-1].outputs[0].finish_reason in ("error", "length") and ids(llm) == want

    assert in_child(work) == 0
    assert work()
    assert ids(llm) == want
