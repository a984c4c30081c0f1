"""The manifests in packaging/kubernetes: valid by the schemas of Kubernetes, and true of the program."""

import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from conftest import ALICE
from serving import Server, tenant

FOLDER = Path(__file__).parents[2] / "packaging/kubernetes"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
# The names under which an endpoint picker finds the values of the protocol for model servers.
PICKER_METRICS = ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
PICKER_METRICS += ["vllm:cache_config_info", "vllm:lora_requests_info"]
PICKER_METRICS += ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"]


def container():
    (container,) = MANIFESTS["deployment"]["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name != "inference-pool"])
def test_a_manifest_is_valid(name):
    kubernetes_validate.validate(MANIFESTS[name], "1.37", strict=True)


def test_a_wrong_manifest_is_not():
    wrong = {**MANIFESTS["service"], "spec": {"ports": [{"prt": 1}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_manifests_select_the_same_pods_and_port():
    labels = MANIFESTS["deployment"]["spec"]["template"]["metadata"]["labels"]
    for name in ("deployment", "disruption-budget", "inference-pool"):
        assert MANIFESTS[name]["spec"]["selector"]["matchLabels"] == labels, name
    assert MANIFESTS["service"]["spec"]["selector"] == labels
    port = container()["ports"][0]["containerPort"]
    assert MANIFESTS["inference-pool"]["spec"]["targetPorts"] == [{"number": port}]
    assert MANIFESTS["service"]["spec"]["ports"][0]["port"] == port == 8000
    assert MANIFESTS["autoscaler"]["spec"]["scaleTargetRef"]["name"] == MANIFESTS["deployment"]["metadata"]["name"]


def test_flags_and_settings_are_those_of_the_program(binaries):
    command = [binaries / "pellucid", "serve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = [word for word in container()["args"] if word.startswith("--")]
    settings = {entry["name"]: entry["value"] for entry in container()["env"]}
    named = flags + ["--" + name.removeprefix("PELLUCID_").lower().replace("_", "-") for name in settings]
    assert len(named) == 6
    for flag in named:
        assert f"{flag} " in shown or f"{flag}\n" in shown, flag
    grace = MANIFESTS["deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(settings["PELLUCID_DRAIN_TIMEOUT"])


def test_probes_and_metrics_are_those_of_the_program(binaries, model):
    with Server(binaries, model, "--vllm-metrics", tenants=[tenant("alice", ALICE)]) as server:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            request = container()[probe]["httpGet"]
            headers = {header["name"]: header["value"].replace("PROBE_KEY", ALICE) for header in
                       request.get("httpHeaders", [])}
            assert server.get(request["path"], **headers).status == 200, probe
            assert (server.get(request["path"]).status == 200) == (not headers), "only what needs a key has one"
        server.complete("hello", ALICE)
        text = server.get("/metrics", key=ALICE).body.decode()
        (scaled,) = MANIFESTS["autoscaler"]["spec"]["metrics"]
        for name in [scaled["pods"]["metric"]["name"], *PICKER_METRICS]:
            assert any(line.split("{")[0].split(" ")[0] == name for line in text.splitlines()), name
