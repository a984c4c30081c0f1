"""Options of the test run, and fixtures that several tests share."""

from pathlib import Path

import pytest

from serving import Server, tenant, write_model


def pytest_addoption(parser):
    repository = Path(__file__).parent.parent
    parser.addoption("--binaries", type=Path, default=repository / "target/debug", help="folder of the built programs")
    parser.addoption("--examples", default="10", help="number of Schemathesis examples per operation")
    parser.addoption("--structured-replies", default="300", help="number of replies that a JSON validator checks")
    parser.addoption("--agent-model", type=Path, help="a model that follows instructions, for test_agent.py")
    parser.addoption("--node-modules", type=Path, help="folder with the npm package openai")


@pytest.fixture(scope="session")
def binaries(pytestconfig):
    return pytestconfig.getoption("--binaries").resolve()


@pytest.fixture(scope="session")
def model(binaries, tmp_path_factory):
    """A tiny model with a long context and words of many lengths."""
    return write_model(binaries, tmp_path_factory.mktemp("model"), "4096", "words")


@pytest.fixture(scope="session")
def server(binaries, model):
    """A server without keys."""
    with Server(binaries, model) as server:
        yield server


ALICE, BOB, LIMITED = "alice-secret-key", "bob-secret-key", "limited-secret-key"


@pytest.fixture(scope="session")
def guarded(binaries, model):
    """A server with the tenants Alice and Bob, and one that is limited to one request per minute."""
    tenants = [tenant("alice", ALICE), tenant("bob", BOB), tenant("limited", LIMITED, requests_per_minute=1)]
    # The tests try many wrong keys, all from one address.
    with Server(binaries, model, "--max-wrong-keys", "1000000", tenants=tenants) as server:
        yield server
