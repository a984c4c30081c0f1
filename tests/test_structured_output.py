"""Structured output against an independent validator: every reply that ends satisfies its schema.

The replies are sampled at temperature 1.5 with the story model that the program contains, which knows no JSON. Schemas
come from JSON-Schema-Test-Suite, which `.ci/fetch-json-schema` takes from the sources of the Python package
`jsonschema`, and from the list below. `--structured-replies 10000` is the long form.
"""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from serving import Server

REPOSITORY = Path(__file__).parent.parent
SUITE = REPOSITORY / "target/conformance/json-schema"
MAX_TOKENS = 160
DRAFTS = {
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# Patterns of these tests mean something else, or nothing, in Python's regular expressions.
UNKNOWN_TO_PYTHON = re.compile(r"\\p\{|\\[sSdDwW]")

OWN = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
    {"type": "integer", "minimum": -5, "exclusiveMaximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 10000},
    {"enum": ["red", 1, None, {"a": [True]}]},
    {"const": {"deep": [1, {"x": "y"}]}},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 4}]},
    {"type": "object", "patternProperties": {"^k": {"type": "integer"}}, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}},
                                          "additionalProperties": False}}},
    *({"type": "string", "format": name} for name in ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "email"]),
]


def suite():
    """The schemas of JSON-Schema-Test-Suite."""
    for draft, uri in DRAFTS.items():
        for path in sorted((SUITE / draft).rglob("*.json")):
            for case in json.loads(path.read_text()):
                schema = case["schema"]
                if isinstance(schema, dict) and not UNKNOWN_TO_PYTHON.search(json.dumps(schema)):
                    yield {"$schema": uri, **schema}


@pytest.fixture(scope="module")
def story_server(binaries):
    with Server(binaries, REPOSITORY / "crates/pellucid/models/tiny.gguf") as server:
        yield server


def ask(server, schema, seed):
    """Returns the text of a reply, None if it was cut off, or the refusal of the schema."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": MAX_TOKENS, "temperature": 1.5, "seed": seed,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}}
    reply = server.post("/v1/completions", body)
    if reply.status == 400:
        assert reply.error["param"] == "response_format.json_schema.schema", reply.error
        assert "the schema" in reply.error["message"], reply.error
        return None, reply.error["message"]
    assert reply.status == 200, reply
    choice = reply.json["choices"][0]
    ending = reply.json["pellucid"]["endings"][0]
    is_whole = choice["finish_reason"] == "stop"
    assert is_whole == ("grammar" not in ending), reply.json
    return (choice["text"] if is_whole else None), None


def test_every_reply_satisfies_its_schema(story_server, pytestconfig):
    wanted = int(pytestconfig.getoption("--structured-replies"))
    schemas = OWN + (list(suite()) if SUITE.exists() else [])
    refused, num_replies, num_cut = set(), 0, 0
    with ThreadPoolExecutor(4) as pool:
        for seed in itertools.count():
            known = [i for i in range(len(schemas)) if i not in refused]
            known = known[: wanted - num_replies] if seed else known
            replies = pool.map(lambda i: ask(story_server, schemas[i], seed), known)
            for i, (text, refusal) in zip(known, replies):
                if refusal is not None:
                    assert i >= len(OWN), refusal
                    refused.add(i)
                elif text is None:
                    num_cut += 1
                else:
                    num_replies += 1
                    validate(schemas[i], text)
            if num_replies >= wanted:
                break
    print(f"{num_replies} replies satisfy their schemas, {num_cut} were cut off; "
          f"{len(refused)} of {len(schemas)} schemas were refused by name")


def validate(schema, text):
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    problems = list(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(json.loads(text)))
    assert not problems, f"{text!r} of {schema}: {problems[0]}"
