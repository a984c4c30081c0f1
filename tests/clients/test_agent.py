"""An agent that works through a task with three tools, over the API and with the official client.

It needs a model that can follow instructions, Qwen2.5-Coder-1.5B-Instruct by default, and is skipped without one:

    pellucid pull qwen2.5-coder-1.5b
    python -m pytest tests/clients/test_agent.py -s --binaries target/release --agent-model PATH/OF/THE/MODEL.gguf
"""

import json

import openai
import pytest

from serving import MODEL, Server

TASK = (
    "One of the files in my folder is an order of fruit. Work in steps, with one tool call in each: "
    "list the files, read the order, and write the ordered item and the number of pieces to the file "
    '"summary.txt" in the form "item: number". Then say what you wrote.'
)
FILES = {"notes.txt": "Call Anna on Monday.", "order-7.txt": "Customer: Ben\nItem: pears\nPieces: 12\n"}
MAX_STEPS = 10


def tool(name, description, /, **properties):
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("list_files", "Returns the names of all files."),
    tool("read_file", "Returns the text of a file.", name="Name of the file"),
    tool("write_file", "Writes a file.", name="Name of the file", text="The whole text of the file"),
]


class Folder:
    """The files that the tools work on, and the calls that were made."""

    def __init__(self, files):
        self.files = dict(files)
        self.calls = []

    def call(self, name, arguments):
        self.calls.append(name)
        if name == "list_files":
            return "\n".join(self.files)
        if name == "read_file":
            return self.files.get(arguments["name"], f"error: there is no file {arguments['name']}")
        self.files[arguments["name"]] = arguments["text"]
        return "written"


def work(client, folder, stream):
    """Runs the loop of an agent until the model answers without a call. Returns the conversation."""
    messages = [{"role": "user", "content": TASK}]
    for _ in range(MAX_STEPS):
        reply = ask(client, messages, stream)
        messages.append(reply)
        if not reply.tool_calls:
            return messages
        for call in reply.tool_calls:
            # Arguments always parse and fit the tool's schema, so nothing is caught here.
            arguments = json.loads(call.function.arguments)
            result = folder.call(call.function.name, arguments)
            print(f"{call.function.name}({arguments}) -> {result!r}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError(f"no answer after {MAX_STEPS} steps: {folder.calls}")


def ask(client, messages, stream):
    fields = {"model": MODEL, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 400}
    # The model writes the file once all others are read; until then it must call a tool.
    if not any(getattr(message, "tool_calls", None) and is_write(message) for message in messages):
        fields["tool_choice"] = "required"
        fields["parallel_tool_calls"] = False
    if not stream:
        return client.chat.completions.create(**fields).choices[0].message
    with client.chat.completions.stream(**fields) as events:
        return events.get_final_completion().choices[0].message


def is_write(message):
    return any(call.function.name == "write_file" for call in message.tool_calls)


@pytest.fixture(scope="module")
def server(binaries, pytestconfig):
    model = pytestconfig.getoption("--agent-model")
    if model is None:
        pytest.skip("--agent-model is not given")
    with Server(binaries, model) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_completes_its_task(server, stream):
    folder = Folder(FILES)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600)
    messages = work(client, folder, stream)
    assert folder.files["summary.txt"].strip().lower() == "pears: 12", folder.files
    assert set(folder.calls) == {"list_files", "read_file", "write_file"}
    assert messages[-1].content
    print(messages[-1].content)
