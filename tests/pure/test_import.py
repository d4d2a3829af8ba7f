"""What importing costs, and that public names are where users look for them."""

import importlib.abc
import re
import subprocess
import sys

import pytest

import quire
from quire import as_vllm
from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.errors import ConfigError

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "pydantic",
    "numpy",
    "fastapi",
    "jinja2",
    "huggingface_hub",
)


def python(code):
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_import_quire_is_fast_and_light():
    code = f"""
import sys, time
began = time.process_time()  # of this process alone: other tests may be running
import quire
quire.SamplingParams, quire.EngineArgs, quire.ConfigError
seconds = time.process_time() - began
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"heavy: {{heavy}}" if heavy else f"took {{seconds:.2f}} s" if seconds > 0.3 else 0)
"""
    run = python(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["LLM", "LLMEngine", "AsyncLLM"])
def test_torch_is_imported_with_the_first_engine(name):
    # Until then nothing may fix what a program can still choose, such as CUDA_VISIBLE_DEVICES
    run = python(f"import sys; from quire import {name}; sys.exit('torch' in sys.modules)")
    assert run.returncode == 0, run.stderr


def test_help_is_fast_and_light():
    code = f"""
import sys
from quire.cli import main
status = main(["--help"])
sys.exit(status or [name for name in {HEAVY!r} if name in sys.modules] or 0)
"""
    run = python(code)
    assert run.returncode == 0, run.stderr


def test_every_public_name_has_a_place():
    assert {"LLM", "SamplingParams", "EngineArgs", "install_as_vllm"} <= set(dir(quire))
    assert set(quire.__all__) == {*quire._FOUND, "__version__"}
    assert quire.SamplingParams(top_k=3).top_k == 3
    assert quire.__version__
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = quire.Nope


@pytest.fixture
def installed():
    as_vllm.install()
    yield
    as_vllm.uninstall()


@pytest.mark.usefixtures("installed")
def test_vllm_means_quire():
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import BeamSearchParams

    assert SamplingParams is quire.SamplingParams
    assert EngineArgs is quire.EngineArgs
    assert vllm.sampling_params.BeamSearchParams is BeamSearchParams
    assert vllm.__version__ == as_vllm.VERSION
    assert "LLM" in dir(vllm)


@pytest.mark.usefixtures("installed")
def test_a_missing_name_lists_the_available_ones():
    import vllm

    assert not hasattr(vllm, "Nope")
    assert getattr(vllm, "Nope", None) is None
    with pytest.raises(ImportError, match="did you mean SamplingParams"):
        from vllm import SamplngParams  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"quire has no vllm\.nonsense"):
        import vllm.nonsense


@pytest.mark.usefixtures("installed")
def test_settings_of_other_engines_can_be_made_and_given():
    from vllm.config import CompilationConfig

    assert quire.EngineArgs(compilation_config=CompilationConfig(level=3)).options()


@pytest.mark.parametrize("module", sorted(as_vllm.PLACES))
def test_every_name_of_the_alias_has_a_place(module):
    for place, names in as_vllm.PLACES[module].items():
        path = as_vllm.Path(as_vllm.__file__).parent.parent / place.replace(".", "/")
        source = (
            path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        )
        text = source.read_text()
        for name in names.split():
            ours = name.partition("=")[2] or name
            assert re.search(rf"\b{ours}\b", text), f"{place} has no {ours}"


@pytest.mark.usefixtures("installed")
def test_module_paths_that_scripts_import_are_there(monkeypatch):
    import vllm.envs as envs
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.lora.request import LoRARequest
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils import FlexibleArgumentParser, get_open_port, random_uuid

    monkeypatch.setenv("VLLM_HOST_IP", "1.2.3.4")
    assert envs.VLLM_HOST_IP == "1.2.3.4"
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["m", "--max_model_len", "8k"])
    validate_parsed_serve_args(args)
    assert AsyncEngineArgs.from_cli_args(args).max_model_len == "8k"
    assert random_uuid() != random_uuid()
    assert get_open_port() > 0
    assert UsageContext.API_SERVER
    assert callable(run_server)
    assert VllmConfig is EngineConfig
    assert LoRARequest.__name__ == "LoRARequest"


@pytest.mark.usefixtures("installed")
def test_a_parser_of_a_script_gives_what_the_engine_takes():
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="m", max_model_len=64)
    given = vars(parser.parse_args(["--seed", "3"]))
    assert Options.from_flat(given).non_default() == {"model": "m", "max_model_len": 64, "seed": 3}


@pytest.mark.usefixtures("installed")
def test_a_script_may_ask_for_the_platform():
    from vllm.platforms import current_platform

    assert current_platform.is_cuda() is not current_platform.is_cpu()
    assert current_platform.device_type in ("cuda", "cpu")


def test_installing_twice_is_harmless_and_too_late_is_an_error(monkeypatch):
    as_vllm.install()
    as_vllm.install()
    assert sum(isinstance(one, as_vllm.Finder) for one in sys.meta_path) == 1
    as_vllm.uninstall()
    monkeypatch.setitem(sys.modules, "vllm", sys)
    with pytest.raises(ConfigError, match="imported already"):
        as_vllm.install()
    assert not any(
        isinstance(one, importlib.abc.Loader) and isinstance(one, as_vllm.Finder)
        for one in sys.meta_path
    )


@pytest.mark.parametrize(
    ("argv", "words"), [(["nosuch.py"], "no script 'nosuch.py'"), (["-m"], "name of a module")]
)
def test_a_script_that_is_not_there_is_one_line(capsys, argv, words):
    assert as_vllm.main(argv) == 2
    assert words in capsys.readouterr().err
    assert "vllm" not in sys.modules


@pytest.mark.usefixtures("installed")
def test_the_usual_cleanup_of_scripts_can_be_imported():
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()
