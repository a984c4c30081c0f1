"""Official clients of Anthropic and Ollama, and LiteLLM over both, used as in their documentation."""

import os
import subprocess

import anthropic
import litellm
import ollama
import pytest

from conftest import ALICE, LIMITED
from serving import MODEL, TIMEOUT_S

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def claude(guarded):
    return anthropic.Anthropic(base_url=guarded.url, api_key=ALICE, max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def message(claude):
    def message(**fields):
        return claude.messages.create(
            **{"model": MODEL, "messages": HELLO, "max_tokens": 24, "extra_body": {"seed": 7}, **fields}
        )

    return message


def test_a_message(claude, message):
    more = {"seed": 7, "temperature": 0.8, "top_k": 40}
    whole = message(system="be brief", stop_sequences=["xyzzy"], extra_body=more)
    assert whole.type == "message" and whole.role == "assistant"
    assert whole.content[0].type == "text" and whole.content[0].text
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert 0 < whole.usage.output_tokens <= 24
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="be brief")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_a_streamed_message_equals_the_whole_one(claude, message):
    whole = message()
    usual = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "extra_body": {"seed": 7}}
    with claude.messages.stream(**usual) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_prefilled_message_is_continued(message):
    first = message()
    again = message(messages=[*HELLO, {"role": "assistant", "content": "once upon"}])
    assert again.usage.output_tokens > 0 and again.content != first.content


def test_errors_are_those_of_anthropic(guarded, claude, message):
    with pytest.raises(anthropic.NotFoundError):
        message(model="other")
    with pytest.raises(anthropic.BadRequestError) as error:
        message(extra_body={"temperature": -1})
    assert "temperature" in error.value.message
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0).messages.create(
            model=MODEL, messages=HELLO, max_tokens=1
        )
    limited = anthropic.Anthropic(base_url=guarded.url, api_key=LIMITED, max_retries=0)
    with pytest.raises(anthropic.RateLimitError):
        for _ in range(3):
            limited.messages.create(model=MODEL, messages=HELLO, max_tokens=1)


@pytest.fixture(scope="module")
def llama(guarded):
    return ollama.Client(host=guarded.url, headers={"Authorization": f"Bearer {ALICE}"}, timeout=TIMEOUT_S)


def test_ollama_chat_and_generate(llama):
    options = {"seed": 7, "num_predict": 24, "temperature": 0.8}
    whole = llama.chat(MODEL, HELLO, options=options)
    assert whole.done and whole.message.role == "assistant" and whole.message.content
    pieces = list(llama.chat(MODEL, HELLO, options=options, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert pieces[-1].eval_count == whole.eval_count and pieces[-1].done_reason == whole.done_reason
    answered = llama.generate(MODEL, "hello", options=options)
    assert answered.response == whole.message.content, "a prompt is a chat of one message"
    raw = llama.generate(MODEL, "hello", raw=True, options=options)
    assert raw.prompt_eval_count < answered.prompt_eval_count


def test_ollama_formats_and_listings(llama):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    names = [model.model for model in llama.list().models]
    assert names == [MODEL]
    shown = llama.show(MODEL)
    assert "completion" in shown.capabilities
    assert llama.ps().models[0].model == MODEL
    with pytest.raises(ollama.ResponseError) as error:
        llama.chat("other", HELLO)
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as error:
        llama.chat(MODEL, HELLO, format={"type": "no"})
    assert "format" in error.value.error
    # The tiny model's vocabulary has no brackets, so that no reply can satisfy the schema.
    with pytest.raises(ollama.ResponseError):
        llama.chat(MODEL, HELLO, format=schema)


@pytest.mark.parametrize("provider", ["anthropic", "ollama_chat"])
def test_litellm(guarded, provider):
    base = guarded.url
    reply = litellm.completion(
        model=f"{provider}/{MODEL}", messages=HELLO, max_tokens=8, api_base=base, api_key=ALICE, timeout=TIMEOUT_S
    )
    assert reply.choices[0].message.content is not None
    assert 0 < reply.usage.completion_tokens <= 8


def test_clients_for_javascript(guarded, pytestconfig):
    modules = pytestconfig.getoption("--node-modules")
    if modules is None:
        pytest.skip("--node-modules is not given")
    script = os.path.join(os.path.dirname(__file__), "dialects.cjs")
    environment = {**os.environ, "NODE_PATH": str(modules.resolve())}
    ran = subprocess.run(
        ["node", script, guarded.url, ALICE], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
