// Tools and structured output with the official client for JavaScript and with the AI SDK, run by test_tools.py:
// node tools.cjs URL
"use strict";
const assert = require("node:assert/strict");
const OpenAI = require("openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { Output, generateObject, generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");

const [baseURL] = process.argv.slice(2);
const settings = { seed: 1, temperature: 1.5 };
// Exceeds the longest text of every schema below; each token of the tiny model is one character.
const MAX_TOKENS = 2000;
const prompt = "How is the weather?";
const zone = z.enum(["UTC", "CET"]);
const weather = z.object({ city: z.string().min(1).max(6), days: z.number().int().min(1).max(9) });

async function runTools() {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const zones = [];
  const clock = {
    type: "function",
    function: {
      name: "clock",
      description: "Tells the time",
      parameters: {
        type: "object", properties: { zone: { type: "string", enum: ["UTC", "CET"] } }, required: ["zone"],
        additionalProperties: false,
      },
      parse: JSON.parse,
      function: ({ zone }) => { zones.push(zone); return "noon"; },
    },
  };
  const messages = [{ role: "user", content: prompt }];
  const body = {
    model: "tiny", ...settings, max_tokens: MAX_TOKENS, messages, tools: [clock], tool_choice: "required",
    parallel_tool_calls: false,
  };
  for (const stream of [false, true]) {
    zones.length = 0;
    const runner = client.chat.completions.runTools({ ...body, stream }, { maxChatCompletions: 2 });
    await runner.done();
    assert.equal(zones.length, 2, "each of the two replies calls the tool");
    assert.ok(zones.every((zone) => ["UTC", "CET"].includes(zone)), `${zones}`);
    const roles = runner.messages.map((message) => message.role);
    assert.deepEqual(roles, ["user", "assistant", "tool", "assistant", "tool"]);
  }
}

async function aiSdk() {
  const provider = createOpenAICompatible({ name: "pellucid", baseURL, supportsStructuredOutputs: true });
  const model = provider("tiny");
  const usual = { model, prompt, ...settings, maxOutputTokens: MAX_TOKENS, maxRetries: 0 };

  const { object } = await generateObject({ ...usual, schema: weather });
  weather.parse(object);
  const { output } = await generateText({ ...usual, output: Output.object({ schema: weather }) });
  weather.parse(output);

  const zones = [];
  const clock = tool({
    description: "Tells the time",
    inputSchema: z.object({ zone }),
    execute: async ({ zone }) => { zones.push(zone); return "noon"; },
  });
  // Parallel calls of a random model have no end.
  const providerOptions = { pellucid: { parallel_tool_calls: false } };
  const called = { ...usual, providerOptions, tools: { clock }, toolChoice: "required", stopWhen: stepCountIs(2) };
  const whole = await generateText(called);
  assert.equal(whole.steps.length, 2);
  for (const step of whole.steps) {
    assert.ok(step.toolCalls.length === 1 && step.toolResults.every((result) => result.output === "noon"));
  }
  const inputs = whole.steps.map((step) => step.toolCalls.map((call) => call.input));
  zones.length = 0;
  const streamed = streamText(called);
  await streamed.consumeStream({ onError: (error) => { throw error; } });
  const steps = await streamed.steps;
  assert.deepEqual(steps.map((step) => step.toolCalls.map((call) => call.input)), inputs);
  assert.ok(zones.length >= 2 && zones.every((found) => zone.safeParse(found).success), `${zones}`);
}

runTools().then(aiSdk).catch((error) => { console.error(error); process.exit(1); });
