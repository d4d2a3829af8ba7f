"""deploy/: what stands there parses, its flags, routes and variables exist, its rights are few.

The tools of others (kubectl, systemd-analyze, kubernetes-validate) look too where they are installed.
"""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from quire.cli import serve_flags
from quire.engine.supervise.process_launcher import ENGINE_STOP_S
from quire.server.process.supervisor import GRACE_S
from quire.server.telemetry import load_header, metric_specs
from tests.doc_blocks import all_blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OPERATOR = "monitoring.coreos.com/v1"
"""Resources of the Prometheus operator, which has its own schemas."""
PARTS = ("base", "gpu", "example")
LAST_WORDS_S = GRACE_S + ENGINE_STOP_S
"""What a server may take to end, beyond --shutdown-timeout."""


def yaml_of(path):
    return list(yaml.safe_load_all(path.read_text()))


def instructions(path):
    """(stage, word, rest) of each line of a Dockerfile, continuations joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stage, found = "", []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            stage = rest.rpartition(" AS ")[2] if word == "FROM" else stage
            found.append((stage, word, rest))
    return found


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


TEXTS = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
DOCKERFILE = instructions(DEPLOY / "Dockerfile")
COMPOSE = yaml_of(DEPLOY / "compose.yaml")[0]
OURS = {name: one for name, one in COMPOSE["services"].items() if name.startswith("quire")}
BASE = {one["kind"]: one for path in (KUBERNETES / "base").glob("*.yaml") for one in yaml_of(path)}
NETWORK = yaml_of(KUBERNETES / "network/network.yaml")[0]
POD = BASE["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
PATCHES = yaml_of(KUBERNETES / "gpu/kustomization.yaml")[0]["patches"]
GPU_ARGS = yaml.safe_load(PATCHES[0]["patch"])[0]["value"]
UNIT = (DEPLOY / "systemd/quire.service").read_text()
SETTINGS = [line.split("=", 1) for line in UNIT.splitlines() if re.match(r"\w+=", line)]
EXEC = shlex.split(dict(SETTINGS)["ExecStart"])
IMAGE_CMD = json.loads(next(rest for _, word, rest in DOCKERFILE if word == "CMD"))
COMMANDS = {
    "image": IMAGE_CMD,
    "pod": CONTAINER["args"],
    "gpu pod": GPU_ARGS,
    "unit": EXEC[1:],
    **{f"compose {name}": one["command"] for name, one in OURS.items()},
}


def routes():
    text = "".join(path.read_text() for path in (ROOT / "quire/server").rglob("*.py"))
    return set(re.findall(r"@router\.get\(\s*\"([^\"]+)\"", text))


# -- what is common -----------------------------------------------------------------------------


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_is_one_that_quire_takes(words):
    assert words[0] == "serve"
    options, server = serve_flags.parse(words[1:])
    assert server.port == 8000
    assert options.model.model in ("embedded", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")


def test_what_runs_in_a_container_is_reached_from_outside_it():
    for name, words in COMMANDS.items():
        assert serve_flags.parse(words[1:])[1].host == (
            "127.0.0.1" if name == "unit" else "0.0.0.0"
        )


def test_variables_named_are_read_by_someone():
    text = "".join(path.read_text() for path in TEXTS)
    known = (ROOT / "quire/env.py").read_text()
    for name in set(re.findall(r"\bQUIRE_[A-Z_]+\b", text)):
        assert re.search(rf"\b{name}\b", known), name


def test_no_secret_is_in_these_files():
    for path in TEXTS:
        found = re.findall(
            r"(?i)(?:key|token|password|secret)\w*[=:] *[\"']?(\S+)", path.read_text()
        )
        kept = [
            v for v in found if not v.startswith(("${", "{", "...", "quire-", "api-", "hf-", "/"))
        ]
        assert not [v for v in kept if re.fullmatch(r"[\w-]{12,}", v)], path


def test_all_yaml_and_json_parses():
    for path in DEPLOY.rglob("*.yaml"):
        assert path.parent.name == "templates" or yaml_of(path), path
    for path in DEPLOY.rglob("*.json"):
        assert json.loads(path.read_text()), path


# -- Dockerfile -----------------------------------------------------------------------------------


def test_each_image_ends_as_a_user_who_is_not_root():
    for target in ("cpu", "cuda"):
        users = [rest for stage, word, rest in DOCKERFILE if stage == target and word == "USER"]
        assert users == ["10001:10001"], target


def test_copied_files_exist_and_are_not_ignored():
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for _, word, rest in DOCKERFILE:
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in let_in, source


def test_base_images_are_pinned_and_caches_are_not_kept():
    for _, word, rest in DOCKERFILE:
        assert word != "ADD"
        if word == "FROM" and ":" in rest:
            assert not rest.split()[0].endswith(":latest")
        for command in rest.split("&&") if word == "RUN" else ():
            assert "pip install" not in command or "--no-cache-dir" in command
            assert "apt-get install" not in command or "--no-install-recommends" in command


def test_the_extras_that_the_image_installs_exist():
    project = (ROOT / "pyproject.toml").read_text()
    shown = re.findall(r"EXTRAS=([\w,]+)", (DEPLOY / "Dockerfile").read_text())
    assert shown == ["otel,ray", "otel"]
    for extra in ",".join(shown).split(","):
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    installs = [rest for _, word, rest in DOCKERFILE if word == "RUN" and ".[" in rest]
    assert all('".[$EXTRAS]"' in one for one in installs)
    assert len(installs) == 2


def test_the_image_checks_its_health_at_an_existing_route():
    (check,) = [rest for _, word, rest in DOCKERFILE if word == "HEALTHCHECK"]
    assert json.loads(check.partition("CMD ")[2]) == ["python", "/opt/healthcheck.py"]
    assert ("run", "COPY", "deploy/healthcheck.py /opt/healthcheck.py") in DOCKERFILE
    assert "/health" in routes()


def test_the_torch_of_the_cuda_image_is_the_measured_one():
    """Another than that of constraints.txt, with which the CPU image and the tests run."""
    pins = [re.findall(r"torch==([\d.]+)", rest) for stage, _, rest in DOCKERFILE]
    (pinned,) = [version for found in pins for version in found]
    measured = (ROOT / "docs/performance.md").read_text()
    assert f"torch {pinned}+cu130" in measured
    least = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert [*map(int, pinned.split("."))] >= [*map(int, least.split("."))]


# -- compose --------------------------------------------------------------------------------------


def test_compose_gives_running_requests_their_time_and_opens_ports_here_only():
    for one in OURS.values():
        timeout = serve_flags.parse(one["command"][1:])[1].shutdown_timeout
        assert seconds(one["stop_grace_period"]) >= timeout + LAST_WORDS_S
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
    for one in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in one["ports"])


def test_what_compose_mounts_and_builds_exists():
    stages = {stage for stage, _, _ in DOCKERFILE}
    for one in COMPOSE["services"].values():
        for volume in one.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (
                (DEPLOY / source).exists()
                if source.startswith(".")
                else source in COMPOSE["volumes"]
            )
        if "build" in one:
            assert one["build"]["target"] in stages
            assert one["image"].partition(":")[2] == one["build"]["target"]


# -- Kubernetes -----------------------------------------------------------------------------------


def test_probes_use_existing_routes_at_the_served_port():
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = CONTAINER[kind]["httpGet"]
        assert probe["path"] in routes(), kind
        assert ports[probe["port"]] == serve_flags.parse(CONTAINER["args"][1:])[1].port
    assert BASE["Service"]["spec"]["ports"][0]["targetPort"] in ports


@pytest.mark.parametrize("args", [CONTAINER["args"], GPU_ARGS], ids=["base", "gpu"])
def test_a_pod_is_killed_only_after_running_requests_had_their_time(args):
    before = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    needs = before + serve_flags.parse(args[1:])[1].shutdown_timeout + LAST_WORDS_S
    assert POD["terminationGracePeriodSeconds"] >= needs


def test_a_pod_has_few_rights():
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_what_a_pod_writes_to_is_mounted():
    assert {one["mountPath"] for one in CONTAINER["volumeMounts"]} == {"/cache", "/tmp"}
    assert {one["name"] for one in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}
    claim = POD["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert BASE["PersistentVolumeClaim"]["metadata"]["name"] == claim


def test_selectors_choose_the_pods():
    labels = BASE["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for chosen in (
        BASE["Deployment"]["spec"]["selector"]["matchLabels"],
        BASE["Service"]["spec"]["selector"],
        BASE["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        NETWORK["spec"]["podSelector"]["matchLabels"],
    ):
        assert chosen.items() <= labels.items()


def test_the_scaler_reads_the_metric_that_the_adapter_offers():
    (scaler,) = yaml_of(KUBERNETES / "autoscale/scaler.yaml")
    (rules,) = yaml_of(KUBERNETES / "autoscale/adapter-rule.yaml")
    (rule,) = rules["rules"]["custom"]
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    name = re.search(r"__name__=\"quire:(\w+)\"", rule["seriesQuery"])[1]
    assert name in {metric.name for metric in metric_specs.ALL_METRICS}


def test_the_pods_of_a_group_are_a_head_and_its_nodes():
    group, service = yaml_of(KUBERNETES / "leaderworkerset/leaderworkerset.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    found = {}
    for role, index in (("leader", 0), ("worker", 1)):
        pod = template[f"{role}Template"]
        (container,) = pod["spec"]["containers"]
        values = {
            "LWS_GROUP_SIZE": template["size"], "LWS_WORKER_INDEX": index,
            "LWS_LEADER_ADDRESS": "quire-0.quire", "QUIRE_HOST_IP": "10.0.0.1",
        }  # fmt: skip
        words = [re.sub(r"\$\((\w+)\)", lambda m: str(values[m[1]]), w) for w in container["args"]]  # noqa: B023
        options = serve_flags.parse(words[1:])[0].parallel
        assert options.node_rank == index
        assert options.headless == (role == "worker")
        assert options.nnodes == options.pipeline_parallel_size == template["size"]
        assert (
            str(options.tensor_parallel_size) == container["resources"]["limits"]["nvidia.com/gpu"]
        )
        mounted = {one["mountPath"] for one in container["volumeMounts"]}
        assert mounted == {"/cache", "/tmp", "/dev/shm"}
        assert {one["name"] for one in container["env"]} == {
            "QUIRE_HOST_IP",
            "QUIRE_CLUSTER_SECRET",
        }
        found[role] = serve_flags.parse(words[1:])[0].model
        assert pod["metadata"]["labels"]["role"] == role
    assert found["leader"] == found["worker"]
    assert service["spec"]["selector"]["role"] == "leader"
    assert (
        service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/name"] == group["metadata"]["name"]
    )


GATEWAY = {
    name: yaml_of(KUBERNETES / f"gateway/{name}.yaml")[0]
    for name in ("pool", "route", "orca-route")
}


def test_the_gateway_sends_requests_to_the_pods():
    pool = GATEWAY["pool"]
    assert pool["spec"]["selector"] == BASE["Deployment"]["spec"]["selector"]
    served = serve_flags.parse(CONTAINER["args"][1:])[1].port
    assert pool["spec"]["targetPorts"] == [{"number": served}]
    (backend,) = GATEWAY["route"]["spec"]["rules"][0]["backendRefs"]
    group = pool["apiVersion"].partition("/")[0]
    assert backend == {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}
    (backend,) = GATEWAY["orca-route"]["spec"]["rules"][0]["backendRefs"]
    service = BASE["Service"]
    assert backend == {
        "name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"],
    }  # fmt: skip


def test_the_gateway_reads_metrics_and_headers_that_exist():
    names = {metric.name for metric in metric_specs.ALL_METRICS if not metric.is_quire_only}
    text = (KUBERNETES / "gateway/pool.yaml").read_text()
    assert set(re.findall(r"vllm:(\w+)", text)) <= names
    (change,) = GATEWAY["orca-route"]["spec"]["rules"][0]["filters"]
    (header,) = change["requestHeaderModifier"]["set"]
    assert header == {"name": load_header.REQUEST_HEADER, "value": "TEXT"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("part", PARTS)
def test_kustomize_builds_it(part, tmp_path):
    run = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / part)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    made = list(yaml.safe_load_all(run.stdout))
    kinds = {one["kind"] for one in made}
    assert {"Deployment", "Service", "PodDisruptionBudget"} <= kinds
    extra = {"NetworkPolicy", "ServiceMonitor", "PrometheusRule"}
    assert kinds & extra == (extra if part == "example" else set())
    if importlib.util.find_spec("kubernetes_validate") is not None:
        import kubernetes_validate

        for one in (one for one in made if one["apiVersion"] != OPERATOR):
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_gateway_is_a_component_of_any_overlay(tmp_path):
    base, gateway = (os.path.relpath(KUBERNETES / name, tmp_path) for name in ("base", "gateway"))
    overlay = {"resources": [base], "components": [gateway]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    command = ["kubectl", "kustomize", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    kinds = [one["kind"] for one in yaml.safe_load_all(run.stdout)]
    assert {"InferencePool", "HTTPRoute", "Deployment"} <= {*kinds}
    assert kinds.count("HTTPRoute") == 1  # one of the two


# -- metrics --------------------------------------------------------------------------------------


def test_alerts_query_metrics_that_exist_and_are_the_same_everywhere():
    (rules,) = yaml_of(DEPLOY / "observe/alerts.yaml")
    (operator,) = yaml_of(KUBERNETES / "monitoring/alerts.yaml")
    assert operator["spec"]["groups"] == rules["groups"]
    names = {metric.name for metric in metric_specs.ALL_METRICS}
    for group in rules["groups"]:
        for rule in group["rules"]:
            for name in re.findall(r"quire:(\w+)", rule["expr"]):
                assert names & {name, re.sub("_(total|bucket|sum|count)$", "", name)}, name


def test_what_is_scraped_without_a_key_is_served_without_one():
    for name, words in COMMANDS.items():
        if name.startswith(("pod", "gpu pod", "compose")):
            assert serve_flags.parse(words[1:])[1].public_metrics, name
    (config,) = yaml_of(DEPLOY / "observe/prometheus.yaml")
    targets = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert {one.partition(":")[0] for one in targets} == set(OURS)


def test_a_profile_of_compose_starts_one_server():
    profiles = [one["profiles"] for one in OURS.values()]
    assert sorted(profiles) == [["cpu"], ["gpu"]]


# -- Helm -----------------------------------------------------------------------------------------

CHART = DEPLOY / "helm/quire"


def rendered(**values):
    """The resources of the chart. Fills the few forms that its templates use, as helm does."""
    given = yaml.safe_load((CHART / "values.yaml").read_text()) | values

    def value(path):
        if path == ".Release.Name":
            return "chat"
        found = given
        for part in path.removeprefix(".Values.").split("."):
            found = found[part]
        return found

    def expression(found):
        path, _, form = (part.strip() for part in found[1].partition("|"))
        return json.dumps(str(value(path))) if form == "quote" else str(value(path))

    def condition(found):
        return found[2] if value(found[1]) else ""

    def each(found):
        return "".join(found[2].replace("{{ . | quote }}", json.dumps(x)) for x in value(found[1]))

    made = []
    for path in sorted((CHART / "templates").iterdir()):
        text = path.read_text()
        for word, fill in (("range", each), ("if", condition)):
            block = rf"\n *\{{\{{- {word} (\S+) \}}\}}(.*?)\n *\{{\{{- end \}}\}}"
            text = re.sub(block, fill, text, flags=re.S)
        text = re.sub(r"\{\{ (.*?) \}\}", expression, text)
        assert "{{" not in text, path
        made += yaml.safe_load_all(text)
    return {one["kind"]: one for one in made}


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_chart_has_the_pod_of_the_base(gpus):
    made = rendered(gpus=gpus, model="Qwen/Qwen3-8B", args=["--max-model-len", "8192"])
    pod = made["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options, server = serve_flags.parse(container["args"][1:])
    assert (options.model.model, options.model.max_model_len) == ("Qwen/Qwen3-8B", 8192)
    assert (server.host, server.port, server.public_metrics) == ("0.0.0.0", 8000, True)
    same = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "securityContext",
            "ports", "volumeMounts")  # fmt: skip
    assert {name: container[name] for name in same} == {name: CONTAINER[name] for name in same}
    assert pod["securityContext"] == POD["securityContext"]
    assert pod["terminationGracePeriodSeconds"] == POD["terminationGracePeriodSeconds"]
    assert ("nvidia.com/gpu" in container["resources"]["limits"], "tolerations" in pod) == (
        bool(gpus), bool(gpus),
    )  # fmt: skip
    claim = made["PersistentVolumeClaim"]["metadata"]["name"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
    if importlib.util.find_spec("kubernetes_validate") is not None:
        import kubernetes_validate

        for one in made.values():
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_the_chart_selects_its_own_pods_and_monitors_on_request():
    assert "ServiceMonitor" not in rendered()
    made = rendered(serviceMonitor=True)
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["Service"]["spec"]["selector"] == labels == made["Service"]["metadata"]["labels"]
    assert made["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == labels


# -- pages about others -----------------------------------------------------------------------------


def test_what_the_pages_of_deploy_show_is_taken_by_quire():
    shown = [block for block in all_blocks() if block.page.startswith("docs/deploy/")]
    for block in shown:
        if block.kind == "yaml":
            for found in re.findall(r"args: (\[serve,.*\])", block.text):
                serve_flags.parse(yaml.safe_load(found)[1:])
            assert yaml.safe_load(block.text)
        elif block.kind == "python":
            compile(block.text, block.where, "exec")
    assert {block.kind for block in shown} == {"sh", "yaml", "python", "nginx"}


# -- systemd --------------------------------------------------------------------------------------


def test_the_unit_gives_running_requests_their_time():
    timeout = serve_flags.parse(EXEC[2:])[1].shutdown_timeout
    assert int(dict(SETTINGS)["TimeoutStopSec"]) >= timeout + LAST_WORDS_S


def test_each_setting_of_the_unit_is_given_once():
    names = [name for name, _ in SETTINGS if name not in ("DeviceAllow", "After", "Wants")]
    assert len(names) == len(set(names))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_the_unit_sound_and_its_exposure_low(tmp_path):
    unit = tmp_path / "quire.service"
    unit.write_text(UNIT.replace(EXEC[0], shutil.which("true")))
    run = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    run = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-200:]
