"""Requests that coding agents sent to the server, replayed, with checks of the replies that the agents rely on.

`fixtures/` holds them as docs/clients.md describes: one request per file, recorded between the agent and the server.
Long texts are cut, tools whose schemas show nothing new are left out, and what names a machine or a session is
replaced.
"""

import json
from pathlib import Path

import pytest

from serving import MODEL, Server, write_model

FOLDER = Path(__file__).parent
FIXTURES = sorted((FOLDER / "fixtures").glob("*.json"))
# The field that limits a reply, so that the random model ends soon.
LIMITS = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}


@pytest.fixture(scope="module")
def server(binaries, tmp_path_factory):
    """A server whose context holds the prompts of agents, with a template that shows tools."""
    model = write_model(binaries, tmp_path_factory.mktemp("agents"), "32768", "words")
    with Server(binaries, model, "--chat-template", FOLDER / "hermes.jinja") as server:
        yield server


def send(server, recorded, **fields):
    """Sends a recorded request with `fields` in place of those that it has."""
    limit = LIMITS[recorded["path"].split("?")[0]]
    body = {**recorded["body"], limit: 24, **fields}
    return server.post(recorded["path"], body, **recorded["headers"])


def events(reply):
    """The server-sent events of a stream, whose names and types must agree."""
    found = []
    for event in reply.body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        data = json.loads(data.removeprefix("data: "))
        assert name == f"event: {data['type']}"
        found.append(data)
    return found


def check_messages(reply):
    found = [event for event in events(reply) if event["type"] != "ping"]
    types = [event["type"] for event in found]
    assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"]
    assert types.count("content_block_start") == types.count("content_block_stop") >= 1
    assert found[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    assert found[-2]["usage"]["output_tokens"] <= 24
    return {event["content_block"].get("name") for event in found if event["type"] == "content_block_start"} - {None}


def check_responses(reply):
    found = events(reply)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] in ("response.completed", "response.incomplete")
    output = found[-1]["response"]["output"]
    assert output == [event["item"] for event in found if event["type"] == "response.output_item.done"]
    return {(item.get("namespace"), item["name"]) for item in output if item["type"] == "function_call"}


def check_chat(reply):
    chunks = reply.chunks
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(finishes) == 1 and finishes[0] in ("stop", "length", "tool_calls")
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])]
    return {call["function"]["name"] for call in calls if call["function"].get("name")}


CHECKS = {"/v1/messages": check_messages, "/v1/responses": check_responses, "/v1/chat/completions": check_chat}


def offered(body):
    """The names of a request's tools, as its reply names those that are called."""
    names = set()
    for tool in body.get("tools", []):
        if tool.get("type") == "namespace":
            names |= {(tool["name"], inner["name"]) for inner in tool["tools"]}
        elif "input_schema" in tool:
            names.add(tool["name"])
        else:
            names.add(tool["function"]["name"] if "function" in tool else (None, tool["name"]))
    return names


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_what_an_agent_sends_is_answered(server, path):
    recorded = json.loads(path.read_text())
    assert recorded["body"]["model"] == MODEL and recorded["body"]["stream"]
    reply = send(server, recorded)
    assert reply.status == 200, reply.body
    route = recorded["path"].split("?")[0]
    assert CHECKS[route](reply) <= offered(recorded["body"])
    # Every field that the agent sends is read: one that it does not send is refused by name.
    unknown = send(server, recorded, surprise=1)
    assert unknown.status == 400 and b"surprise" in unknown.body


def test_a_tool_that_a_server_would_run_is_refused_by_name(server):
    recorded = json.loads((FOLDER / "fixtures/codex-task.json").read_text())
    tools = [*recorded["body"]["tools"], {"type": "web_search", "external_web_access": True}]
    reply = send(server, recorded, tools=tools)
    assert reply.status == 400 and reply.error["param"] == f"tools[{len(tools) - 1}].type", reply.body
