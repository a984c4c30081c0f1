"""OpenAI's Responses API through the official client, used as in its documentation; only the base URL differs."""

import time

import litellm
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


def test_a_background_response_is_polled_streamed_again_and_cancelled(client, create):
    expected = create()
    response = create(background=True)
    assert response.background and response.status == "queued"
    deadline = time.monotonic() + TIMEOUT_S
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.02)
        response = client.responses.retrieve(response.id)
        type(response).model_validate(response.to_dict())
    assert response.output_text == expected.output_text
    live = list(create(background=True, stream=True))
    id = live[-1].response.id
    assert [event.type for event in live[:3]] == ["response.created", "response.queued", "response.in_progress"]
    for event in live:
        type(event).model_validate(event.to_dict())
    # A client that lost its connection after an event continues there.
    for last in (0, 5, len(live) - 2):
        rest = list(client.responses.retrieve(id, stream=True, starting_after=last))
        assert [event.to_dict() for event in rest] == [event.to_dict() for event in live[last + 1:]]
    running = create(background=True, max_output_tokens=4000)
    cancelled = client.responses.cancel(running.id)
    assert cancelled.status == "cancelled" == client.responses.retrieve(running.id).status
    type(cancelled).model_validate(cancelled.to_dict())


def test_refusals_name_the_field(create):
    image = {"type": "input_image", "image_url": "a"}
    for fields, param in [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"role": "user", "content": [image]}]}, "input[0].content[0].type"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            create(**fields)
        assert refused.value.param == param


def test_litellm(guarded, create):
    def ask(**fields):
        return litellm.responses(
            model="openai/" + MODEL, input="hello", max_output_tokens=24, extra_body=ENDLESS, timeout=TIMEOUT_S,
            api_base=guarded.url + "/v1", api_key=ALICE, **fields
        )

    whole = ask()
    assert whole.output[0].content[0].text == create().output_text
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 24)
    events = list(ask(stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output[0].content[0].text
    continued = ask(previous_response_id=whole.id)
    assert continued.usage.input_tokens > whole.usage.input_tokens + 24
