// The inspector: its numbers equal those that the API returns.
import assert from "node:assert/strict";
import { cpSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { join } from "node:path";
import {
  anyModel,
  browser,
  lastReply,
  open,
  replyEnded,
  scratch,
  send,
  serve,
  tinyModel,
  withSettings,
} from "./setup.mjs";

let server;
before(async () => {
  server = await serve(anyModel());
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
  const shown = await page.locator(".pieces [aria-pressed] small").allTextContents();
  assert.deepEqual(shown.map(Number), tokens);
  // The template of the tiny model is `[turn]user: ...[end][turn]`, and the message lies between.
  const own = await page.locator(".pieces .own .piece").allTextContents();
  assert.equal(own.join("").replaceAll("␣", " "), QUESTION);
  await page.click("#tab-cache");
  await page.waitForSelector(".blocks");
  assert.match(await page.locator(".blocks").getAttribute("aria-label"), /^\d+ blocks: \d+ from the cache/);
  await page.click("#tab-time");
  await page.waitForSelector(".waterfall tr");
  const spans = await page.locator(".waterfall th").evaluateAll((all) => all.map((one) => one.firstChild.textContent));
  assert.deepEqual(spans, ["network, parsing", "queue", "prefill", "decode", "sampling", "delivery"]);
  await page.click("#tab-odds");
  await page.waitForSelector(".alternatives");
  assert.equal(await page.locator(".chart [data-token]").count(), await page.locator(".raw-tokens .token").count());
  await page.click("#tab-request");
  await page.waitForSelector(".json");
  assert.match(await page.locator(".json").innerText(), /"seed": 9/);
  await page.click("#tab-beams");
  await page.click("button:has-text('Search')");
  await page.waitForSelector(".beams .rank");
  // The path from the root of the tree to each beam's end is the text of that beam.
  const paths = await page.locator(".beams .rank").evaluateAll((ends) =>
    ends.map((end) => {
      const pieces = [];
      for (let item = end.closest("li"); item; item = item.parentElement.closest("li")) {
        pieces.unshift(item.querySelector(":scope > .run").textContent);
      }
      return [end.textContent, pieces.join("").replace(/[\s␣↵⇥]/g, "")];
    }),
  );
  const beams = await server.post("/v1/chat/completions", {
    model: "tiny",
    messages,
    beam_width: 4,
    n: 4,
    max_tokens: 12,
  });
  const texts = beams.choices.map(({ message }) => message.content.replace(/\s/g, ""));
  assert.ok(paths.length > 1);
  for (const [name, text] of paths) assert.equal(text, texts[Number(name.replace("beam ", "")) - 1], name);
  assert.ok(
    (await page.locator(".beams > ul > li").count()) < paths.length,
    "beams with a common beginning are a tree",
  );
  await context.close();
});

test("layers and attention show the API's probe", async () => {
  const { page, context, problems } = await open(server.url);
  await withSettings(page, { maxTokens: 12, seed: 8, preset: "chat", colors: "cut" });
  await send(page, QUESTION);
  await replyEnded(page);
  const body = { model: "tiny", messages, seed: 8, preset: "chat", max_completion_tokens: 12 };
  const probe = async (fields) =>
    (await server.post("/v1/chat/completions", { ...body, probe: { token: 5, ...fields } })).pellucid.probe;
  const expected = await probe({ layers: 3, attention: { layer: 0, rows: 24 } });
  await page.locator('.reply [data-token="5"]').first().click();
  await page.click("#tab-inside");
  await page.waitForSelector(".layers tbody tr");
  assert.match(await page.locator(".origin").innerText(), /^Probed/);
  const layers = await page
    .locator(".layers tbody tr")
    .evaluateAll((rows) =>
      rows.map((row) => ({
        guesses: [...row.querySelectorAll(".guess small")].map((cell) => cell.textContent),
        own: row.querySelector(".bar .value").textContent,
      })),
    );
  assert.equal(layers.length, expected.num_layers);
  layers.forEach(({ guesses, own }, i) => {
    const { logprob, top } = expected.layers[i];
    assert.deepEqual(
      guesses,
      top.map((guess) => percent(Math.exp(guess.logprob))),
    );
    assert.equal(own, percent(Math.exp(logprob)));
  });
  const shownWeights = () =>
    page.locator(".arcs [data-position]").evaluateAll((all) => all.map((one) => Number(one.dataset.weight)));
  await page.waitForSelector(".arcs [data-position]");
  assert.deepEqual(await shownWeights(), expected.attention.weights.at(-1));
  const titles = await page.locator(".matrix rect title").allTextContents();
  assert.equal(titles.filter((title) => title.startsWith("masked")).length, (24 * 23) / 2);
  assert.ok(titles.some((title) => title.endsWith(`: ${percent(expected.attention.weights[3].at(-1))}`)));
  const other = await probe({ attention: { layer: 1, head: 1, rows: 24 } });
  await page.selectOption("#attention-layer", "1");
  await page.selectOption("#attention-head", "1");
  const last = other.attention.weights.at(-1);
  await page.waitForFunction(
    (weight) => Number([...document.querySelectorAll(".arcs [data-position]")].at(-1)?.dataset.weight) === weight,
    last.at(-1),
  );
  assert.deepEqual(await shownWeights(), last);
  assert.deepEqual(problems, []);
  await context.close();
});

test("layers and attention equal those that transformers computes", async () => {
  const fixtures = new URL("../../crates/selftest/fixtures/", import.meta.url);
  const reference = JSON.parse(readFileSync(new URL("probes.json", fixtures), "utf8")).llama3;
  const folder = join(scratch, "reference");
  cpSync(new URL("goldens/llama3", fixtures), folder, { recursive: true });
  rmSync(join(folder, "model.gguf"));
  // A vocabulary of single characters, so that a text has the ids of the reference's prompt.
  const special = ["<unk>", "<s>", "</s>"];
  const characters = Array.from({ length: 93 }, (_, i) => String.fromCharCode(33 + i));
  const vocab = [...special, ...characters];
  const token = (content, id) => ({
    id,
    content,
    special: true,
    single_word: false,
    lstrip: false,
    rstrip: false,
    normalized: false,
  });
  const tokenizer = {
    version: "1.0",
    added_tokens: special.map(token),
    decoder: { type: "Fuse" },
    model: {
      type: "BPE",
      unk_token: "<unk>",
      vocab: Object.fromEntries(vocab.map((text, id) => [text, id])),
      merges: [],
    },
  };
  writeFileSync(join(folder, "tokenizer.json"), JSON.stringify(tokenizer));
  // AMX rounds activations to bfloat16; the reference does not. The cache of keys and values is rounded in both cases.
  const own = await serve(folder, { flags: ["--cpu-isa", "scalar"] });
  const { page, context, problems } = await open(own.url);
  await withSettings(page, { maxTokens: 2, seed: 1, preset: "", colors: "cut" });
  await send(page, reference.prompt.map((id) => vocab[id]).join(""));
  await replyEnded(page);
  await page.locator('.reply [data-token="0"]').first().click();
  await page.click("#tab-inside");
  await page.waitForSelector(".layers tbody tr");
  const shown = await page
    .locator(".layers tbody tr")
    .evaluateAll((rows) => rows.map((row) => [...row.querySelectorAll(".guess")].map((one) => one.textContent)));
  assert.equal(shown.length, reference.layers.length);
  shown.forEach((guesses, layer) => {
    const logits = reference.layers[layer];
    const sum = logits.reduce((total, logit) => total + Math.exp(logit), 0);
    const best = logits.map((logit, id) => [Math.exp(logit) / sum, vocab[id]]).sort(([a], [b]) => b - a);
    assert.ok(guesses.length > 0);
    guesses.forEach((guess, i) => {
      assert.ok(guess.startsWith(best[i][1]), `layer ${layer}: ${guess} and ${best[i]}`);
      const value = Number(guess.match(/([\d.e-]+) %$/)[1]) / 100;
      assert.ok(Math.abs(value - best[i][0]) < 2e-3, `layer ${layer}: ${guess} and ${best[i]}`);
    });
  });
  await page.selectOption("#attention-layer", "1");
  await page.selectOption("#attention-head", "2");
  // The last row of the reference is that of the last token of the prompt, which the reply's first token follows.
  const expected = reference.attention[1][2].at(-1);
  const weights = () =>
    page.locator(".arcs [data-position]").evaluateAll((all) => all.map((one) => Number(one.dataset.weight)));
  await page.waitForFunction((weight) => {
    const first = document.querySelector(".arcs [data-position]");
    return first !== null && Math.abs(Number(first.dataset.weight) - weight) < 1e-3;
  }, expected[0]);
  const found = await weights();
  assert.equal(found.length, reference.prompt.length);
  found.forEach((weight, i) => assert.ok(Math.abs(weight - expected[i]) < 1e-3, `${i}: ${weight} and ${expected[i]}`));
  assert.deepEqual(problems, []);
  await context.close();
  await own.kill();
});

test("the cache panel says why no more was reused, and the time panel shows the server's times and batch", async () => {
  const { page, context, problems } = await open(server.url);
  await withSettings(page, { maxTokens: 12, seed: 8, preset: "chat", recordsTraces: true, colors: "cut" });
  // Only whole blocks of 32 tokens are cached, so the difference lies between texts of several blocks.
  const words = "a long question that fills more than one block of the cache with the very same words, and then ";
  const long = words.repeat(4);
  await send(page, `${long}ends here ${long}`);
  await replyEnded(page);
  await page.keyboard.press("Escape");
  await page.click("button:has-text('New chat')");
  const [response] = await Promise.all([
    page.waitForResponse((one) => one.url().endsWith("/v1/chat/completions")),
    send(page, `${long}goes on there ${long}`),
  ]);
  await replyEnded(page);
  const chunks = (await response.text()).split("\n").filter((line) => line.startsWith("data: {"));
  const { pellucid } = JSON.parse(chunks.at(-1).slice(6));
  const [miss] = pellucid.cache_misses;
  assert.equal(miss.reason, "differs");
  assert.ok(`${long}goes on there`.includes(miss.before + miss.prompt.slice(0, 4)), JSON.stringify(miss));
  await page.locator('.reply [data-token="2"]').first().click();
  await page.click("#tab-cache");
  await page.waitForSelector(".prompt-difference");
  assert.deepEqual(await page.locator(".prompt-difference mark").allTextContents(), [miss.prompt, miss.cached]);
  assert.match(await page.locator(".why-not p").innerText(), new RegExp(`^Token ${miss.position} differs`));
  await page.click("#tab-time");
  await page.waitForSelector(".gaps");
  const counts = (await page.locator(".gaps .value").allTextContents()).map(Number);
  assert.deepEqual(
    counts,
    pellucid.timings.gaps.counts.filter((count) => count > 0),
  );
  const sizes = await page
    .locator(".batch [data-size]")
    .evaluateAll((all) => all.map((one) => Number(one.dataset.size)));
  assert.ok(sizes.length > 5 && sizes.every((size) => size === 1), `${sizes}`);
  assert.deepEqual(problems, []);
  await context.close();
});

test("the guided walk leads through every station", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 12, seed: 8, preset: "chat" });
  await send(page, QUESTION);
  await replyEnded(page);
  await page.keyboard.press("Escape");
  await page.keyboard.press("w");
  const stations = ["request", "tokens", "cache", "inside", "odds", "choice", "time", "drafts", "beams"];
  for (const [i, tab] of stations.entries()) {
    await page.waitForSelector(`.walk:has-text('Station ${i + 1} of ${stations.length}')`);
    await page.waitForSelector(`#tab-${tab}[aria-selected=true]`);
    // A station begins at its top, wherever the one before was left.
    await page.waitForFunction(() => document.querySelector(".panel-body").scrollTop === 0);
    await page.locator(".panel-body").evaluate((body) => (body.scrollTop = body.scrollHeight));
    await page.click(".walk .primary");
  }
  await page.waitForSelector(".walk", { state: "detached" });
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
  // Side by side, the first token that differs is marked.
  await page.click(".reply button:has-text('Compare')");
  await page.waitForSelector("dialog.compare .difference");
  const columns = page.locator("dialog.compare section");
  for (const side of [0, 1]) {
    const marked = await columns
      .nth(side)
      .locator(".token")
      .evaluateAll((all) => all.map((one) => one.classList.contains("difference")));
    assert.equal(marked.indexOf(true), 5);
    assert.equal(marked.lastIndexOf(true), 5);
  }
  assert.match(await page.locator("dialog.compare").innerText(), /The first 5 tokens are equal/);
  await page.keyboard.press("Escape");
  // After a reload, the recording of the branch that is not shown is read as well.
  await page.reload();
  await page.click(".sidebar .entry");
  await page.click(".reply button:has-text('Compare')");
  await page.waitForSelector("dialog.compare:has-text('The first 5 tokens are equal')");
  await page.keyboard.press("Escape");
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
