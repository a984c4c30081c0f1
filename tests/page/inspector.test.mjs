// The inspector: its numbers equal those that the API returns.
import assert from "node:assert/strict";
import { cpSync, rmSync } from "node:fs";
import { after, before, test } from "node:test";
import { join } from "node:path";
import { browser, lastReply, open, replyEnded, scratch, send, serve, tinyModel, withSettings } from "./setup.mjs";

let server;
before(async () => {
  server = await serve(tinyModel());
});
after(async () => {
  await browser.close();
  await server.kill();
});

const QUESTION = "a question about tokens";
const messages = [{ role: "user", content: QUESTION }];

/** A percentage as the page writes it. */
function percent(p) {
  if (p >= 0.9995) return "100 %";
  if (p >= 0.1) return `${(100 * p).toFixed(1)} %`;
  if (p >= 0.0001) return `${(100 * p).toPrecision(2)} %`;
  return p === 0 ? "0" : `${(100 * p).toExponential(1)} %`;
}

/** The table of candidates: for each id the texts of its cells. */
async function cells(page, selector) {
  const rows = await page
    .locator(`${selector} tbody tr`)
    .evaluateAll((all) =>
      all.map((row) => [
        row.querySelector("th small").textContent,
        [...row.querySelectorAll("td")].map((cell) => cell.textContent),
      ]),
    );
  return new Map(rows.map(([id, texts]) => [Number(id), texts]));
}

/** Compares the table with a trace of the API, cell by cell. */
function compare(shown, trace) {
  assert.ok(shown.size > 0);
  trace.steps.forEach((step, i) => {
    let compared = 0;
    for (const { id, after: p, cut } of step.candidates) {
      const row = shown.get(id);
      if (!row) continue;
      assert.equal(row[i + 1], cut ? "cut" : percent(p), `${step.name} ${id}`);
      compared++;
    }
    assert.ok(compared > 0, step.name);
  });
}

for (const [name, parameters] of [
  ["one step is replayed", { temperature: 0.8, top_k: 12, top_p: 0.9, dry_multiplier: 0.8 }],
  ["a whole reply is replayed", { temperature: 0.9, presence_penalty: 0.5, min_p: 0.02 }],
]) {
  test(`the choice of a token equals the API's trace: ${name}`, async () => {
    const { page, context, problems } = await open(server.url);
    await withSettings(page, { maxTokens: 24, seed: 11, preset: "", parameters, colors: "probability" });
    await send(page, QUESTION);
    await replyEnded(page);
    const body = { model: "tiny", messages, seed: 11, ...parameters, max_completion_tokens: 24, trace: true };
    const { trace } = (await server.post("/v1/chat/completions", body)).choices[0];
    for (const token of [0, 9, 17]) {
      await page.locator(`.reply [data-token="${token}"]`).first().click();
      await page.waitForSelector(".token-name");
      await page.click("#tab-choice");
      await page.waitForFunction(
        (n) => document.querySelector(".token-name")?.textContent.includes(` ${n} of `),
        token + 1,
      );
      await page.waitForSelector(".origin");
      assert.match(await page.locator(".origin").innerText(), /^Replayed/);
      assert.equal(await page.locator(".panel-body .failure").count(), 0);
      compare(await cells(page, ".steps"), trace[token]);
      if (trace[token].draw.runner_up) {
        const draw = await page.locator("table.draw tbody tr").first().locator("td").allTextContents();
        assert.deepEqual(draw.slice(0, 2), [
          percent(trace[token].draw.winner.probability),
          trace[token].draw.winner.u.toFixed(4),
        ]);
      }
    }
    assert.deepEqual(problems, []);
    await context.close();
  });
}

test("a slider shows what the server computes with another setting", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 16, seed: 5, preset: "", parameters: { temperature: 0.7 }, colors: "cut" });
  await send(page, QUESTION);
  await replyEnded(page);
  const chat = await server.post("/v1/chat/completions", {
    model: "tiny",
    messages,
    seed: 5,
    temperature: 0.7,
    max_completion_tokens: 16,
    trace: true,
  });
  const ids = chat.choices[0].trace.map((trace) => trace.id);
  const prompt = (await server.post("/tokenize", { messages })).tokens;
  await page.locator('.reply [data-token="6"]').first().click();
  await page.click("#tab-choice");
  await page.waitForSelector("#what-if-temperature");
  await page.fill("#what-if-temperature", "1.5");
  await page.waitForSelector(".outcome .steps");
  const expected = await server.post("/v1/completions", {
    model: "tiny",
    prompt: [...prompt, ...ids.slice(0, 6)],
    seed: 5,
    temperature: 1.5,
    max_tokens: 1,
    trace: true,
  });
  compare(await cells(page, ".outcome .steps"), expected.choices[0].trace[0]);
  await context.close();
});

test("recorded steps are those of the reply", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 10, seed: 3, preset: "chat", recordsTraces: true, colors: "cut" });
  await send(page, QUESTION);
  await replyEnded(page);
  await page.locator('.reply [data-token="4"]').first().click();
  await page.click("#tab-choice");
  await page.waitForSelector(".origin");
  assert.match(await page.locator(".origin").innerText(), /^Recorded/);
  const { choices } = await server.post("/v1/chat/completions", {
    model: "tiny",
    messages,
    seed: 3,
    preset: "chat",
    max_completion_tokens: 10,
    trace: true,
  });
  compare(await cells(page, ".steps"), choices[0].trace[4]);
  await context.close();
});

test("tokens, cache, time, odds and request show the API's numbers", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 40, seed: 9, preset: "chat", colors: "cut" });
  await send(page, QUESTION);
  await replyEnded(page);
  await page.click(".reply .see");
  await page.click("#tab-tokens");
  const { tokens } = await server.post("/tokenize", { messages });
  await page.waitForSelector(".pieces .template");
  const shown = await page.locator(".pieces span.piece-button small").allTextContents();
  assert.deepEqual(shown.map(Number), tokens);
  // The template of the tiny model is `[turn]user: ...[end][turn]`, and the message lies between.
  const own = await page.locator(".pieces span.own .piece").allTextContents();
  assert.equal(own.join("").replaceAll("␣", " "), QUESTION);
  await page.click("#tab-cache");
  await page.waitForSelector(".blocks");
  assert.match(await page.locator(".blocks").getAttribute("aria-label"), /^\d+ blocks: \d+ from the cache/);
  await page.click("#tab-time");
  await page.waitForSelector(".waterfall tr");
  assert.equal(await page.locator(".waterfall tr").count(), 5);
  await page.click("#tab-odds");
  await page.waitForSelector(".alternatives");
  assert.equal(await page.locator(".chart [data-token]").count(), await page.locator(".raw-tokens .token").count());
  await page.click("#tab-request");
  await page.waitForSelector(".json");
  assert.match(await page.locator(".json").innerText(), /"seed": 9/);
  await page.click("#tab-beams");
  await page.click("button:has-text('Search')");
  await page.waitForSelector(".beams .rank");
  await context.close();
});

test("another token begins a branch that the model continues", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 24, seed: 2, preset: "chat", colors: "probability" });
  await send(page, QUESTION);
  await replyEnded(page);
  await page.locator('.reply [data-token="5"]').first().click();
  await page.click("#tab-odds");
  await page.waitForSelector(".alternatives");
  const before = await page.locator(".raw-tokens .token").allTextContents();
  const button = page.locator(".alternatives button").first();
  const other = (await button.locator("xpath=ancestor::tr").locator(".piece").innerText()).replaceAll("␣", " ");
  await button.click();
  await page.waitForSelector(".reply .branches");
  await replyEnded(page);
  const after = await page.locator(".raw-tokens .token").allTextContents();
  assert.deepEqual(after.slice(0, 5), before.slice(0, 5));
  assert.equal(after[5].replaceAll("\n", ""), other);
  assert.notEqual(after[5], before[5]);
  // Its steps can be seen as well.
  await page.locator('.reply [data-token="8"]').first().click();
  await page.click("#tab-choice");
  await page.waitForSelector(".origin");
  assert.equal(await page.locator(".panel-body .failure").count(), 0);
  await context.close();
});

test("a click on a word of Markdown finds its token", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 30, seed: 4, preset: "chat", colors: "off" });
  await send(page, QUESTION);
  await replyEnded(page);
  const token = lastReply(page).locator('[data-token="7"]').first();
  const text = (await token.innerText()).trim();
  await token.click();
  await page.waitForSelector(".inspector");
  await page.waitForFunction(() => document.querySelector(".token-name")?.textContent.includes(" 8 of "));
  const shown = (await page.locator(".token-name b").innerText()).replaceAll("␣", " ").trim();
  assert.ok(shown.includes(text) || text === "", `${shown} and ${text}`);
  await context.close();
});

test("a model without a chat template continues a text, and its steps are recorded", async () => {
  const folder = join(scratch, "completions");
  cpSync(tinyModel(), folder, { recursive: true });
  rmSync(join(folder, "chat_template.jinja"));
  const own = await serve(folder);
  const { page, context, problems } = await open(own.url);
  await withSettings(page, { maxTokens: 20, seed: 6, preset: "chat", colors: "cut" });
  await send(page, "once upon a time");
  await replyEnded(page);
  await page.locator('.reply [data-token="3"]').first().click();
  await page.click("#tab-choice");
  await page.waitForSelector(".origin");
  const body = { model: "tiny", prompt: "once upon a time", seed: 6, preset: "chat", max_tokens: 20, trace: true };
  const { trace } = (await own.post("/v1/completions", body)).choices[0];
  compare(await cells(page, ".steps"), trace[3]);
  assert.deepEqual(problems, []);
  await context.close();
  await own.kill();
});
