"""Vectors through the official clients of OpenAI and Ollama and through LiteLLM; only the base URL differs."""

from pathlib import Path

import litellm
import ollama
import openai
import pytest

from serving import MODEL, TIMEOUT_S, Server

# A tiny encoder with random weights, which the Rust tests use too.
ENCODER = Path(__file__).parent.parent.parent / "crates/selftest/fixtures/encoders/bert"
TEXTS = ["a cat on a mat", "the dog barks"]


@pytest.fixture(scope="module")
def vectors(binaries):
    with Server(binaries, ENCODER) as server:
        yield server


@pytest.fixture(scope="module")
def client(vectors):
    return openai.OpenAI(base_url=vectors.url + "/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S)


def test_openai(client):
    # Without a format, the client asks for Base64 and decodes it.
    plain = client.embeddings.create(model=MODEL, input=TEXTS)
    numbers = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [one.index for one in plain.data] == [0, 1]
    for one, other in zip(plain.data, numbers.data):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
        assert sum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-5)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 10
    card = client.models.retrieve(MODEL)
    assert card.capabilities == ["embeddings", "rerank"]


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MODEL, input="a", dimensions=5)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="none", input="a")
    with pytest.raises(openai.BadRequestError, match="generates text"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])


def test_ollama(client, vectors):
    expected = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    reply = ollama.Client(host=vectors.url).embed(model=MODEL, input=TEXTS)
    for one, other in zip(reply.embeddings, expected.data):
        assert list(one) == pytest.approx(other.embedding, abs=1e-7)


def test_litellm(client, vectors):
    expected = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    reply = litellm.embedding(model=f"openai/{MODEL}", input=TEXTS, api_base=vectors.url + "/v1", api_key="unused",
                              encoding_format="float")
    for one, other in zip(reply.data, expected.data):
        assert one["embedding"] == pytest.approx(other.embedding, abs=1e-7)
