// Tests with the official client for JavaScript, run by test_clients.py: node client.cjs URL KEY LIMITED_KEY
"use strict";
const assert = require("node:assert/strict");
const OpenAI = require("openai");

const [baseURL, apiKey, limitedKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
// The end token is banned, so that lengths are known.
const usual = { model: "tiny", messages, max_tokens: 24, seed: 7, logit_bias: { 2: -100 } };
const chat = (fields) => client.chat.completions.create({ ...usual, ...fields });

async function refused(asked, kind, code, param) {
  const error = await asked.then(() => assert.fail("the request was accepted"), (error) => error);
  assert.ok(error instanceof kind, `${error}`);
  assert.deepEqual([error.code, error.param], [code, param]);
}

async function main() {
  const models = await client.models.list();
  assert.deepEqual(models.data.map((model) => model.id), ["tiny"]);

  const whole = await chat({ logprobs: true, top_logprobs: 3 });
  const text = whole.choices[0].message.content;
  assert.equal(whole.usage.completion_tokens, 24);
  assert.equal(whole.choices[0].logprobs.content.length, 24);
  assert.ok(whole.choices[0].logprobs.content.every((token) => token.top_logprobs.length === 3));

  let streamed = "", usage = null;
  for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.equal(usage.completion_tokens, 24);

  const several = await chat({ n: 2 });
  assert.equal(several.choices[0].message.content, text);
  assert.notEqual(several.choices[1].message.content, text);

  const stop = text.slice(5, 8);
  const stopped = await chat({ stop: [stop] });
  assert.equal(stopped.choices[0].message.content, text.slice(0, text.indexOf(stop)));
  assert.equal(stopped.choices[0].finish_reason, "stop");

  const completion = await client.completions.create({
    model: "tiny", prompt: "once", max_tokens: 4, echo: true, logprobs: 1,
  });
  assert.ok(completion.choices[0].text.startsWith("once"));
  assert.equal(completion.choices[0].logprobs.token_logprobs[0], null);

  const asked = { model: "tiny", input: "hello", max_output_tokens: 24, seed: 7, logit_bias: { 2: -100 } };
  const response = await client.responses.create(asked);
  assert.equal(response.output_text, text);
  let deltas = "", numbers = 0;
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    assert.equal(event.sequence_number, numbers++);
    if (event.type === "response.output_text.delta") deltas += event.delta;
  }
  assert.equal(deltas, text);
  const stored = await client.responses.retrieve(response.id);
  assert.equal(stored.output_text, text);
  const next = await client.responses.create({ ...asked, previous_response_id: response.id });
  const items = await client.responses.inputItems.list(next.id);
  assert.deepEqual(items.data.map((item) => item.role), ["user", "assistant", "user"]);
  await client.responses.delete(response.id);
  await refused(client.responses.retrieve(response.id), OpenAI.NotFoundError, "response_not_found", "id");

  await refused(chat({ model: "other" }), OpenAI.NotFoundError, "model_not_found", "model");
  await refused(chat({ temperature: 3 }), OpenAI.BadRequestError, "out_of_range", "temperature");
  await refused(chat({ temperature: 3, stream: true }), OpenAI.BadRequestError, "out_of_range", "temperature");
  const stranger = new OpenAI({ baseURL, apiKey: "not-a-key", maxRetries: 0 });
  await refused(stranger.models.list(), OpenAI.AuthenticationError, "invalid_api_key", null);
  const limited = new OpenAI({ baseURL, apiKey: limitedKey, maxRetries: 0 });
  const once = () => limited.chat.completions.create({ model: "tiny", messages, max_tokens: 1 });
  // Other tests may have used up the limit of one request per minute.
  await once().catch(() => {});
  await refused(once(), OpenAI.RateLimitError, "requests_per_minute", null);

  // A client that stops reading cancels the request; the server must survive that.
  for await (const _ of await chat({ stream: true, max_tokens: 2000 })) break;
}

main().catch((error) => { console.error(error); process.exit(1); });
