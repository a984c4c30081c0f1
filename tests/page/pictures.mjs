// Takes pictures of the page for people to look at, with the variables of `.ci/test-page`:
//
//   node tests/page/pictures.mjs states FOLDER MODEL [360-light]...    the main states, in both themes and at three
//                                                                      widths, or in these alone
//   node tests/page/pictures.mjs readme FOLDER MODEL [SEED [TOKEN]]    those of the README
//
// MODEL is a path, and the page shows the name of its file. PELLUCID_PROMPT replaces the prompt.
import { mkdirSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { browser, open, replyEnded, scratch, send, serve, withSettings } from "./setup.mjs";

const [what, folder, model, ...given] = process.argv.slice(2);
if (!["states", "readme"].includes(what) || model === undefined) {
  console.error("usage: node tests/page/pictures.mjs states|readme FOLDER MODEL");
  process.exit(2);
}
const name = basename(model, ".gguf");
mkdirSync(folder, { recursive: true });

const QUESTION = "Write a Python function that checks whether a word is a palindrome.";
const STORY = process.env.PELLUCID_PROMPT ?? "Tell me a story about a lighthouse in two sentences.";
const SETTINGS = { maxTokens: 60, seed: 7, preset: "", parameters: { temperature: 0.8, top_k: 40, top_p: 0.9 } };
const TABS = ["tokens", "choice", "odds", "inside", "cache", "time", "drafts", "beams", "request"];
const LOADED = {
  tokens: ".pieces [aria-pressed]",
  choice: ".origin",
  inside: ".arcs [data-position]",
  beams: ".search-beams",
};

/** Takes one picture of each state in a theme and a width. */
async function pictures(server, theme, width) {
  const { page, context } = await open(server.url, { viewport: { width, height: width < 500 ? 740 : 800 } });
  page.setDefaultTimeout(120_000);
  const take = (state) => page.screenshot({ path: join(folder, `${state}-${width}-${theme}.png`) });
  const key = async (name) => {
    await page.evaluate(() => document.activeElement?.blur());
    await page.keyboard.press(name);
  };
  const dialog = async (name, state) => {
    await key(name);
    await page.waitForSelector("dialog");
    await take(state);
  };
  const close = async () => {
    await page.keyboard.press("Escape");
    await page.waitForSelector("dialog", { state: "detached" });
  };
  await withSettings(page, { ...SETTINGS, theme });
  await page.waitForSelector(".welcome");
  await take("welcome");
  await dialog("?", "keys");
  await close();
  await dialog("k", "key");
  await close();
  await dialog("p", "settings");
  await page.click("button:has-text('Insert an example')");
  await page.locator("#schema").scrollIntoViewIfNeeded();
  await take("schema");
  await page.fill("#schema", '{ "type": ');
  await page.waitForSelector("dialog .failure");
  await take("schema-error");
  await page.click("button:has-text('Reset to the defaults')");
  await close();

  await withSettings(page, { ...SETTINGS, theme });
  await send(page, QUESTION);
  await page.waitForSelector(".reply [data-token]");
  await take("chat-running");
  await replyEnded(page);
  await take("chat");
  await withSettings(page, { ...SETTINGS, theme, colors: "probability", recordsTraces: true });
  await send(page, STORY);
  await replyEnded(page);
  await take("colors");
  await key("i");
  for (const tab of TABS) {
    await page.click(`#tab-${tab}`);
    if (LOADED[tab]) await page.waitForSelector(LOADED[tab]);
    if (tab === "tokens") await page.locator(".piece-button.own").first().click();
    if (tab === "beams") {
      await page.click(".search-beams");
      await page.waitForSelector(".beams .rank");
    }
    await take(`inspector-${tab}`);
    await page.locator(".panel-body").evaluate((body) => (body.scrollTop = body.scrollHeight));
    await take(`inspector-${tab}-end`);
  }
  await key("w");
  await page.waitForSelector(".walk");
  await take("walk");
  await key("Escape");
  await key("3");
  await page.locator(".alternatives button").first().click();
  // A narrow window closes the inspector for the branch.
  await page.waitForSelector(".reply .branches");
  await replyEnded(page);
  if ((await page.locator(".inspector").count()) > 0) await key("i");
  await take("branches");
  await dialog("d", "compare");
  await close();
  if (width < 900) {
    await key("l");
    await page.waitForSelector(".sidebar.open");
    await take("list");
    await key("l");
  }
  const running = page.evaluate(
    ([name, text]) =>
      fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({
          model: name,
          messages: [{ role: "user", content: text }],
          ignore_eos: true,
          max_tokens: 400,
        }),
      }),
    [name, STORY],
  );
  // It ends with the page.
  running.catch(() => undefined);
  await key("o");
  // A small model may have ended its reply before.
  await page.waitForSelector(".running [data-request]", { timeout: 5000 }).catch(() => undefined);
  await page.waitForTimeout(4500);
  await take("operations");
  await page.locator(".operations").evaluate((view) => (view.scrollTop = view.scrollHeight));
  await take("operations-end");
  await context.close();
}

/** The states in which the server cannot be used. */
async function failures(theme, width) {
  const file = join(scratch, "keys.toml");
  // With several tenants, a key needs a right to read the metrics.
  const tenant = (name) => `[[tenant]]\nname = "${name}"\nkeys = ["key-of-${name}"]\nrequests_per_minute = 1\n`;
  writeFileSync(file, tenant("user") + tenant("other"));
  const own = await serve(model, { name, flags: ["--keys-file", file] });
  const { page, context } = await open(own.url, { viewport: { width, height: width < 500 ? 740 : 800 } });
  const take = (state) => page.screenshot({ path: join(folder, `${state}-${width}-${theme}.png`) });
  await page.evaluate((theme) => localStorage.setItem("pellucid.settings", JSON.stringify({ theme })), theme);
  await page.reload();
  await page.waitForSelector("dialog input[type=password]");
  await take("failure-key");
  await page.fill("dialog input[type=password]", "a wrong key");
  await page.click("button:has-text('Use this key')");
  await page.waitForSelector(".banner.key");
  await page.waitForSelector("dialog input[type=password]");
  await page.keyboard.press("Escape");
  await page.waitForSelector("dialog", { state: "detached" });
  await take("failure-wrong-key");
  await page.evaluate(() => sessionStorage.setItem("pellucid.key", "key-of-user"));
  await withSettings(page, { theme, maxTokens: 8 });
  await page.waitForSelector(".welcome");
  await send(page, "Hello");
  await replyEnded(page);
  await send(page, "Hello again");
  await page.waitForSelector(".banner.busy");
  await take("failure-overloaded");
  await page.click(".switch button:has-text('Operations')");
  await page.waitForSelector(".operations .failure");
  await take("failure-operations");
  await page.click(".switch button:has-text('Chat')");
  await own.kill();
  await page.click(".banner button");
  await page.waitForSelector(".banner.offline");
  await take("failure-offline");
  await context.close();
}

/** The pictures of the README. */
async function readme(server) {
  for (const [file, tab, theme, colors] of [
    ["page-choice", "choice", "light", "probability"],
    ["page-odds", "odds", "dark", "probability"],
    ["page-inside", "inside", "light", "off"],
  ]) {
    const { page, context } = await open(server.url);
    page.setDefaultTimeout(120_000);
    const parameters = { ...SETTINGS.parameters, min_p: 0.02 };
    await withSettings(page, { ...SETTINGS, parameters, maxTokens: 120, seed: Number(given[0] ?? 7), theme, colors });
    await send(page, STORY);
    await replyEnded(page);
    await page
      .locator(`.reply [data-token="${given[1] ?? 12}"]`)
      .first()
      .click();
    await page.click(`#tab-${tab}`);
    await page.waitForSelector(LOADED[tab] ?? ".alternatives");
    await page.locator("#main").focus();
    await page.mouse.move(0, 0);
    await page.screenshot({ path: join(folder, `${file}.png`) });
    await context.close();
  }
}

const server = await serve(model, { name });
if (what === "readme") await readme(server);
else {
  const all = ["360-light", "768-light", "1280-light", "360-dark", "768-dark", "1280-dark"];
  for (const look of given.length > 0 ? given : all) {
    const [width, theme] = look.split("-");
    await pictures(server, theme, Number(width));
    await failures(theme, Number(width));
  }
}
await browser.close();
await server.kill();
