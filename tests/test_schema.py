"""Schemathesis on the OpenAPI document: every phase and every check, on a server without keys and on one with keys."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ALICE
from serving import MODEL, TIMEOUT_S, Server, tenant

CONFIG = Path(__file__).parent / "schemathesis.toml"


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_server_follows_its_openapi_document(binaries, model, tmp_path, pytestconfig, has_keys):
    tenants = [tenant("alice", ALICE)] if has_keys else None
    # Without a timeout, replies without max_tokens would run to the end of the context.
    # It tries wrong keys on every route, all from one address.
    flags = ["--request-timeout", "1", "--max-wrong-keys", "1000000"]
    with Server(binaries, model, *flags, tenants=tenants) as server:
        command = [
            Path(sys.executable).parent / "schemathesis",
            "--config-file",
            CONFIG,
            "run",
            server.url + "/openapi.json",
        ]
        command += ["--phases", "examples,coverage,fuzzing,stateful", "--seed", "1", "--no-color"]
        command += ["--max-examples", pytestconfig.getoption("--examples"), "--request-timeout", TIMEOUT_S]
        if has_keys:
            command += ["--header", f"Authorization: Bearer {ALICE}"]
        ran = subprocess.run([str(word) for word in command], cwd=tmp_path, capture_output=True, text=True)
        print(ran.stdout)
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr
        assert server.get("/health").status == 200, "the server is still alive"
        assert server.metric("pellucid_kv_blocks_in_use", key=ALICE if has_keys else None) == 0
