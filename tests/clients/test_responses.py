"""OpenAI's Responses API through the official client, used as in its documentation; only the base URL differs."""

import openai
import pytest

from conftest import ALICE, BOB
from serving import MODEL, TIMEOUT_S

# A random model may end at any token; with its end token banned, lengths are known.
ENDLESS = {"logit_bias": {"2": -100}, "seed": 7}


@pytest.fixture(scope="module")
def client(guarded):
    return openai.OpenAI(base_url=guarded.url + "/v1", api_key=ALICE, max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def create(client):
    def create(**fields):
        fields = {"model": MODEL, "input": "hello", "max_output_tokens": 24, "extra_body": ENDLESS, **fields}
        return client.responses.create(**fields)

    return create


def test_a_response_has_the_text_of_a_chat(client, create):
    response = create(instructions="be brief")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, **ENDLESS)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 24
    assert response.model_extra["pellucid"]["seed"] == 7
    counted = client.responses.input_tokens.count(model=MODEL, input="hello", instructions="be brief")
    assert counted.input_tokens == response.usage.input_tokens


def test_every_object_has_the_documented_fields(create):
    """The client reads leniently; validation is strict."""
    whole = create(include=["message.output_text.logprobs"], top_logprobs=2)
    type(whole).model_validate(whole.to_dict())
    assert len(whole.output[0].content[0].logprobs) == 24
    for event in create(stream=True, include=["message.output_text.logprobs"], top_logprobs=2):
        type(event).model_validate(event.to_dict())


def test_a_stream_equals_the_whole_response(client, create):
    whole = create()
    events = list(create(stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    # The client's own accumulation, which checks the order of events.
    with client.responses.stream(
        model=MODEL, input="hello", max_output_tokens=24, extra_body={**ENDLESS, "stop": ["e"]}
    ) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == (texts[-1] if texts else "")


def test_responses_are_stored(client, create, guarded):
    first = create()
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = create(input="go on", previous_response_id=first.id)
    by_hand = create(
        input=[{"role": "user", "content": "hello"}, *first.to_dict()["output"], {"role": "user", "content": "go on"}],
        store=False,
    )
    assert second.output_text == by_hand.output_text
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    stranger = openai.OpenAI(base_url=guarded.url + "/v1", api_key=BOB, max_retries=0)
    for response, owner in [(first, stranger), (by_hand, client)]:
        with pytest.raises(openai.NotFoundError):
            owner.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(first.id)
    assert refused.value.code == "not_cancellable"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        create(previous_response_id=first.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_refusals_name_the_field(create):
    image = {"type": "input_image", "image_url": "a"}
    for fields, param in [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"role": "user", "content": [image]}]}, "input[0].content[0].type"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            create(**fields)
        assert refused.value.param == param
