"""Compares replies through Dynamo with direct ones, and checks which server gets a request; see README.md."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
sys.path.append(str(REPOSITORY / "tests"))

from serving import MODEL, TIMEOUT_S, Client, Server, free_ports, until, write_model  # noqa: E402

PREFIX = "the quick brown fox jumps over the lazy dog and runs away " * 2


@contextlib.contextmanager
def process(log, environment, *command):
    """Runs a Python program of Dynamo in the `with` block."""
    with open(log, "wb") as output:
        words = [sys.executable, *map(str, command)]
        started = subprocess.Popen(words, env={**os.environ, **environment}, stdout=output, stderr=output)
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                started.kill()


def add_tokenizer_config(model):
    """Adds the file that Dynamo needs beside those of the tiny model."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    config["chat_template"] = (model / "chat_template.jinja").read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def serves(client):
    try:
        return bool(client.get("/v1/models").json["data"])
    except OSError:
        client.local.connection = None
        return False


@contextlib.contextmanager
def dynamo(folder, model, servers, endpoints, mode):
    """Starts a worker for each server, and a frontend; gives its client."""
    (port,) = free_ports(1)
    folder.mkdir()
    found = {"DYN_FILE_KV": str(folder / "found"), "DYN_SELF_HOST_METADATA": "0", "HF_HUB_OFFLINE": "1"}
    with contextlib.ExitStack() as stack:
        for i, (server, endpoint) in enumerate(zip(servers, endpoints)):
            flags = ["--url", server.url, "--model-path", model, "--kv-events", endpoint]
            stack.enter_context(process(folder / f"worker{i}.log", found, FOLDER / "pellucid_dynamo.py", *flags))
        flags = ["--http-port", port, "--discovery-backend", "file", "--router-mode", mode]
        flags += ["--kv-cache-block-size", 32]
        stack.enter_context(process(folder / "frontend.log", found, "-m", "dynamo.frontend", *flags))
        client = Client(f"http://127.0.0.1:{port}")
        until(lambda: serves(client), f"Dynamo does not find the workers; see {folder}")
        # The second worker may be found a little later than the first.
        time.sleep(2)
        yield client


def cached_tokens(client, prompt, **fields):
    reply = client.complete(prompt, **fields)
    assert reply.status == 200, reply
    # Events take a moment to arrive.
    time.sleep(0.3)
    return (reply.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def texts(chunks):
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces)


def check_bytes(client, server):
    count = 0
    for i in range(12):
        fields = {"temperature": 0.9 if i % 2 else 0, "seed": i, "max_tokens": 30}
        if i % 3 == 0:
            fields["stop"] = ["e"]
        for ask in (Client.complete, Client.chat):
            found, expected = (ask(target, f"{i} hello", **fields).json for target in (client, server))
            assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"], (found, expected)
            shown = [(choice.get("text"), (choice.get("message") or {}).get("content"), choice["finish_reason"])
                     for choice in (found["choices"][0], expected["choices"][0])]
            assert shown[0] == shown[1], (fields, shown)
            streams = [texts(ask(target, f"{i} hello", stream=True, **fields).chunks) for target in (client, server)]
            assert streams[0] == streams[1] == (shown[0][0] or shown[0][1] or ""), (fields, streams)
            count += 2
    print(f"equal bytes: {count} replies, whole and streamed")


def main():
    binaries = REPOSITORY / "target" / (sys.argv[1] if len(sys.argv) > 1 else "debug")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = write_model(binaries, folder / "model", "1024", "words")
        add_tokenizer_config(model)
        endpoints = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
        servers = [stack.enter_context(Server(binaries, model, "--kv-events", endpoint)) for endpoint in endpoints]
        with dynamo(folder / "kv", model, servers, endpoints, "kv") as client:
            check_bytes(client, servers[0])
            found = [cached_tokens(client, f"{PREFIX}{i}", max_tokens=1) for i in range(10)]
            assert found[0] == 0 and min(found[1:]) > 0, found
            print(f"routed by KV events: cached tokens {found}")
            salted = [cached_tokens(client, f"{PREFIX}{i}", max_tokens=1, cache_salt=f"salt {i}") for i in range(4)]
            assert salted == [0] * 4, salted
            print(f"a new cache_salt each time: cached tokens {salted}")
            text = client.chat("hello", guided_regex="[ab]{6}").json["choices"][0]["message"]["content"]
            assert len(text) == 6 and set(text) <= {"a", "b"}, text
            print(f"guided decoding: {text!r}")
            reply = client.complete("hello", n=2)
            assert reply.status >= 400, reply
            print(f"n = 2 is refused: {reply.status}")
        with dynamo(folder / "round", model, servers, endpoints, "round-robin") as client:
            other = "another beginning of a prompt that no server has seen so far, long enough for some blocks "
            found = [cached_tokens(client, f"{other}{i}", max_tokens=1) for i in range(2)]
            assert found == [0, 0], found
            print(f"control, round robin: cached tokens {found}")


if __name__ == "__main__":
    main()
