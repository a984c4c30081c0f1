// Panels of the inspector whose contents depend on the server's settings or on a reply that still runs.
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { join } from "node:path";
import { browser, open, replyEnded, scratch, send, serve, slowNetwork, tinyModel, withSettings } from "./setup.mjs";

let server, model;
before(async () => {
  model = tinyModel();
  server = await serve(model);
});
after(async () => {
  await browser.close();
  await server.kill();
});

const QUESTION = "a question about tokens";
const messages = [{ role: "user", content: QUESTION }];

/** Makes the server's replies pass through `change` before the page gets them. */
async function changeReplies(page, change) {
  await page.route("**/v1/chat/completions", async (route) => {
    const response = await route.fetch();
    await route.fulfill({ response, body: change(await response.text()) });
  });
}

/** Pairs of a name and a value. */
const pairs = (page, selector) =>
  page.locator(`${selector} > div`).evaluateAll((all) => all.map((one) => [...one.children].map((c) => c.textContent)));

test("a token of the prompt shows its id, bytes and origin", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 8, seed: 9, preset: "chat" });
  await send(page, QUESTION);
  await replyEnded(page);
  await page.click(".reply .see");
  await page.click("#tab-tokens");
  const tokens = await server.post("/tokenize", {
    messages,
    return_token_strs: true,
    return_token_bytes: true,
    return_token_kinds: true,
  });
  await page.waitForSelector(".pieces [aria-pressed]");
  const shown = page.locator(".pieces [aria-pressed]");
  const looks = await shown.evaluateAll((all) => all.map((one) => one.classList[1]));
  // The template of the tiny model is `[turn]user: ...[end][turn]`.
  assert.deepEqual(
    looks.map((look) => look === "control"),
    tokens.token_kinds.map((kind) => kind === "control"),
  );
  assert.equal(looks.filter((look) => look === "control").length, 3);
  assert.ok(looks.includes("template") && looks.includes("own"), `${looks}`);
  const hex = (bytes) => bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  for (const [look, origin] of [
    ["control", /^control token/],
    ["template", /template wrote/],
    ["own", /never become a control token/],
  ]) {
    const i = looks.indexOf(look);
    await shown.nth(i).click();
    const [, id, bytes, from] = await pairs(page, ".token-details:last-of-type");
    assert.equal(id[1], `${tokens.tokens[i]}`);
    assert.equal(bytes[1], hex(tokens.token_bytes[i]));
    assert.match(from[1], origin);
  }
  await context.close();
});

test("text that the tokenizer cannot spell stays text of the message", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 4, seed: 9, preset: "chat" });
  // The tiny model has no capital letters.
  await send(page, "aBCd");
  await replyEnded(page);
  await page.click(".reply .see");
  await page.click("#tab-tokens");
  await page.waitForSelector(".pieces [aria-pressed]");
  const own = await page.locator(".pieces .own .piece").allTextContents();
  assert.deepEqual(own, ["a", "<unk>", "<unk>", "d"]);
  await context.close();
});

test("the cache and the time are drawn while the reply runs", async () => {
  const own = await serve(model, { flags: ["--min-tokens", "3500"] });
  const { page, context } = await open(own.url);
  await withSettings(page, { maxTokens: 3900, seed: 9 });
  await slowNetwork(page);
  await send(page, QUESTION);
  await page.waitForSelector(".reply [data-token]");
  await page.locator(".reply [data-token]").first().click();
  await page.click("#tab-cache");
  const blocks = () => page.locator(".kv-block").count();
  await page.waitForSelector(".kv-block.reply");
  const first = await blocks();
  await page.waitForFunction((count) => document.querySelectorAll(".kv-block").length > count, first);
  // Nothing is said yet about what came from the cache.
  assert.equal(await page.locator(".swatch.cached").count(), 0);
  assert.match(await page.locator(".panel-body").innerText(), /tells at the end of the reply/);
  await page.click("#tab-time");
  await page.waitForSelector(".waterfall tr:has-text('so far')");
  await page.click('[aria-label="Stop the reply"]');
  await page.waitForSelector(".message.reply.stopped");
  await context.close();
  await own.kill();
});

test("the cache panel tells the memory of the blocks", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 40, seed: 9 });
  await send(page, QUESTION.repeat(8));
  await page.waitForSelector(".message.reply.done");
  await page.click(".reply .see");
  await page.click("#tab-cache");
  await page.waitForSelector(".kv-block");
  const { kv_block: block } = (await (await fetch(`${server.url}/v1/models`)).json()).data[0];
  const count = await page.locator(".kv-block").count();
  const memory = (await pairs(page, ".panel-body .pairs")).find(([name]) => name === "memory")[1];
  const kilobytes = (bytes) => `${(bytes / 1e3).toFixed(1)} kB`;
  assert.equal(memory, `${kilobytes(count * block.bytes)} in blocks of ${kilobytes(block.bytes)}`);
  await context.close();
});

test("each reason for a missed prefix is a sentence", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 4, seed: 9, preset: "chat" });
  const sentences = {
    evicted: /after 64 tokens was cached and has been evicted/,
    other_salt: /after 64 tokens is cached under another cache_salt/,
    no_snapshot: /after 64 tokens is cached, but no snapshot/,
    no_window: /after 64 tokens is cached, but not the windows/,
    new: /The block after 64 tokens is not cached/,
  };
  for (const [reason, sentence] of Object.entries(sentences)) {
    const misses = JSON.stringify([{ reused_tokens: 64, reason }]);
    await changeReplies(page, (body) => body.replace('"endings":', `"cache_misses":${misses},"endings":`));
    await page.locator("#main").focus();
    await page.keyboard.press("n");
    await page.waitForSelector(".welcome");
    await send(page, reason);
    await page.waitForSelector(".message.reply.done");
    await page.click(".reply .see");
    await page.click("#tab-cache");
    await page.waitForSelector(".why-not p");
    assert.match(await page.locator(".why-not p").innerText(), sentence);
    await page.unroute("**/v1/chat/completions");
  }
  await context.close();
});

test("a guard's time is in the waterfall, and its verdict at the token", async () => {
  const patterns = join(scratch, "patterns.txt");
  writeFileSync(patterns, "no such text\n");
  const own = await serve(model, { flags: ["--guard-patterns", patterns] });
  const { page, context } = await open(own.url);
  await withSettings(page, { maxTokens: 12, seed: 8, preset: "chat", recordsTraces: true });
  const [response] = await Promise.all([
    page.waitForResponse((one) => one.url().endsWith("/v1/chat/completions")),
    send(page, QUESTION),
  ]);
  await replyEnded(page);
  const lines = (await response.text()).split("\n").filter((line) => line.startsWith("data: {"));
  const { timings } = JSON.parse(lines.at(-1).slice(6)).pellucid;
  assert.ok(timings.guard_ms > 0 && timings.sampling_ms > 0);
  await page.click(".reply .see");
  await page.click("#tab-time");
  await page.waitForSelector(".waterfall tr");
  const rows = await page
    .locator(".waterfall tr")
    .evaluateAll((all) =>
      all.map((row) => [row.querySelector("th").firstChild.textContent, row.lastChild.textContent]),
    );
  const shown = (name) => Number.parseFloat(rows.find(([one]) => one === name)[1]);
  assert.ok(Math.abs(shown("sampling") - timings.sampling_ms) <= 0.5, `${rows}`);
  assert.ok(Math.abs(shown("guard") - timings.guard_ms) <= 0.5, `${rows}`);
  await page.click("#tab-choice");
  await page.waitForSelector(".panel-body:has-text('The guard patterns passed it.')");
  await context.close();
  await own.kill();
});

test("the text is colored by who proposed each token, and the panel names the drafter", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 12, seed: 8, preset: "chat", recordsTraces: true, colors: "proposal" });
  // The tiny model drafts nothing, so the proposals are written into the reply of the server.
  const proposals = [null, true, false];
  const drafters = { mtp: { drafted: 8, accepted: 4, rejected: 4 } };
  await changeReplies(page, (body) => {
    let index = 0;
    const proposed = body.replace(/"proposal":null/g, () => {
      const accepted = proposals[index++ % 3];
      const proposal = accepted === null ? null : { drafter: "mtp", id: 5, text: "guess", accepted };
      return `"proposal":${JSON.stringify(proposal)}`;
    });
    const speculation = JSON.stringify({ drafted: 8, accepted: 4, rejected: 4, drafters });
    return proposed.replace(/"speculation":\{.*?\{\}\}/, `"speculation":${speculation}`);
  });
  await send(page, QUESTION);
  await replyEnded(page);
  const looks = await page.locator(".raw-tokens .token").evaluateAll((all) => all.map((one) => one.className));
  assert.ok(looks.length > 3);
  looks.forEach((look, i) => {
    assert.equal(look.includes("accepted"), i % 3 === 1, `${i}: ${look}`);
    assert.equal(look.includes("rejected"), i % 3 === 2, `${i}: ${look}`);
  });
  await page.locator('.reply [data-token="2"]').first().click();
  await page.click("#tab-drafts");
  await page.waitForSelector(".panel-body:has-text('and the model chose another')");
  const row = await page.locator(".counts tbody tr").innerText();
  assert.match(row, /^mtp\s*a layer of the model itself[^]*\b8\b[^]*\b4\b[^]*50 %/);
  await page.click('[aria-label="Next token"]');
  await page.waitForSelector(".panel-body:has-text('Nothing was proposed for this token')");
  await context.close();
});

test("the pointer over a token shows its alternatives", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 12, seed: 8, preset: "", colors: "probability" });
  await send(page, QUESTION);
  await replyEnded(page);
  const reply = await server.post("/v1/chat/completions", {
    model: "tiny",
    messages,
    seed: 8,
    max_completion_tokens: 12,
    logprobs: true,
    top_logprobs: 6,
  });
  const { top_logprobs: top } = reply.choices[0].logprobs.content[3];
  await page.locator('.raw-tokens [data-token="3"]').hover();
  await page.waitForSelector(".hover-card");
  const values = (await page.locator(".hover-card .value").allTextContents()).map((text) => Number.parseFloat(text));
  assert.ok(values.length >= 6);
  top.slice(0, 5).forEach(({ logprob }, i) => {
    assert.ok(Math.abs(values[i] - 100 * Math.exp(logprob)) < 0.06, `${values[i]} and ${100 * Math.exp(logprob)}`);
  });
  await context.close();
});
