// The chat: streams, stop, branches, conversations, keys, failures.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { browser, lastReply, open, replyEnded, send, serve, slowNetwork, tinyModel, withSettings } from "./setup.mjs";

/** Without it, the tiny model would end a long reply at random. */
const LONG = ["--min-tokens", "3500"];

let server, model;
before(async () => {
  model = tinyModel();
  server = await serve(model);
});
after(async () => {
  await browser.close();
  await server.kill();
});

/** Text of a reply as the model wrote it. */
const rawText = async (page) => (await lastReply(page).locator(".reply-text").innerText()).trim();

test("a reply streams, and equals the server's", async () => {
  const { page, context, problems } = await open(server.url);
  await withSettings(page, { maxTokens: 40, seed: 7, preset: "chat", colors: "cut" });
  await send(page, "a question");
  await replyEnded(page);
  const messages = [{ role: "user", content: "a question" }];
  const body = { model: "tiny", messages, seed: 7, preset: "chat", max_completion_tokens: 40 };
  const whole = await server.post("/v1/chat/completions", body);
  const shown = await page.locator(".reply .raw-tokens .token").allTextContents();
  assert.equal(shown.join("").replaceAll("↵", "").replaceAll("⇥", ""), whole.choices[0].message.content);
  assert.match(await lastReply(page).locator(".facts").innerText(), /tokens .* first after .* prompt tokens cached/);
  assert.deepEqual(problems, []);
  await context.close();
});

test("stop ends a reply and keeps its beginning", async () => {
  const own = await serve(model, { flags: LONG });
  const { page, context } = await open(own.url);
  await withSettings(page, { maxTokens: 3900 });
  await slowNetwork(page);
  await send(page, "long");
  await page.waitForFunction(() => (document.querySelector(".reply-text")?.textContent.length ?? 0) > 20);
  await page.click('[aria-label="Stop the reply"]');
  await page.waitForSelector(".message.reply.stopped");
  assert.match(await lastReply(page).locator(".facts").innerText(), /stopped by you/);
  assert.ok((await rawText(page)).length > 10);
  await page.waitForSelector('[aria-label="Send"]');
  await context.close();
  await own.kill();
});

test("an edited message and another reply are branches", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 12, colors: "off" });
  await send(page, "first words");
  await replyEnded(page);
  await page.click(".message.user button:has-text('Edit')");
  await page.fill('[aria-label="Edit message"]', "other words");
  await page.click("button:has-text('Send as a branch')");
  await page.waitForFunction(() => document.querySelector(".bubble")?.textContent === "other words");
  await replyEnded(page);
  assert.equal(await page.locator(".message.user .branches span").innerText(), "2/2");
  await page.click('.message.user [aria-label="Previous branch"]');
  assert.equal(await page.locator(".bubble").innerText(), "first words");
  await page.click(".reply button:has-text('Regenerate')");
  await page.waitForSelector(".reply .branches");
  await replyEnded(page);
  assert.equal(await page.locator(".reply .branches span").innerText(), "2/2");
  await page.click(".reply button:has-text('Compare')");
  await page.waitForSelector("dialog.compare .columns");
  await page.keyboard.press("Escape");
  // A reload shows the same conversation.
  await page.reload();
  await page.click(".sidebar .entry");
  assert.equal(await page.locator(".bubble").innerText(), "first words");
  assert.equal(await page.locator(".reply .branches span").innerText(), "2/2");
  await context.close();
});

test("conversations are found, renamed, exported, deleted and imported", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 6 });
  await send(page, "apples and pears");
  await replyEnded(page);
  await page.click(".sidebar .new");
  await send(page, "mountains");
  await replyEnded(page);
  await page.fill('[aria-label="Search conversations"]', "pears");
  assert.equal(await page.locator(".sidebar .entry").count(), 1);
  await page.click(".sidebar .entry");
  await page.click(".entry-actions button:has-text('Rename')");
  await page.fill('[aria-label="Name of the conversation"]', "Fruit");
  await page.press('[aria-label="Name of the conversation"]', "Enter");
  const download = page.waitForEvent("download");
  await page.click(".entry-actions button:has-text('Export')");
  const file = await (await download).path();
  const exported = JSON.parse(readFileSync(file, "utf8"));
  assert.equal(exported.title, "Fruit");
  await page.click(".entry-actions button:has-text('Delete')");
  await page.fill('[aria-label="Search conversations"]', "");
  await page.waitForFunction(() => document.querySelectorAll(".sidebar .entry").length === 1);
  await page.setInputFiles(".sidebar input[type=file]", {
    name: "a.json",
    mimeType: "application/json",
    buffer: readFileSync(file),
  });
  await page.waitForFunction(() => document.querySelector(".bubble")?.textContent === "apples and pears");
  await page.setInputFiles(".sidebar input[type=file]", {
    name: "b.json",
    mimeType: "application/json",
    buffer: Buffer.from("[1]"),
  });
  await page.waitForFunction(() => document.querySelector(".notice")?.textContent.includes("no exported conversation"));
  await context.close();
});

test("everything can be done with the keyboard", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 20 });
  await page.waitForSelector(".welcome");
  await page.keyboard.press("?");
  await page.waitForSelector("dialog[open]");
  assert.ok((await page.locator("dialog .keys tr").count()) > 15);
  await page.keyboard.press("Escape");
  await page.waitForSelector("dialog", { state: "detached" });
  await page.keyboard.press("/");
  await page.keyboard.type("with keys alone");
  await page.keyboard.press("Enter");
  await replyEnded(page);
  await page.keyboard.press("Escape");
  await page.keyboard.press("i");
  await page.waitForSelector(".inspector");
  const name = () => page.locator(".token-name").innerText();
  const first = await name();
  await page.keyboard.press("ArrowRight");
  await page.waitForFunction(() => document.querySelector(".token-name")?.textContent.includes(" 2 of "));
  assert.notEqual(await name(), first);
  await page.keyboard.press("Alt+ArrowDown");
  await page.waitForSelector("#tab-odds[aria-selected=true]");
  await page.keyboard.press("Escape");
  await page.waitForSelector(".inspector", { state: "detached" });
  await page.keyboard.press("e");
  await page.waitForSelector('[aria-label="Edit message"]');
  await page.keyboard.press("Escape");
  await page.keyboard.press("o");
  await page.waitForSelector(".operations .card");
  await page.keyboard.press("o");
  await page.keyboard.press("n");
  await page.waitForSelector(".welcome");
  await context.close();
});

test("a reply follows the schema of the settings", async () => {
  const { page, context } = await open(server.url);
  await page.waitForSelector(".welcome");
  await page.keyboard.press("p");
  await page.fill("#schema", '{"enum": ["yes", "no"]');
  await page.waitForSelector("dialog .failure");
  await page.fill("#schema", '{"enum": ["yes", "no"]}');
  await page.waitForSelector("dialog .failure", { state: "detached" });
  await page.keyboard.press("Escape");
  await send(page, "well?");
  await replyEnded(page);
  assert.match(await rawText(page), /^"(yes|no)"$/);
  await context.close();
});

test("a restart of the server in the middle of a reply is told, and the page recovers", async () => {
  let own = await serve(model, { flags: LONG });
  const { page, context } = await open(own.url);
  await withSettings(page, { maxTokens: 3900 });
  const endSlowNetwork = await slowNetwork(page);
  await send(page, "long");
  await page.waitForFunction(() => (document.querySelector(".reply-text")?.textContent.length ?? 0) > 20);
  await own.kill();
  await endSlowNetwork();
  await page.waitForSelector(".message.reply.failed .failure");
  await page.waitForSelector(".banner.offline");
  own = await serve(model, { port: own.port });
  await page.waitForSelector(".banner", { state: "detached" });
  await withSettings(page, { maxTokens: 12 });
  await page.click(".sidebar .entry");
  await page.click(".reply button:has-text('Try again'), .reply button:has-text('Regenerate')");
  await page.waitForSelector(".message.reply.done");
  await context.close();
  await own.kill();
});

test("a server with keys asks for one", async () => {
  const own = await serve(model, { env: { PELLUCID_API_KEY: "a-long-secret" } });
  const { page, context } = await open(own.url);
  await page.waitForSelector("dialog input[type=password]");
  await page.fill("dialog input[type=password]", "a-wrong-secret");
  await page.click("button:has-text('Use this key')");
  await page.waitForSelector(".banner.key");
  await page.waitForSelector("dialog input[type=password]");
  await page.fill("dialog input[type=password]", "a-long-secret");
  await page.click("button:has-text('Use this key')");
  await page.waitForSelector(".welcome");
  await page.waitForSelector(".banner", { state: "detached" });
  const kept = await page.evaluate(() => [
    localStorage.getItem("pellucid.key"),
    sessionStorage.getItem("pellucid.key"),
  ]);
  assert.deepEqual(kept, [null, "a-long-secret"]);
  await context.close();
  await own.kill();
});
