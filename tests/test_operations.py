"""Operation of the built program: signals, TLS, logs, slow readers, and the WebSocket with a client library."""

import http.client
import json
import signal
import socket
import ssl
import time

import httpx
import openai
import pytest
import trustme
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from conftest import ALICE, BOB
from serving import MODEL, TIMEOUT_S, Server, tenant

LONG = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 3000,
    "ignore_eos": True,
    "seed": 1,
}


class Stream:
    """A streamed reply; iterates over its events."""

    def __init__(self, server):
        self.connection = server.connect()
        body = json.dumps({**LONG, "stream": True})
        self.connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        self.response = self.connection.getresponse()
        assert self.response.status == 200

    def __iter__(self):
        for line in self.response:
            if line.startswith(b"data: "):
                yield line[len(b"data: "):].strip().decode()


def test_a_signal_drains_the_server(binaries, model):
    with Server(binaries, model) as server:
        whole = server.chat(**{name: value for name, value in LONG.items() if name != "messages"}).json
        events = iter(Stream(server))
        seen = [next(events) for _ in range(3)]
        server.process.send_signal(signal.SIGTERM)
        # Until the server has handled the signal, requests may still be accepted.
        while (refused := server.chat(max_tokens=1)).status == 200:
            pass
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("/health").status == 200 and server.get("/ready").status == 503
        seen += events
        assert seen[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in seen[:-1])
        assert text == whole["choices"][0]["message"]["content"], "the reply in flight is completed, to the byte"
        assert server.end() == 143


def test_a_second_signal_stops_the_server_at_once(binaries, model):
    with Server(binaries, model) as server:
        events = iter(Stream(server))
        next(events)
        server.process.send_signal(signal.SIGTERM)
        while server.get("/ready").status == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        last = list(events)[-1]
        assert json.loads(last)["error"]["code"] == "shutting_down", "an error event, and no [DONE]"
        assert server.end() == 143
        assert "shut down before every reply was finished" in "".join(server.log)


def test_https(binaries, model, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with Server(binaries, model, "--tls-cert", chain, "--tls-key", key, tls=trusting) as server:
        assert server.url.startswith("https://")
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", http_client=httpx.Client(verify=trusting))
        whole = server.chat()
        assert whole.status == 200
        streamed = client.completions.create(model=MODEL, prompt="hello", max_tokens=8, seed=1, stream=True)
        text = "".join(chunk.choices[0].text for chunk in streamed)
        assert text == server.complete().json["choices"][0]["text"]
        with pytest.raises(ssl.SSLCertVerificationError):
            other = http.client.HTTPSConnection(
                server.host, server.port, timeout=TIMEOUT_S, context=ssl.create_default_context()
            )
            other.request("GET", "/health")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)
            plain.request("GET", "/health")
            plain.getresponse()


def test_the_log_contains_no_text_and_no_keys(binaries, model):
    word = "xyzzy"
    with Server(binaries, model, "--log-level", "debug", tenants=[tenant("alice", ALICE)]) as server:
        reply = server.chat(word, key=ALICE, user=word, stop=[word], cache_salt=word)
        assert reply.status == 200
        said = reply.json["choices"][0]["message"]["content"]
        server.complete(word, key=ALICE, echo=True)
        server.post("/tokenize", {"prompt": word}, key=ALICE)
        assert server.chat(word, key=BOB).status == 401
        assert server.chat(word, key=ALICE, temperature=9).status == 400
        assert server.chat(word, key=ALICE, **{word: 1}).status == 400
        assert server.ask("GET", f"/{word}?key={word}", key=ALICE).status == 404
        server.process.send_signal(signal.SIGTERM)
        server.end()
    lines = [json.loads(line) for line in server.log]
    log = "".join(server.log)
    for secret in (word, ALICE, BOB, said):
        assert secret not in log, f"{secret!r} is in the log"
    ids = {line["request_id"] for line in lines if line.get("message") == "request"}
    assert len(ids) == 7 and {"alice"} == {line["tenant"] for line in lines if line.get("message") == "reply"}
    assert reply.headers["x-request-id"] in ids, "positive control: the request is in the log, with its id"


def messages(socket):
    """Iterates over the remaining messages until the connection closes."""
    try:
        for message in socket:
            yield message if message == "[DONE]" else json.loads(message)
    except ConnectionClosed:
        return


def text_of(chunks):
    return "".join(
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in chunks
        if chunk != "[DONE]" and chunk.get("choices")
    )


def test_a_websocket_sends_the_same_chunks_as_a_stream(guarded):
    url = guarded.url.replace("http", "ws") + "/v1/stream"
    whole = guarded.chat(key=ALICE, max_tokens=40).json
    request = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "seed": 1}
    with connect(url, additional_headers={"Authorization": f"Bearer {ALICE}"}) as socket:
        socket.send(json.dumps(request))
        *chunks, usage, done = messages(socket)
    assert done == "[DONE]"
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for headers in ({}, {"Authorization": "Bearer not-a-key"}):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers)
        assert refused.value.response.status_code == 401


def test_a_websocket_applies_control_messages(server):
    a, b = (server.tokens(prompt=letter, add_special_tokens=False)[0] for letter in "ab")
    with connect(server.url.replace("http", "ws") + "/v1/stream") as socket:
        send = lambda kind, **fields: socket.send(json.dumps({"type": kind, **fields}))
        answers = messages(socket)
        until = lambda kind: next(message for message in answers if message.get("type") == kind)
        socket.send(json.dumps({**LONG, "allowed_token_ids": [a]}))
        next(answers)
        assert text_of([next(answers)]) == "a"
        send("pause")
        count = until("paused")["output_tokens"]
        assert 0 < count < 3000
        send("update", allowed_token_ids=[b])
        assert next(answers) == {"type": "updated", "output_tokens": count}, "no token was computed during the pause"
        send("update", seed=5)
        assert next(answers)["error"]["param"] == "seed"
        send("resume")
        assert next(answers) == {"type": "resumed", "output_tokens": count}
        assert text_of([next(answers)]) == "b", "the new parameters apply from the next token on"
        send("cancel")
        until("cancelled")
        assert list(answers) == []
    assert server.chat(max_tokens=1).status == 200


def resident_bytes(server):
    with open(f"/proc/{server.process.pid}/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def test_slow_readers_take_little_memory_and_affect_no_other_request(binaries, model):
    """Eight clients request replies of many megabytes and read nothing."""
    body = json.dumps({**LONG, "stream": True, "logprobs": True, "top_logprobs": 20, "trace": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with Server(binaries, model, "--write-timeout", "5") as server:
        alone = server.chat().json["choices"]
        before = resident_bytes(server)
        slow = []
        for _ in range(8):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((server.host, server.port))
            client.sendall(head.encode() + body)
            slow.append(client)
        deadline = time.monotonic() + TIMEOUT_S
        steps = -1
        # Wait until all eight are blocked: then the number of steps no longer grows.
        while steps != (steps := server.metric("pellucid_steps_total")):
            assert time.monotonic() < deadline
            time.sleep(0.3)
        assert server.metric("pellucid_sequences_running") == 8, "positive control: all eight are running"
        tokens = server.metric("pellucid_computed_output_tokens_total")
        assert tokens < 8 * 3000 / 2, "positive control: none is near its end"
        grown = resident_bytes(server) - before
        assert grown < 8 * 4 * 2**20, f"each takes {grown / 8 / 2**20:.1f} MiB"
        for _ in range(5):
            assert server.chat().json["choices"] == alone
        # After the write timeout the server drops them and releases their blocks.
        while server.metric("pellucid_kv_blocks_in_use") > 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for client in slow:
            client.close()
