"""Start-up on a GPU: weights arrive whole, kernels are made ahead, every second has a name."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from quire.engine.startup.startup_timer import CONCURRENT_PREFIX
from quire.platform import cuda
from quire.weights.gpu_loader import BUFFER_BYTES, GpuLoader
from tests.cpu.plain_param import plain_param
from tests.cpu.tiny_models import write_model
from tests.gpu.test_memory import CONFIG

CHILD = """
import json, sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, gpu_memory="2GiB",
          max_num_seqs=16, max_num_batched_tokens=512)
seconds = llm.llm_engine.built.seconds
from triton import knobs
made = []
knobs.runtime.jit_cache_hook = lambda **said: made.append(said["repr"]) and None
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
for count in (1, 3, 16):
    llm.generate([{"prompt_token_ids": list(range(2, 30))}] * count, greedy, use_tqdm=False)
print(json.dumps({"seconds": seconds, "made": made}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("start")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def started(folder, cache):
    """The report of one start in a new process."""
    import os

    env = {**os.environ, "QUIRE_CACHE": str(cache), "TRITON_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def kept(folder, tmp_path_factory):
    """A folder of compiled kernels after a first start, and that start's seconds."""
    path = tmp_path_factory.mktemp("kernels")
    first = started(folder, path)
    assert first["made"] == []  # also the first start compiles before it is ready
    return path, first["seconds"]


def test_when_the_kernels_are_kept_a_start_compiles_nothing_and_none_comes_late(folder, kept):
    path, first = kept
    second = started(folder, path)
    assert second["made"] == []
    assert second["seconds"]["kernels"] < 0.5 * first["kernels"]
    (place,) = (path / "kernels").iterdir()
    assert place.name.startswith("triton-")


def test_the_start_up_table_names_every_stage(kept):
    _, seconds = kept
    names = {"model files", "config", "weights", "context", "kernels", "worst step"}
    assert names | {"KV cache", "capture", "engine"} <= set(seconds)
    assert CONCURRENT_PREFIX + "CUDA context" in seconds


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3,), torch.float32), ((5000, 4096), torch.bfloat16), ((1, BUFFER_BYTES), torch.float16),
     ((7, 3 * 1024 * 1024 + 5), torch.float32), ((2, 3000, 2048), torch.bfloat16)],
)  # fmt: skip
def test_staged_tensors_arrive_as_they_were(shape, dtype):
    source = torch.randn(shape).to(dtype)
    for wanted in (dtype, torch.bfloat16):
        target = torch.full(shape, 7.0, dtype=wanted, device="cuda")
        with GpuLoader(torch.device("cuda", 0)) as stage:
            stage.wait(stage.copy(target, source))
            assert torch.equal(target.cpu(), source.to(wanted))


def test_a_cut_and_a_turned_tensor_arrive_as_they_were():
    source = torch.randn(3000, 4100)
    with GpuLoader(torch.device("cuda", 0)) as stage:
        for piece in (source.narrow(1, 7, 2000), source.t()):
            target = torch.empty(piece.shape, device="cuda")
            stage.wait(stage.copy(target, piece))
            assert torch.equal(target.cpu(), piece)


def test_a_checkpoint_is_on_the_gpu_what_it_is_on_the_cpu(tmp_path):
    from quire.models.build import build_model, read_model_config

    folder = write_model(tmp_path / "m", "llama", hidden_size=512, intermediate_size=2048)
    kind, config = read_model_config(json.loads((folder / "config.json").read_text()))
    here = build_model(
        kind, config, folder=folder, dtype=torch.bfloat16, device="cuda:0", progress=False
    )
    there = build_model(
        kind, config, folder=folder, dtype=torch.bfloat16, progress=False, device="cpu"
    )
    names = [n for n, _ in here.named_parameters()]
    assert len(names) > 10
    for name in names:
        assert torch.equal(plain_param(here, name).cpu(), plain_param(there, name)), name


def test_the_driver_and_torch_agree_about_the_device():
    facts = cuda.device_properties()
    torch_facts = torch.cuda.get_device_properties(0)
    assert facts.name == torch_facts.name
    assert facts.capability == torch.cuda.get_device_capability(0)
    assert facts.sm_count == torch_facts.multi_processor_count
    assert facts.total_bytes == torch_facts.total_memory
    assert cuda.memory().free <= facts.total_bytes


def test_an_impossible_option_is_refused_before_torch_is_there(tmp_path):
    code = (
        "import sys, time; t = time.perf_counter()\n"
        "from quire.platform import cuda\nfrom quire.config.options import Options\n"
        "facts = cuda.device_properties()\n"
        "assert 'torch' not in sys.modules\n"
        "print(time.perf_counter() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2


def test_a_damaged_checkpoint_is_refused_on_the_gpu_too(tmp_path):
    from quire.errors import WeightError
    from quire.models.build import build_model, read_model_config

    folder = write_model(tmp_path / "m", "llama")
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors")
    kind, config = read_model_config(json.loads((folder / "config.json").read_text()))
    with pytest.raises(WeightError, match="missing in the checkpoint"):
        build_model(
            kind, config, folder=folder, dtype=torch.float32, device="cuda:0", progress=False
        )
