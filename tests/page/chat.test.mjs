// The chat: streams, stop, branches, conversations, keys, failures.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import {
  browser,
  lastReply,
  open,
  replyEnded,
  send,
  serve,
  shows,
  slowNetwork,
  tinyModel,
  withSettings,
} from "./setup.mjs";

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
  await shows(page, ".bubble", "other words");
  await replyEnded(page);
  assert.equal(await page.locator(".message.user .branches span").innerText(), "2/2");
  await page.click('.message.user [aria-label="Previous branch"]');
  await shows(page, ".bubble", "first words");
  await page.click(".reply button:has-text('Regenerate')");
  await page.waitForSelector(".reply .branches");
  await replyEnded(page);
  await shows(page, ".reply .branches span", "2/2");
  await page.click(".reply button:has-text('Compare')");
  await page.waitForSelector("dialog.compare .columns");
  await page.keyboard.press("Escape");
  // A reload shows the same conversation.
  await page.reload();
  await page.click(".sidebar .entry");
  await shows(page, ".bubble", "first words");
  await shows(page, ".reply .branches span", "2/2");
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
  await page.waitForFunction(() => document.querySelectorAll(".sidebar .entry").length === 1);
  await page.click(".sidebar .entry");
  await page.click(".entry-actions button:has-text('Rename')");
  await page.fill('[aria-label="Name of the conversation"]', "Fruit");
  await page.press('[aria-label="Name of the conversation"]', "Enter");
  const download = page.waitForEvent("download");
  await page.click(".entry-actions button:has-text('Export')");
  const file = await (await download).path();
  const exported = JSON.parse(readFileSync(file, "utf8"));
  assert.equal(exported.title, "Fruit");
  // The first press asks, the second deletes.
  await page.click(".entry-actions .delete");
  await page.waitForSelector(".entry-actions .delete:has-text('Really delete')");
  assert.equal(await page.locator(".sidebar .entry").count(), 1);
  await page.click(".entry-actions .delete");
  // A new conversation takes the focus.
  await page.waitForFunction(() => document.activeElement?.id === "prompt");
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

test("every key of the help does what it says", async () => {
  const { page, context, problems } = await open(server.url);
  await withSettings(page, { maxTokens: 16, preset: "chat" });
  await send(page, "the first message");
  await replyEnded(page);
  await page.keyboard.press("Escape");
  await page.keyboard.press("?");
  await page.waitForSelector("dialog .keys");
  const listed = await page.locator("dialog .keys kbd").allTextContents();
  await page.keyboard.press("Escape");
  await page.waitForSelector("dialog", { state: "detached" });
  const press = async (name) => {
    await page.locator("#main").focus();
    await page.keyboard.press(name);
    tried.add(name);
  };
  // Those of the test above, and what fields and the inspector handle.
  const tried = new Set(["/", "Enter", "e", "i", "← →", "Alt+↑ ↓", "o", "n", "Esc", "?"]);
  const seen = (selector) => page.waitForSelector(selector);
  const clipboard = () => page.evaluate(() => navigator.clipboard.readText());
  const focused = (selector) => page.waitForFunction((one) => document.activeElement?.matches(one), selector);
  const chooses = async (name) => {
    const chooser = page.waitForEvent("filechooser");
    await press(name);
    return await chooser;
  };

  await (await chooses("a")).setFiles({ name: "a.txt", mimeType: "text/plain", buffer: Buffer.from("some text") });
  await seen(".attachments li");
  await page.click('[aria-label="Remove a.txt"]');
  await press("Shift+C");
  await seen(".notice:has-text('Copied your message')");
  assert.equal(await clipboard(), "the first message");
  await press("c");
  await seen(".notice:has-text('Copied the reply')");
  assert.notEqual(await clipboard(), "the first message");
  await press("r");
  await seen(".reply .branches:has-text('2/2')");
  await replyEnded(page);
  await press("[");
  await seen(".reply .branches:has-text('1/2')");
  await press("]");
  await seen(".reply .branches:has-text('2/2')");
  await press("d");
  await seen("dialog.compare");
  await page.keyboard.press("Escape");
  await page.waitForSelector("dialog", { state: "detached" });
  await page.keyboard.press("e");
  await page.fill('[aria-label="Edit message"]', "the second version");
  await page.keyboard.press("Control+Enter");
  await seen(".message.user .branches:has-text('2/2')");
  await replyEnded(page);
  await press("{");
  await seen(".bubble:has-text('the first message')");
  await press("}");
  await seen(".bubble:has-text('the second version')");

  const [download] = await Promise.all([page.waitForEvent("download"), press("j")]);
  const buffer = readFileSync(await download.path());
  await (await chooses("Shift+J")).setFiles({ name: "a.json", mimeType: "application/json", buffer });
  await page.waitForFunction(() => document.querySelectorAll(".sidebar .entry").length === 2);
  await press(",");
  await seen(".sidebar li:nth-child(2).current");
  await press(".");
  await seen(".sidebar li:nth-child(1).current");
  await press("Shift+R");
  await focused(".sidebar .name");
  await page.keyboard.press("Enter");
  await press("Shift+D");
  await focused(".entry-actions .delete");
  await page.keyboard.press("Enter");
  await seen(".entry-actions .delete:has-text('Really delete')");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll(".sidebar .entry").length === 1);
  await press("s");
  await focused(".sidebar input[type=search]");
  await press("l");
  await page.waitForSelector(".sidebar.open", { state: "detached" });
  await press(",");
  await seen(".reply .actions");

  await press("w");
  await seen(".walk:has-text('Station 1 ')");
  await press("w");
  await seen(".walk:has-text('Station 2 ')");
  await press("Shift+W");
  await seen(".walk:has-text('Station 1 ')");
  await page.keyboard.press("Escape");
  await page.waitForSelector(".walk", { state: "detached" });
  for (const [i, tab] of ["tokens", "choice", "odds", "inside", "cache", "time", "drafts"].entries()) {
    await press(`${i + 1}`);
    await seen(`#tab-${tab}[aria-selected=true]`);
  }
  tried.add("1 – 9");
  await press("2");
  await seen(".what-if");
  await press("z");
  await focused(".what-if input[type=range]");
  await press("3");
  await seen(".alternatives button");
  await press("b");
  await focused(".alternatives button");
  await press("f");
  await seen(".beams .rank");
  await press("x");
  await seen(".raw-tokens");

  await press("m");
  await focused(".top .model");
  for (const [name, title] of [
    ["p", "Settings of a reply"],
    ["k", "API key"],
  ]) {
    await press(name);
    await seen(`dialog[aria-label="${title}"]`);
    await page.keyboard.press("Escape");
    await page.waitForSelector("dialog", { state: "detached" });
  }
  await press("t");
  await seen('.top [aria-label="Theme: light"]');
  const [reached] = await Promise.all([page.waitForRequest("**/v1/models"), press("u")]);
  assert.ok(reached);
  await press("q");
  await seen(".operations");
  // The reply has no code, so only the help names this key here; the test of Markdown copies code.
  tried.add("v");
  const left = listed.filter((name) => !tried.has(name));
  assert.deepEqual(left, [], "keys that this test does not press");
  assert.deepEqual(problems, []);
  await context.close();
});

test("system prompt, stop texts, settings, model and attached files are sent", async () => {
  const own = await serve(model, { flags: ["--alias", "second"] });
  const { page, context } = await open(own.url);
  await page.waitForSelector(".welcome");
  await page.selectOption(".top .model", "second");
  await page.keyboard.press("Escape");
  await page.click('[aria-label="Settings of a reply"]');
  await page.fill("dialog label:has-text('System prompt') textarea", "Be brief.");
  // Written key by key: an empty line must not vanish while the next one is begun.
  await page.locator("dialog label:has-text('Stop texts') textarea").pressSequentially("one\ntwo");
  await page.click("dialog .chip:has-text('creative')");
  await page.fill("#parameter-top_k", "7");
  await page.fill("#number-max_completion_tokens", "5");
  await page.press("#number-max_completion_tokens", "Tab");
  // An option that was set stands out.
  const opacity = await page.locator(".parameter.given").evaluate((row) => getComputedStyle(row).opacity);
  assert.equal(opacity, "1");
  // Each option has its meaning in a sentence of the server.
  for (const hint of await page.locator("dialog .parameter .hint").allTextContents()) assert.match(hint, /\w.*\./);
  await page.keyboard.press("Escape");
  await page.waitForSelector("dialog", { state: "detached" });
  await page.setInputFiles(".composer input[type=file]", [
    { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("remember the milk") },
    { name: "image.bin", mimeType: "application/octet-stream", buffer: Buffer.from([1, 0, 2]) },
  ]);
  await page.waitForSelector(".attachments li:has-text('notes.txt')");
  await page.waitForSelector(".notice:has-text('image.bin is not a text')");
  const [request] = await Promise.all([page.waitForRequest("**/v1/chat/completions"), send(page, "what is this?")]);
  const body = request.postDataJSON();
  assert.equal(body.model, "second");
  assert.deepEqual(body.messages, [
    { role: "system", content: "Be brief." },
    { role: "user", content: "what is this?\n\nnotes.txt:\n```\nremember the milk\n```" },
  ]);
  assert.deepEqual(
    [body.stop, body.preset, body.top_k, body.max_completion_tokens],
    [["one", "two"], "creative", 7, 5],
  );
  await replyEnded(page);
  assert.equal(await page.locator(".message.reply.failed").count(), 0);
  await context.close();
  await own.kill();
});

test("the sentence of each preset names the options that the server uses", async () => {
  const { page, context } = await open(server.url);
  await page.waitForSelector(".welcome");
  await page.keyboard.press("p");
  const neutral = (await server.post("/v1/chat/completions", chat({}))).pellucid.parameters;
  for (const preset of ["code", "factual", "chat", "creative", "brainstorm"]) {
    await page.click(`dialog .chip:has-text("${preset}")`);
    await page.waitForSelector(`dialog .chip.chosen:has-text("${preset}")`);
    const sentence = await page.locator("dialog fieldset .hint").first().innerText();
    const named = [...sentence.matchAll(/([a-z_]+) (\d[\d.]*\d|\d)/g)].map(([, name, value]) => [name, Number(value)]);
    const { parameters } = (await server.post("/v1/chat/completions", chat({ preset }))).pellucid;
    const used = Object.entries(parameters).filter(
      ([name, value]) => typeof value === "number" && value !== neutral[name],
    );
    const expected = new Map([["temperature", parameters.temperature], ...used]);
    assert.deepEqual(new Map(named.sort()), new Map([...expected].sort()), preset);
  }
  await context.close();
});

const chat = (fields) => ({
  model: "tiny",
  messages: [{ role: "user", content: "hi" }],
  max_completion_tokens: 1,
  ...fields,
});

test("thoughts and calls of a stream are shown folded, and the reply is announced", async () => {
  const { page, context } = await open(server.url);
  await withSettings(page, { maxTokens: 8 });
  // The tiny model neither thinks nor calls tools, so the stream is written here.
  const delta = (fields, finish = null) => ({ choices: [{ index: 0, delta: fields, finish_reason: finish }] });
  const call = (fields) => delta({ tool_calls: [{ index: 0, ...fields }] });
  const chunks = [
    delta({ role: "assistant", reasoning_content: "It asks " }),
    delta({ reasoning_content: "for the weather." }),
    delta({ content: "Let me look." }),
    call({ id: "a", type: "function", function: { name: "weather", arguments: '{"city":' } }),
    call({ function: { arguments: '"Rome"}' } }),
    delta({}, "tool_calls"),
  ];
  const lines = [...chunks.map((chunk) => JSON.stringify(chunk)), "[DONE]"];
  await page.route("**/v1/chat/completions", (route) =>
    route.fulfill({ contentType: "text/event-stream", body: lines.map((line) => `data: ${line}\n\n`).join("") }),
  );
  await send(page, "weather?");
  await replyEnded(page);
  const folded = page.locator(".reply details");
  assert.deepEqual(
    await folded.evaluateAll((all) => all.map((one) => [one.open, one.querySelector("summary").textContent])),
    [
      [false, "Thoughts"],
      [false, "Call of the tool weather"],
    ],
  );
  assert.equal(await page.locator(".reply .thoughts").textContent(), "It asks for the weather.");
  assert.equal(await folded.locator("pre").textContent(), '{"city":"Rome"}');
  assert.match(await lastReply(page).locator(".facts").innerText(), /calls a tool/);
  assert.equal(await page.locator(".spoken[role=status]").textContent(), "Reply: Let me look.");
  await context.close();
});

test("the example of the first visit runs at once and leads to the walk", async () => {
  const { page, context, problems } = await open(server.url);
  await page.click("button:has-text('Run an example and walk through it')");
  await page.waitForSelector(".walk:has-text('Station 1 of')");
  await page.waitForSelector("#tab-request[aria-selected=true]");
  assert.deepEqual(problems, []);
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
