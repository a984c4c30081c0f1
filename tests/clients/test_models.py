"""Two models in one server that holds one at a time: the clients of OpenAI and Ollama switch between them."""

from concurrent.futures import ThreadPoolExecutor

import ollama
import openai
import pytest

from serving import TIMEOUT_S, Server, write_model

NAMES = ["first", "second"]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def two(binaries, model, tmp_path_factory):
    other = write_model(binaries, tmp_path_factory.mktemp("other"), "512")
    flags = ["--model", f"second,other-name={other}", "--max-models", "1"]
    with Server(binaries, f"first={model}", *flags, name=None) as server:
        yield server


@pytest.fixture(scope="module")
def client(two):
    return openai.OpenAI(base_url=two.url + "/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S)


def reply(client, name):
    return client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8, temperature=0)


def test_clients_switch_between_models(two, client):
    assert [card.id for card in client.models.list()] == ["first", "second", "other-name"]
    ours = ollama.Client(host=two.url, timeout=TIMEOUT_S)
    texts = {}
    for name in NAMES * 2:
        found = reply(client, name)
        assert found.model == name
        text = found.choices[0].message.content
        assert texts.setdefault(name, text) == text, "the same after the model was loaded again"
        assert [one.model for one in ours.ps().models] == [name], "one model at a time"
        options = {"num_predict": 8, "temperature": 0}
        assert ours.chat(model=name, messages=MESSAGES, options=options).message.content == text
    assert texts["first"] != texts["second"]
    assert reply(client, "other-name").model == "second"
    assert ours.show("first").modelinfo and ours.show("second").modelinfo
    with pytest.raises(openai.NotFoundError):
        reply(client, "third")


def test_requests_for_both_models_at_once_wait_for_each_other(two, client):
    expected = {name: reply(client, name).choices[0].message.content for name in NAMES}
    names = NAMES * 6
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: reply(client, name).choices[0].message.content, names))
    assert found == [expected[name] for name in names]
