// Tests with the official JavaScript clients of Anthropic and Ollama, run by test_dialects.py:
// node dialects.cjs URL KEY
"use strict";
const assert = require("node:assert/strict");
const Anthropic = require("@anthropic-ai/sdk").default;
const { Ollama } = require("ollama");

const [baseURL, apiKey] = process.argv.slice(2);
const messages = [{ role: "user", content: "hello" }];

async function anthropic() {
  const client = new Anthropic({ baseURL, apiKey, maxRetries: 0 });
  const usual = { model: "tiny", messages, max_tokens: 24, seed: 7 };
  const whole = await client.messages.create(usual);
  assert.equal(whole.content[0].type, "text");
  const stream = client.messages.stream(usual);
  let text = "";
  stream.on("text", (piece) => (text += piece));
  const final = await stream.finalMessage();
  assert.equal(text, whole.content[0].text);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
  await assert.rejects(client.messages.create({ ...usual, temperature: -1 }), (error) => {
    assert.equal(error.status, 400);
    assert.match(error.message, /temperature/);
    return true;
  });
}

async function ollama() {
  const client = new Ollama({ host: baseURL, headers: { Authorization: `Bearer ${apiKey}` } });
  const usual = { model: "tiny", messages, options: { seed: 7, num_predict: 24 } };
  const whole = await client.chat(usual);
  let text = "", last = null;
  for await (const piece of await client.chat({ ...usual, stream: true })) {
    text += piece.message.content;
    last = piece;
  }
  assert.equal(text, whole.message.content);
  assert.equal(last.eval_count, whole.eval_count);
  const listed = await client.list();
  assert.deepEqual(listed.models.map((model) => model.name), ["tiny"]);
  await assert.rejects(client.chat({ ...usual, model: "other" }), /other/);
}

anthropic().then(ollama).catch((error) => {
  console.error(error);
  process.exit(1);
});
