"""Schemathesis on the OpenAPI document: every phase and every check, on a server without keys, on one with keys, and on
one whose model computes vectors."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ALICE
from serving import MODEL, TIMEOUT_S, Server, tenant

CONFIG = Path(__file__).parent / "schemathesis.toml"


# A tiny encoder with random weights, which the Rust tests use too.
ENCODER = Path(__file__).parent.parent / "crates/selftest/fixtures/encoders/bert"


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_server_follows_its_openapi_document(binaries, model, tmp_path, pytestconfig, has_keys):
    # Without a timeout, replies without max_tokens would run to the end of the context.
    search(binaries, model, tmp_path, pytestconfig, "--request-timeout", "1", key=ALICE if has_keys else None)


def test_a_server_for_vectors_follows_its_openapi_document(binaries, tmp_path, pytestconfig):
    found, operations = search(binaries, ENCODER, tmp_path, pytestconfig)
    assert {("post", path) for path in ["/v1/embeddings", "/v1/rerank", "/api/embed"]} <= operations
    assert f"Tested: {len(operations)}\n" in found, "every operation is tested"


def test_keep_alive_is_read_as_the_document_says(binaries):
    texts = ["5m", "1h30m", "-1", "+5.m", ".5h", "90", "5.", "5µs", "5μs", "9" * 400]
    wrong = ["", "m", "5 m", "1h30", "1..5s", ".", "+-5", "1e5", "inf", "NaN"]
    with Server(binaries, ENCODER) as server:
        schemas = server.get("/openapi.json").json["components"]["schemas"]
        for name in ["OllamaEmbedRequest", "OllamaChatRequest"]:
            pattern = schemas[name]["properties"]["keep_alive"]["anyOf"][0]["pattern"]
            assert [text for text in texts + wrong if re.search(pattern, text)] == texts, name
        for text in texts + wrong:
            reply = server.post("/api/embed", {"model": MODEL, "input": "a", "keep_alive": text})
            assert reply.status == (200 if text in texts else 400), (text, reply.body)


def search(binaries, model, folder, pytestconfig, *flags, key=None):
    """Runs Schemathesis against a server, with the key of a tenant if there is one. Returns what it prints, and the
    operations of the document."""
    tenants = [tenant("alice", key)] if key else None
    # It tries wrong keys on every route, all from one address.
    with Server(binaries, model, *flags, "--max-wrong-keys", "1000000", tenants=tenants) as server:
        command = [
            Path(sys.executable).parent / "schemathesis",
            "--config-file",
            CONFIG,
            "run",
            server.url + "/openapi.json",
        ]
        command += ["--phases", "examples,coverage,fuzzing,stateful", "--seed", "1", "--no-color"]
        command += ["--max-examples", pytestconfig.getoption("--examples"), "--request-timeout", TIMEOUT_S]
        if key:
            command += ["--header", f"Authorization: Bearer {key}"]
        ran = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
        print(ran.stdout)
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr
        assert server.get("/health").status == 200, "the server is still alive"
        if "pellucid_kv_blocks_in_use" in server.get("/metrics", key=key).body.decode():
            # Background responses end within the time limit of a request.
            deadline = time.monotonic() + TIMEOUT_S
            while server.metric("pellucid_kv_blocks_in_use", key=key) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert server.metric("pellucid_kv_blocks_in_use", key=key) == 0
        paths = server.get("/openapi.json", key=key).json["paths"]
        return ran.stdout, {(method, path) for path, item in paths.items() for method in item}
