"""Two servers behind a gateway that is not ours, the Shepherd Model Gateway (PyPI `smg`)."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ALICE, BOB
from serving import MODEL, TIMEOUT_S, Client, Server, free_ports, tenant, until

OPERATOR = "operator-secret-key"
# Longer than some blocks of the KV cache.
PREFIX = "the quick brown fox jumps over the lazy dog and runs away " * 12


class Gateway(Client):
    """A gateway that sends requests with one prefix to one worker."""

    def __init__(self, workers, folder):
        port, metrics_port = free_ports(2)
        command = [Path(sys.executable).parent / "smg", "launch", "--host", "127.0.0.1", "--port", port]
        command += ["--policy", "cache_aware", "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port]
        command += ["--health-check-interval-secs", 1, "--health-failure-threshold", 1, "--log-level", "warn"]
        self.log = open(folder / "gateway.log", "w+b")
        self.process = subprocess.Popen([str(word) for word in command], stdout=self.log, stderr=self.log, cwd=folder)
        super().__init__(f"http://127.0.0.1:{port}")
        until(self.answers, "the gateway does not start")
        for worker in workers:
            # The gateway asks for the worker's models with this key. Requests of clients keep their own keys.
            assert self.post("/workers", {"url": worker.url, "api_key": ALICE}).status == 202
        until(lambda: self.num_ready() == len(workers), "the gateway does not find its workers")

    def answers(self):
        assert self.process.poll() is None, Path(self.log.name).read_text()
        try:
            return self.get("/health", key=ALICE).status < 600
        except OSError:
            self.local.connection = None
            return False

    def num_ready(self):
        return sum(worker["status"] == "ready" for worker in self.get("/workers").json["workers"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.log.close()


@pytest.fixture
def pool(binaries, model, tmp_path):
    tenants = [tenant("alice", ALICE), tenant("bob", BOB), tenant("operator", OPERATOR, metrics=True)]
    with Server(binaries, model, tenants=tenants) as one, Server(binaries, model, tenants=tenants) as two:
        with Gateway([one, two], tmp_path) as gateway:
            yield gateway, [one, two]


def test_replies_are_the_same_bytes_through_the_gateway(pool):
    gateway, workers = pool
    for i in range(12):
        fields = {"temperature": 0.9 if i % 2 else 0, "seed": i, "logprobs": 3}
        replies = [server.complete(f"{i} hello", ALICE, **fields) for server in (gateway, *workers)]
        assert [reply.status for reply in replies] == [200] * 3, replies
        assert len({json.dumps(reply.json["choices"]) for reply in replies}) == 1, replies
        assert len({reply.json["system_fingerprint"] for reply in replies}) == 1, replies
    streams = [server.chat("hello", ALICE, stream=True, temperature=0.9).chunks for server in (gateway, *workers)]
    assert len({json.dumps([chunk["choices"] for chunk in chunks]) for chunks in streams}) == 1, streams


def test_tenants_stay_apart_by_their_own_keys(pool):
    gateway, _ = pool
    cached = lambda key: gateway.complete(PREFIX, key).json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached(ALICE) == 0
    assert cached(ALICE) > 0
    assert cached(BOB) == 0, "the prefix of another tenant"
    assert gateway.complete("hello", "no such key at all").status == 401


def test_requests_with_one_prefix_stay_on_one_worker(pool):
    gateway, _ = pool
    for i in range(8):
        usage = gateway.complete(f"{PREFIX}{i}", ALICE).json["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == (i > 0), (i, usage)


def test_a_killed_worker_loses_nothing_that_was_not_in_flight(pool):
    gateway, workers = pool
    expected = [gateway.complete(f"{i} hello", ALICE).json["choices"] for i in range(10)]
    workers[0].process.kill()
    for i, choices in enumerate(expected):
        reply = gateway.complete(f"{i} hello", ALICE)
        assert (reply.status, reply.json["choices"]) == (200, choices), reply


def test_a_drained_worker_completes_its_replies(pool):
    gateway, workers = pool
    connection = gateway.connect()
    body = {"model": MODEL, "prompt": PREFIX, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {ALICE}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    response.readline()
    busy = [worker for worker in workers if worker.metric("pellucid_sequences_running", OPERATOR)] or workers[:1]
    busy[0].process.send_signal(signal.SIGTERM)
    for i in range(10):
        assert gateway.complete(f"{i} hello", ALICE).status == 200
    assert response.read().endswith(b"data: [DONE]\n\n")
    # The status of a server that ended by this signal.
    assert busy[0].end() == 128 + signal.SIGTERM
