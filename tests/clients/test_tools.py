"""Tools and structured output through the clients that applications use, as their documentation shows.

The replies of the tiny random model are sampled at a high temperature, so what it calls is random; that every call
parses, fits its schema and reaches the tool is what these tests check. Each of its tokens is one character. The schemas
have a longest text, and `max_tokens` exceeds it, so every reply with one call ends. Several calls have no end: the
model begins another at random.
"""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import instructor
import jsonschema
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from serving import MODEL, TIMEOUT_S, Server, write_model

TESTS = Path(__file__).parent
# Exceeds the longest text of every schema below: up to 20 gaps between parts of JSON, of up to 65 characters each.
MAX_TOKENS = 2000
ASK = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """Looks up the weather of a city."""

    # Without this, the model could add properties without end.
    model_config = ConfigDict(extra="forbid")
    city: str = Field(min_length=1, max_length=6)
    unit: Literal["celsius", "kelvin"]
    days: int = Field(ge=1, le=9)


class Clock(BaseModel):
    """Tells the time."""

    model_config = ConfigDict(extra="forbid")
    zone: Literal["UTC", "CET"]


def function(model):
    """Returns a pydantic model as a tool of a request."""
    return {"type": "function", "function": {"name": model.__name__, "parameters": model.model_json_schema()}}


TOOLS = [function(Weather), function(Clock)]
MODELS = {"Weather": Weather, "Clock": Clock}


@pytest.fixture(scope="module")
def server(binaries, tmp_path_factory):
    model = write_model(binaries, tmp_path_factory.mktemp("brackets"), "8192", "brackets")
    with Server(binaries, model, "--chat-template", TESTS / "hermes.jinja") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def chat(client):
    def chat(**fields):
        usual = {"model": MODEL, "messages": ASK, "max_tokens": MAX_TOKENS, "temperature": 1.5, "tools": TOOLS}
        return client.chat.completions.create(**{**usual, **fields})

    return chat


def check(call):
    """Checks a call against the schema of its tool, with a validator that is not ours."""
    assert call.type == "function" and call.id
    jsonschema.validate(json.loads(call.function.arguments), MODELS[call.function.name].model_json_schema())
    return MODELS[call.function.name].model_validate_json(call.function.arguments)


def joined(chunks):
    """Returns the message that the chunks of a stream make, as clients join them."""
    content, calls, finish = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(calls):
                    assert piece.id and piece.type == "function" and piece.function.name, "the name comes first"
                    calls.append([piece.id, piece.function.name, ""])
                calls[piece.index][2] += piece.function.arguments or ""
    return content or None, calls, finish


def test_calls_fit_their_schemas_and_streams_equal_whole_replies(chat):
    for seed in range(4):
        fields = {"seed": seed, "tool_choice": "required", "max_tokens": 400}
        reply = chat(**fields).choices[0]
        calls = reply.message.tool_calls
        assert len(calls) > 1 or reply.finish_reason == "tool_calls", reply
        # The last call may be cut off by `max_tokens`.
        for call in calls if reply.finish_reason == "tool_calls" else calls[:-1]:
            check(call)
        content, streamed, finish = joined(chat(stream=True, **fields))
        assert (content, finish) == (reply.message.content, reply.finish_reason)
        assert streamed == [[call.id, call.function.name, call.function.arguments] for call in calls]


def test_every_choice_is_honoured(chat):
    def names(**fields):
        message = chat(seed=1, parallel_tool_calls=False, **fields).choices[0].message
        return [call.function.name for call in message.tool_calls or []]

    assert names(tool_choice="none") == []
    assert len(names(tool_choice="required")) == 1
    for name in MODELS:
        one = {"type": "function", "function": {"name": name}}
        assert names(tool_choice=one) == [name]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
        assert names(tool_choice=allowed) == [name]


def test_results_can_be_sent_back(client, chat):
    reply = chat(seed=1, tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "sunny"}
    for form in (reply, reply.model_dump(), reply.model_dump(exclude_none=True)):
        again = chat(seed=1, messages=[*ASK, form, result], tool_choice="none", max_tokens=8)
        assert again.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as refused:
        chat(messages=[*ASK, reply, {**result, "tool_call_id": "other"}])
    assert refused.value.param == "messages[2].tool_call_id"


def test_parse_and_stream_helpers(client):
    usual = {"model": MODEL, "messages": ASK, "temperature": 1.5, "seed": 1, "max_tokens": MAX_TOKENS}
    parsed = client.chat.completions.parse(**usual, response_format=Weather).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    tools = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]
    called = {**usual, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    call = client.chat.completions.parse(**called).choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
    deltas, done = "", None
    with client.chat.completions.stream(**called) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                deltas += event.arguments_delta
            elif event.type == "tool_calls.function.arguments.done":
                done = event
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    assert deltas == done.arguments == call.function.arguments
    # A message with parsed arguments can be sent back as it is.
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = {**called, "messages": [*ASK, final, result], "tool_choice": "none", "max_tokens": 4}
    assert client.chat.completions.create(**again).choices[0].message.content


def test_responses_are_parsed(client):
    usual = {"model": MODEL, "input": "weather", "temperature": 1.5, "max_output_tokens": MAX_TOKENS}
    usual["extra_body"] = {"seed": 1}
    response = client.responses.parse(**usual, text_format=Weather)
    assert isinstance(response.output_parsed, Weather) and response.status == "completed"
    with client.responses.stream(**usual, text_format=Weather) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == response.output_parsed
    tools = [openai.pydantic_function_tool(Clock)]
    tools = [{"type": "function", **tool["function"]} for tool in tools]
    called = client.responses.parse(**usual, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "Clock")
    assert Clock.model_validate(call.parsed_arguments).zone in ("UTC", "CET")


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(client, mode):
    asked = instructor.from_openai(client, mode=mode)
    usual = {"model": MODEL, "messages": ASK, "temperature": 1.5, "seed": 2, "max_tokens": MAX_TOKENS, "max_retries": 0}
    if mode == instructor.Mode.TOOLS:
        usual["parallel_tool_calls"] = False
    assert isinstance(asked.chat.completions.create(response_model=Weather, **usual), Weather)


def test_pydantic_ai(server):
    provider = OpenAIProvider(base_url=server.url + "/v1", api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider)
    asked = []

    def agent(seed):
        settings = {"temperature": 1.5, "seed": seed, "max_tokens": MAX_TOKENS, "parallel_tool_calls": False}
        agent = Agent(model, output_type=Weather, model_settings=settings, retries=0)

        @agent.tool_plain
        def clock(zone: Literal["UTC", "CET"]) -> str:
            """Tells the time."""
            asked.append(zone)
            return "noon"

        return agent

    # The model chooses at random between the tool and the tool with which the library reads the answer.
    for seed in range(20):
        assert isinstance(agent(seed).run_sync("How is the weather?").output, Weather)
        if asked:
            break
    assert asked and set(asked) <= {"UTC", "CET"}


def test_langchain(server):
    @langchain_tool(args_schema=Clock)
    def clock(zone: Literal["UTC", "CET"]) -> str:
        """Tells the time."""
        return f"noon in {zone}"

    model = ChatOpenAI(
        model=MODEL, base_url=server.url + "/v1", api_key="none", max_retries=0, max_tokens=MAX_TOKENS,
        temperature=1.5, seed=3,
    )
    # `strict` makes LangChain say that there are no further properties.
    bound = model.bind_tools([clock], tool_choice="any", parallel_tool_calls=False, strict=True)
    question = HumanMessage("What time is it?")
    reply = bound.invoke([question])
    assert [call["name"] for call in reply.tool_calls] == ["clock"] and not reply.invalid_tool_calls
    result = clock.invoke(reply.tool_calls[0])
    assert isinstance(result, ToolMessage) and result.content.startswith("noon in")
    assert model.bind(max_tokens=4).invoke([question, reply, result]).content
    whole = None
    for piece in bound.stream([question]):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == reply.tool_calls[0]["args"]
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(Weather, method=method, strict=True).invoke("weather"), Weather)


def test_concurrent_requests_get_their_own_calls(server):
    """Equal requests get equal replies, whatever else is in the batch."""

    async def ask(seed):
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=TIMEOUT_S) as client:
            reply = await client.chat.completions.create(
                model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed,
                temperature=1.5, max_tokens=MAX_TOKENS,
            )
            return [(call.function.name, call.function.arguments) for call in reply.choices[0].message.tool_calls]

    async def together():
        return await asyncio.gather(*(ask(seed) for seed in range(6)))

    assert asyncio.run(together()) == [asyncio.run(ask(seed)) for seed in range(6)]


def test_javascript_clients(server, pytestconfig):
    modules = pytestconfig.getoption("--node-modules")
    if modules is None:
        pytest.skip("--node-modules is not given")
    environment = {**os.environ, "NODE_PATH": str(modules.resolve())}
    command = ["node", TESTS / "tools.cjs", server.url + "/v1"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
