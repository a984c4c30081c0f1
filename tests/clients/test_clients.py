"""The official OpenAI clients, LangChain and LiteLLM, used as in their documentation; only the base URL differs."""

import os
import subprocess

import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI

from conftest import ALICE, LIMITED
from serving import MODEL, TIMEOUT_S

# A random model may end at any token; with its end token banned, lengths are known.
ENDLESS = {"logit_bias": {"2": -100}, "seed": 7}
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(guarded):
    return openai.OpenAI(base_url=guarded.url + "/v1", api_key=ALICE, max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def chat(client):
    def chat(**fields):
        return client.chat.completions.create(
            **{"model": MODEL, "messages": HELLO, "max_tokens": 24, **ENDLESS, **fields}
        )

    return chat


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_chat(chat):
    reply = chat()
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24
    assert reply.system_fingerprint.startswith("pellucid-")
    # Pellucid's own fields come beside those of OpenAI.
    assert reply.model_extra["pellucid"]["seed"] == 7


def test_a_stream_equals_the_whole_reply(chat):
    whole = chat()
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_fields_of_the_platform_change_nothing(chat):
    fields = {
        "metadata": {"topic": "demo"},
        "store": False,
        "service_tier": "auto",
        "user": "user-1",
        "safety_identifier": "user-1",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "in_memory",
        "parallel_tool_calls": False,
        "tools": [],
    }
    assert chat(**fields).choices[0].message.content == chat().choices[0].message.content
    assert chat(seed=-1).model_extra["pellucid"]["seed"] >= 0


def test_replies_can_be_sent_back(client, chat):
    """Replies can be sent back as the library's objects and as dictionaries; both contain null fields."""
    usual = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "logit_bias": {"2": -100}, "seed": 7}
    # `parse` and `stream` raise an error if `max_tokens` ends the reply, so these replies end with a stop string.
    ended = {**usual, "stop": chat(max_tokens=8).choices[0].message.content[4]}
    replies = [chat().choices[0].message, client.chat.completions.parse(**ended).choices[0].message]
    with client.chat.completions.stream(**ended) as stream:
        replies.append(stream.get_final_completion().choices[0].message)
    for reply in replies:
        for form in (reply, reply.model_dump(), {**reply.model_dump(), "annotations": []}):
            assert chat(messages=[*HELLO, form, HELLO[1]]).choices[0].message.content
    with pytest.raises(openai.BadRequestError) as refused:
        chat(messages=[*HELLO, {**replies[0].model_dump(), "annotations": [{"type": "url_citation"}]}, HELLO[1]])
    assert refused.value.param == "messages[2].annotations"


def test_logprobs(chat):
    reply = chat(logprobs=True, top_logprobs=5, temperature=0)
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == 24
    for token in tokens:
        assert len(token.top_logprobs) == 5
        assert token.top_logprobs[0].logprob == token.logprob < 0, "the greedy token is the most probable one"
    assert (
        b"".join(bytes(token.bytes) for token in tokens).decode().replace("▁", " ") == reply.choices[0].message.content
    )
    streamed = list(chat(logprobs=True, top_logprobs=5, temperature=0, stream=True))
    found = [
        token
        for chunk in streamed
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert found == tokens


def test_n_and_seed(chat):
    reply = chat(n=3)
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert texts == [chat(seed=seed).choices[0].message.content for seed in (7, 8, 9)]
    assert len(set(texts)) == 3, "different seeds give different texts"
    by_choice = ["", "", ""]
    for chunk in chat(n=3, stream=True):
        by_choice[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert by_choice == texts


def test_stop(chat):
    text = chat().choices[0].message.content
    stop = text[5:8]
    before = text[:text.index(stop)]
    reply = chat(stop=stop).choices[0]
    assert (reply.message.content, reply.finish_reason) == (before, "stop")
    chunks = list(chat(stop=["never said", stop], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_completions(client, guarded):
    def complete(**fields):
        return client.completions.create(
            **{"model": MODEL, "prompt": "once upon", "max_tokens": 6, **ENDLESS, **fields}
        )

    plain = complete().choices[0].text
    ids = guarded.tokens(prompt="once upon", key=ALICE)
    assert complete(prompt=ids).choices[0].text == plain
    assert [choice.text for choice in complete(prompt=["once upon", "once upon"]).choices] == [plain, plain]
    assert [choice.text for choice in complete(prompt=[ids, ids]).choices] == [plain, plain]
    echoed = complete(echo=True, logprobs=2).choices[0]
    assert echoed.text == "once upon" + plain
    marks = echoed.logprobs
    assert len(marks.tokens) == len(ids) + 6 == len(marks.token_logprobs) == len(marks.text_offset)
    assert marks.token_logprobs[0] is None and all(value <= 0 for value in marks.token_logprobs[1:])
    assert all(len(top) >= 2 for top in marks.top_logprobs[1:])
    scored = complete(echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].text == "once upon" and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs == marks.token_logprobs[:len(ids)]
    assert "".join(chunk.choices[0].text for chunk in complete(stream=True)) == plain
    best = complete(best_of=3, n=1)
    assert best.usage.completion_tokens == 18


def refusals(ask):
    """Returns invalid requests, each with the exception that the OpenAI client raises."""
    return [
        (lambda: ask(model="other"), openai.NotFoundError, "model_not_found", "model"),
        (lambda: ask(temperature=3), openai.BadRequestError, "out_of_range", "temperature"),
        (
            lambda: ask(tools=[{"type": "custom", "custom": {"name": "f"}}]),
            openai.BadRequestError,
            "unsupported_value",
            "tools[0].type",
        ),
        (lambda: ask(max_tokens=5000), openai.BadRequestError, "context_length_exceeded", "messages"),
        (lambda: ask(extra_body={"tempreature": 1}), openai.BadRequestError, "unknown_parameter", "tempreature"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_right_exceptions(chat, stream):
    for ask, kind, code, param in refusals(lambda **fields: chat(stream=stream, **fields)):
        with pytest.raises(kind) as refused:
            ask()
        assert (refused.value.code, refused.value.param) == (code, param), refused.value
        assert refused.value.request_id, "every reply has a request id"


def test_a_wrong_key_and_a_spent_limit(guarded, client):
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="not-a-key").models.list()
    assert refused.value.code == "invalid_api_key"
    limited = client.with_options(api_key=LIMITED).chat.completions
    limited.create(model=MODEL, messages=HELLO, max_tokens=1)
    with pytest.raises(openai.RateLimitError) as refused:
        limited.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert refused.value.code == "requests_per_minute"
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_langchain(guarded):
    def model(key=ALICE, **fields):
        return ChatOpenAI(
            model=MODEL, base_url=guarded.url + "/v1", api_key=key, max_retries=0, max_tokens=12, **ENDLESS, **fields
        )

    whole = model().invoke([("system", "be brief"), ("user", "hello")])
    assert whole.content and whole.usage_metadata["output_tokens"] == 12
    assert (
        "".join(piece.content for piece in model().stream([("system", "be brief"), ("user", "hello")])) == whole.content
    )
    assert [reply.content for reply in model(temperature=0).batch(["a", "b", "a"])][::2] == [
        model(temperature=0).invoke("a").content
    ] * 2
    scored = model(logprobs=True, top_logprobs=2).invoke("hello")
    assert len(scored.response_metadata["logprobs"]["content"]) == 12
    with pytest.raises(openai.AuthenticationError):
        model("not-a-key").invoke("hello")


def test_litellm(guarded):
    def ask(**fields):
        known = {"model": "openai/" + MODEL, "api_base": guarded.url + "/v1", "api_key": ALICE, "messages": HELLO}
        return litellm.completion(
            **{**known, **ENDLESS, "max_tokens": 12, "num_retries": 0, "max_retries": 0, **fields}
        )

    whole = ask()
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 12
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content
    for fields, kind in [
        ({"api_key": "not-a-key"}, litellm.AuthenticationError),
        ({"model": "openai/other"}, litellm.NotFoundError),
        ({"temperature": 3}, litellm.BadRequestError),
        ({"api_key": LIMITED, "max_tokens": 1}, litellm.RateLimitError),
    ]:
        with pytest.raises(kind):
            # Of the tests that use this key, the first one uses up the limit of one request per minute.
            ask(**fields)
            ask(**fields)


def test_the_javascript_client(guarded, pytestconfig):
    modules = pytestconfig.getoption("--node-modules")
    if modules is None:
        pytest.skip("--node-modules is not given")
    script = os.path.join(os.path.dirname(__file__), "client.cjs")
    environment = {**os.environ, "NODE_PATH": str(modules.resolve())}
    ran = subprocess.run(
        ["node", script, guarded.url + "/v1", ALICE, LIMITED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    "path, known",
    [
        ("/v1/chat/completions", openai.types.chat.completion_create_params.CompletionCreateParamsBase),
        ("/v1/completions", openai.types.completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_official_client_is_known(server, path, known):
    """Every field is known: an invalid value is rejected with the field's name, and no field is reported as unknown."""
    usual = {"model": MODEL, "prompt": "hello"} if path == "/v1/completions" else {"model": MODEL, "messages": HELLO}
    names = {"stream", *known.__annotations__}
    assert {"model", "temperature", "stream_options", "user", "n"} < names
    for name in names:
        refused = server.post(path, {**usual, name: {"no": ["field", "takes", "this"]}})
        assert (refused.status, refused.error["param"].split(".")[0]) == (400, name), refused
        assert refused.error["code"] != "unknown_parameter" or "." in refused.error["param"], refused
    refused = server.post(path, {**usual, "nonsense": 1})
    assert (refused.error["param"], refused.error["code"]) == ("nonsense", "unknown_parameter"), "positive control"
