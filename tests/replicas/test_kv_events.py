"""Events about the prefix cache over ZeroMQ, read with PyPI's `pyzmq` and `msgpack`."""

import errno
import socket
import subprocess
import time

import msgpack
import pytest
import zmq

from conftest import ALICE, BOB
from serving import MODEL, TIMEOUT_S, Server, free_ports, tenant, until

BLOCK = 32
PREFIX = "the quick brown fox jumps over the lazy dog and runs away " * 4


class Subscriber:
    def __init__(self, port, topic=b""):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.setsockopt(zmq.RCVTIMEO, 1000 * TIMEOUT_S)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def batch(self):
        """Returns topic, number and events of the next batch."""
        topic, number, payload = self.socket.recv_multipart()
        assert len(number) == 8
        moment, events, rank = msgpack.unpackb(payload)
        assert abs(moment - time.time()) < TIMEOUT_S and rank == 0
        return topic, int.from_bytes(number, "big"), events

    def events(self, holds):
        """Reads batches until `holds(events)`; checks that none is missing."""
        found, numbers = [], []
        while not holds(found):
            _, number, events = self.batch()
            numbers.append(number)
            found += events
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        return found

    def is_silent(self):
        return self.socket.poll(300) == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(0)


@pytest.fixture
def port():
    return free_ports(1)[0]


def subscribed(server, count=1, key=None):
    until(lambda: server.metric("pellucid_kv_event_subscribers", key) == count, "no subscriber")
    # The subscription follows the handshake.
    time.sleep(0.1)


def stored(events):
    return [event for event in events if event["type"] == "BlockStored"]


def ids_of(server, prompt, key=None, **fields):
    """Completes a prompt and returns its ids and those of the reply."""
    choice = server.complete(prompt, key, return_token_ids=True, **fields).json["choices"][0]
    return choice["prompt_token_ids"], choice["token_ids"]


def test_a_prompt_is_stored_as_a_chain_of_blocks(binaries, model, port):
    flags = ["--kv-events", f"tcp://127.0.0.1:{port}", "--kv-events-topic", "kv@one"]
    with Server(binaries, model, *flags) as server, Subscriber(port, b"kv@") as subscriber:
        with Subscriber(port, b"other") as other:
            subscribed(server, 2)
            prompt, reply = ids_of(server, PREFIX, max_tokens=40, ignore_eos=True)
            # Keys and values of the last token are not computed.
            num_blocks = (len(prompt) + len(reply) - 1) // BLOCK
            events = subscriber.events(lambda events: len(events) >= num_blocks)
            assert other.is_silent()
        assert len(events) == num_blocks and num_blocks > len(prompt) // BLOCK > 2
        fields = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
        assert all(list(event) == [*fields, "lora_name"] for event in events)
        assert sum((event["token_ids"] for event in events), []) == (prompt + reply)[:num_blocks * BLOCK]
        hashes = [None] + [hash for event in events for hash in event["block_hashes"]]
        assert [event["parent_block_hash"] for event in events] == hashes[:-1]
        assert len(set(hashes)) == num_blocks + 1 and all(event["block_size"] == BLOCK for event in events)
        # The same prompt stores nothing again; a longer one continues the chain.
        ids_of(server, PREFIX, max_tokens=1)
        longer, _ = ids_of(server, PREFIX + PREFIX, max_tokens=1)
        topic, number, (first, *_) = subscriber.batch()
        assert topic == b"kv@one" and number > 0 and first["parent_block_hash"] in hashes
        assert server.metric("pellucid_kv_event_batches_total") >= 2
        assert server.metric("pellucid_kv_event_batches_dropped_total") == 0


def test_evicted_blocks_are_removed(binaries, model, port):
    flags = ["--kv-events", f"tcp://127.0.0.1:{port}", "--context", "512", "--max-sequences", "1"]
    with Server(binaries, model, *flags) as server, Subscriber(port) as subscriber:
        subscribed(server)
        known = set()

        def apply(events):
            for event in events:
                hashes = set(event["block_hashes"])
                if event["type"] == "BlockStored":
                    assert event["parent_block_hash"] in known | {None} and not hashes & known
                    known.update(hashes)
                else:
                    assert event["type"] == "BlockRemoved" and hashes <= known
                    known.difference_update(hashes)

        num_blocks = server.metric("pellucid_kv_blocks")
        for i in range(12):
            ids_of(server, f"{i} {PREFIX}", max_tokens=1)
        removed = lambda events: any(event["type"] == "BlockRemoved" for event in events)
        apply(subscriber.events(removed))
        assert 0 < len(known) <= num_blocks


def test_nothing_of_other_tenants_and_salts_is_published(binaries, model, port):
    flags = ["--kv-events", f"tcp://127.0.0.1:{port}", "--kv-events-tenant", "alice"]
    tenants = [tenant("alice", ALICE, metrics=True), tenant("bob", BOB)]
    with Server(binaries, model, *flags, tenants=tenants) as server, Subscriber(port) as subscriber:
        subscribed(server, key=ALICE)
        ids_of(server, PREFIX, BOB)
        ids_of(server, PREFIX, ALICE, cache_salt="a user of Alice")
        assert subscriber.is_silent()
        # The control: the same prompt of Alice is published.
        prompt, _ = ids_of(server, PREFIX, ALICE, max_tokens=1)
        events = subscriber.events(lambda events: len(events) >= len(prompt) // BLOCK)
        assert sum((event["token_ids"] for event in events), []) == prompt[:len(events) * BLOCK]


def test_hashes_of_a_prompt_differ_between_servers(binaries, model, port):
    hashes = []
    for _ in range(2):
        flags = ["--kv-events", f"tcp://127.0.0.1:{port}"]
        with Server(binaries, model, *flags) as server, Subscriber(port) as subscriber:
            subscribed(server)
            ids_of(server, PREFIX, max_tokens=1)
            hashes.append(stored(subscriber.events(lambda events: len(events) >= 3))[0]["block_hashes"])
    assert hashes[0] != hashes[1]


def test_other_peers_are_refused_and_cost_nothing(binaries, model, port):
    with Server(binaries, model, "--kv-events", f"tcp://127.0.0.1:{port}") as server:
        for sent in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff" + bytes(63), bytes(1000), b""):
            with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as peer:
                peer.sendall(sent)
                # The greeting of the publisher, then the end: it may reset the connection at any of these calls.
                received = b""
                try:
                    peer.shutdown(socket.SHUT_WR)
                    while piece := peer.recv(4096):
                        received += piece
                except OSError as error:
                    assert error.errno in (errno.ECONNRESET, errno.ENOTCONN), error
                assert len(received) <= 64 + 40
        push = zmq.Context.instance().socket(zmq.PUSH)
        push.connect(f"tcp://127.0.0.1:{port}")
        with Subscriber(port) as subscriber:
            subscribed(server)
            ids_of(server, PREFIX, max_tokens=1)
            assert len(subscriber.events(lambda events: len(events) >= 3)) >= 3
        push.close(0)
        until(lambda: server.metric("pellucid_kv_event_subscribers") == 0, "a subscriber that left is kept")


def test_the_operator_must_choose_a_tenant_and_a_network(binaries, model, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[tenant]]\nname = "alice"\nkeys = ["{ALICE}"]\n')

    def refusal(*flags):
        command = [binaries / "pellucid", "serve", "--model", model, "--port", "0", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert ended.returncode == 2, ended
        return ended.stderr

    here = ["--kv-events", "tcp://127.0.0.1:0"]
    assert "--kv-events-tenant" in refusal(*here, "--keys-file", keys)
    assert "no tenant has this name" in refusal(*here, "--keys-file", keys, "--kv-events-tenant", "bob")
    assert "no tenant has this name" in refusal(*here, "--kv-events-tenant", "alice")
    assert "asks for no key" in refusal("--kv-events", "tcp://*:0")
    assert "tcp://127.0.0.1:5557" in refusal("--kv-events", "127.0.0.1:5557")
    assert "one model" in refusal(*here, "--model", f"second={model}")
