"""Ranks on the nodes of a real Ray cluster: two of ray.cluster_utils on this machine."""

import subprocess
import sys
import textwrap

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDead
from tests.cpu.tiny_models import write_model

pytest.importorskip("ray")
pytestmark = pytest.mark.long("a Ray cluster of two nodes starts in 8 s")

SIZES = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60, "device": "cpu"}
PROMPTS = ["What", [70, 70, 5], "The capital of France is Paris. " * 8]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster():
    """Its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = start_nodes()
        yield made.address
        made.shutdown()


def start_nodes(attempts=5):
    """A raylet waits 15 s for its agents, which take longer on a busy machine, and aborts then."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        for more in ({"include_dashboard": False}, {}):
            made.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 << 20, **more)
    except Exception as error:
        made.shutdown()
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        return start_nodes(attempts - 1)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def want(folder):
    return ids(LLM(folder, **SIZES))


def ids(llm):
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def generate_for_ever(llm):
    while True:
        ids(llm)


def start(folder, cluster, **options):
    options = {"tensor_parallel_size": 2, "ray_address": cluster, **options}
    return LLM(folder, **SIZES, distributed_executor_backend="ray", **options)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_nodes_give_the_tokens_of_one_rank(folder, cluster, want, size):
    llm = start(folder, cluster, **{"tensor_parallel_size": 1, size: 2})
    assert ids(llm) == want
    llm.llm_engine.engine.shutdown()


def test_a_node_that_dies_is_named_and_its_bundles_are_free_for_the_next_engine(
    folder, cluster, want
):
    llm = start(folder, cluster)
    found = psutil.process_iter(["cmdline"])
    agents = [one for one in found if "NodeActor.run" in " ".join(one.info["cmdline"] or [])]
    assert len(agents) == 1
    ranks = agents[0].children()
    agents[0].kill()
    with pytest.raises(EngineDead, match=r"node 1 \([\d.]+\) is gone.* rank 1"):
        generate_for_ever(llm)
    psutil.wait_procs(ranks, 10)
    assert not [one for one in ranks if one.is_running()], "a rank ends with its agent"
    llm.llm_engine.engine.shutdown()
    llm = start(folder, cluster)
    assert ids(llm) == want
    llm.llm_engine.engine.shutdown()


def test_a_cluster_that_is_too_small_is_shown(folder, cluster):
    with pytest.raises(ConfigError, match=r"(?s)4 ranks.*the cluster has 2 CPUs.*1 of 1 free"):
        start(folder, cluster, tensor_parallel_size=4, ray_placement_timeout_seconds=1)


def test_an_engine_in_an_actor_uses_its_placement_group(folder, cluster, want):
    """As a replica of Ray Serve: the group has a bundle for each rank, and none for the actor."""
    program = f"""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray.init(address={cluster!r}, log_to_driver=False)
        group = placement_group([{{"CPU": 1}}] * 2)
        assert group.wait(60)

        @ray.remote(num_cpus=0)
        class Replica:
            async def tokens(self):
                from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
                args = AsyncEngineArgs({folder!r}, **{SIZES!r}, tensor_parallel_size=2,
                                       distributed_executor_backend="ray")
                engine = AsyncLLM.from_engine_args(args)
                params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
                found = []
                for i, prompt in enumerate({PROMPTS!r}):
                    async for out in engine.generate(prompt, params, str(i)):
                        pass
                    found.append(list(out.outputs[0].token_ids))
                engine.shutdown()
                return found

        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        print(ray.get(Replica.options(scheduling_strategy=strategy).remote().tokens.remote()))
        """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(want)
