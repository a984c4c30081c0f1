// Hostile replies, accessibility, small screens, long replies.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { axeSource, browser, open, replyEnded, send, serve, tinyModel, withSettings } from "./setup.mjs";

let server, model;
before(async () => {
  model = tinyModel();
  server = await serve(model);
});
after(async () => {
  await browser.close();
  await server.kill();
});

const HOSTILE = `<script>window.hacked = 1</script><img src="http://evil.example/a.png" onerror="window.hacked = 2">
<iframe src="http://evil.example"></iframe><svg onload="window.hacked = 3"><style>* { display: none }</style>

[click](javascript:window.hacked=4) [data](data:text/html,<script>alert(1)</script>) ![pixel](http://evil.example/b.png)
[vb](vbscript:x) <javascript:alert(1)> [good](https://example.org/a?b=c) **bold <b>not bold</b>**

| a | b |
|---|---|
| <img src=x onerror=window.hacked=5> | \`<script>\` |

\`\`\`html
<script>window.hacked = 6</script>
\`\`\`

# <h1 onclick=alert(1)>Heading
1. <a href="javascript:alert(1)">item</a>
> quote <form action="http://evil.example"><input name=q></form>

$$ \\href{javascript:alert(1)}{x} $$ &lt;b&gt; \u202Edesrever ${"*".repeat(400)}${"[".repeat(400)}`;

/** Private memory of the largest renderer, in bytes. Chromium gives each page of the same site one process. */
async function rendererMemory() {
  const client = await browser.newBrowserCDPSession();
  const { processInfo } = await client.send("SystemInfo.getProcessInfo");
  const sizes = processInfo
    .filter(({ type }) => type === "renderer")
    .map(({ id }) => {
      const lines = readFileSync(`/proc/${id}/smaps_rollup`, "utf8").matchAll(/^Private_\w+: +(\d+) kB/gm);
      return [...lines].reduce((sum, [, kilobytes]) => sum + 1024 * Number(kilobytes), 0);
    });
  return Math.max(...sizes);
}

/** A conversation as a file, with a reply that no model needs to write. */
function conversation(text) {
  const empty = { thoughts: HOSTILE, calls: [], created: 1, model: "tiny", finish: null };
  const nodes = {
    a: { ...empty, parent: null, role: "user", text: HOSTILE },
    b: { ...empty, parent: "a", role: "assistant", text, calls: [{ function: { name: HOSTILE, arguments: HOSTILE } }] },
  };
  return Buffer.from(JSON.stringify({ title: HOSTILE, system: "", nodes }));
}

async function importReply(page, text) {
  await page.waitForSelector(".sidebar input[type=file]", { state: "attached" });
  const buffer = conversation(text);
  await page.setInputFiles(".sidebar input[type=file]", { name: "a.json", mimeType: "application/json", buffer });
  await page.waitForSelector(".message.reply");
}

test("a hostile reply stays text", async () => {
  const { page, context, problems } = await open(server.url);
  await importReply(page, HOSTILE);
  await page.evaluate(() => document.querySelectorAll("details").forEach((element) => (element.open = true)));
  await page.waitForTimeout(300);
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  const inside = page.locator(".message.reply");
  assert.equal(await inside.locator("script, img, iframe, form, object, embed, style, h1, b").count(), 0);
  const links = await inside.locator("a").evaluateAll((all) => all.map((a) => [a.getAttribute("href"), a.rel]));
  assert.ok(links.length > 2);
  for (const [href, rel] of links) {
    assert.match(href, /^https?:\/\/(evil|example)\./);
    assert.equal(rel, "noopener noreferrer nofollow");
  }
  assert.equal(await inside.locator("strong").innerText(), "bold <b>not bold</b>");
  assert.match(await inside.innerText(), /<script>window\.hacked = 1<\/script>/);
  assert.deepEqual(problems, []);
  await context.close();
});

test("Markdown of a reply becomes elements", async () => {
  const { page, context } = await open(server.url);
  const start = "## Title\n\nA *b* **c** `d` ~~e~~.\n\n- one\n  - two\n\n3. three\n\n> q\n\n";
  const table = "| x | y |\n|:-:|--:|\n| 1 | 2 |\n\n";
  const code = "```rust\nfn main() {} // end\n```\n\n---\n";
  const end = "https://example.org.\n\n$\\frac{a}{b_1}$ $\\unknown$ $5";
  await importReply(page, start + table + code + end);
  const reply = page.locator(".markdown");
  for (const selector of [
    "h4",
    "em",
    "strong",
    "p code",
    "del",
    "ul ul li",
    "ol[start='3'] li",
    "blockquote p",
    "td.align-end",
    "hr",
  ]) {
    assert.equal(await reply.locator(selector).count(), 1, selector);
  }
  const namespace = await reply.locator("math mfrac msub").evaluate((element) => element.namespaceURI);
  assert.match(namespace, /MathML$/);
  assert.match(await reply.innerText(), /\\unknown \$5/);
  assert.equal(await reply.locator(".code-comment").innerText(), "// end");
  assert.equal(await reply.locator("a").getAttribute("href"), "https://example.org/");
  await page.click('[aria-label="Copy code"]');
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "fn main() {} // end");
  await context.close();
});

/** Runs axe-core. It is evaluated by the debugger, so the page's policy stays as it is. */
async function violations(page, runOnly) {
  await page.evaluate(axeSource);
  const options = { resultTypes: ["violations"], ...(runOnly ? { runOnly } : {}) };
  const results = await page.evaluate((options) => globalThis.axe.run(document, options), options);
  return results.violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target).join(", ")}`);
}

for (const colorScheme of ["light", "dark"]) {
  test(`no violations of accessibility rules, ${colorScheme}`, async () => {
    const { page, context } = await open(server.url, { colorScheme });
    // The themes differ in their colors alone, so one of them is checked by all rules.
    const rules = colorScheme === "dark" ? ["color-contrast", "link-in-text-block"] : undefined;
    const passes = async (state) => assert.deepEqual(await violations(page, rules), [], state);
    await page.waitForSelector(".welcome");
    await passes("welcome");
    // The most probable token is the only candidate, so its bar lies under the whole number.
    await withSettings(page, { maxTokens: 30, colors: "probability", preset: "factual", seed: 1 });
    await send(page, "a question");
    await replyEnded(page);
    await passes("chat");
    await page.click(".reply .see");
    for (const tab of ["tokens", "choice", "odds", "inside", "cache", "time", "drafts", "beams", "request"]) {
      await page.click(`#tab-${tab}`);
      if (tab === "choice") await page.waitForSelector(".origin");
      // Texts must be readable on bars of any width.
      await page.evaluate(() => document.querySelectorAll(".bar .fill").forEach((fill) => (fill.style.width = "100%")));
      if (tab === "inside") await page.waitForSelector(".arcs [data-position]");
      if (tab === "tokens") await page.waitForSelector(".pieces .template");
      await passes(tab);
    }
    await page.keyboard.press("w");
    await page.waitForSelector(".walk");
    await passes("walk");
    for (const [key, name] of [
      ["p", "settings"],
      ["?", "keys"],
      ["k", "key"],
    ]) {
      await page.keyboard.press(key);
      await page.waitForSelector("dialog");
      await passes(name);
      await page.keyboard.press("Escape");
      await page.waitForSelector("dialog", { state: "detached" });
    }
    await page.click(".reply button:has-text('Regenerate')");
    await page.waitForSelector(".reply .branches");
    await replyEnded(page);
    await page.click(".reply button:has-text('Compare')");
    await page.waitForSelector("dialog.compare");
    await passes("compare");
    await page.keyboard.press("Escape");
    await page.click(".switch button:has-text('Operations')");
    await page.waitForSelector(".operations .card");
    await passes("operations");
    await context.close();
  });
}

test("the page fits a phone", async () => {
  const { page, context } = await open(server.url, { viewport: { width: 360, height: 740 }, hasTouch: true });
  const fits = () => page.evaluate(() => document.documentElement.scrollWidth <= innerWidth);
  await page.waitForSelector(".welcome");
  assert.ok(await fits(), "welcome");
  await withSettings(page, { maxTokens: 30, preset: "chat", colors: "off" });
  await send(page, "a question");
  await replyEnded(page);
  assert.ok(await fits(), "chat");
  await page.tap('[aria-label="Conversations"]');
  await page.waitForSelector(".sidebar.open .entry");
  await page.tap(".sidebar .entry");
  await page.locator(".reply [data-token]").first().tap();
  await page.waitForSelector(".inspector .panel-body");
  assert.ok(await fits(), "inspector");
  await page.locator(".token-name b").evaluate((name) => (name.textContent = "a-long-token".repeat(8)));
  assert.ok(await fits(), "a long token");
  // The inspector covers the messages. A branch begins there, so the inspector closes.
  await page.tap("#tab-odds");
  await page.locator(".alternatives button").first().tap();
  await page.waitForSelector(".reply .branches:has-text('2/2')");
  await replyEnded(page);
  await page.tap(".reply .see");
  await page.waitForSelector(".inspector .panel-body");
  await page.tap('[aria-label="Close the inspector"]');
  await page.waitForSelector("#prompt");
  await context.close();
});

test("a reply of 2,000 tokens scrolls smoothly and stays small", async () => {
  const own = await serve(model, { flags: ["--min-tokens", "2000"] });
  const { page, context } = await open(own.url);
  await withSettings(page, {
    maxTokens: 2000,
    preset: "",
    colors: "probability",
    recordsTraces: true,
    parameters: { temperature: 1 },
    seed: 1,
  });
  await send(page, "a very long reply");
  await replyEnded(page);
  const count = await page.locator(".raw-tokens .token").count();
  const client = await context.newCDPSession(page);
  await client.send("Performance.enable");
  const metrics = async () =>
    Object.fromEntries((await client.send("Performance.getMetrics")).metrics.map((one) => [one.name, one.value]));
  // Milliseconds of work on the page's thread for each frame. Of several rounds the best counts: other programs of the
  // machine can only make a round slower.
  const rounds = [];
  for (let round = 0; round < 4; round++) {
    const before = await metrics();
    await page.evaluate(async () => {
      const scroller = document.querySelector(".messages");
      for (let i = 0; i < 60; i++) {
        scroller.scrollTop = (scroller.scrollHeight * (i % 30)) / 30;
        await new Promise(requestAnimationFrame);
      }
    });
    rounds.push(((await metrics()).TaskDuration - before.TaskDuration) * (1000 / 60));
  }
  const best = Math.min(...rounds);
  await client.send("HeapProfiler.collectGarbage");
  const { JSHeapUsedSize } = await metrics();
  const memory = await rendererMemory();
  const megabytes = (bytes) => `${(bytes / 1e6).toFixed(0)} MB`;
  const sizes = `heap ${megabytes(JSHeapUsedSize)}, private memory ${megabytes(memory)}`;
  console.log(`${count} tokens: ${best.toFixed(1)} ms a frame, ${sizes}`);
  assert.equal(count, 2000);
  assert.ok(best < 16, `${best} ms of work for a frame`);
  assert.ok(memory < 150e6 && JSHeapUsedSize < memory, sizes);
  await context.close();
  await own.kill();
});
