// The operators' view, and the states in which the server cannot be used.
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { join } from "node:path";
import { browser, lastReply, open, replyEnded, scratch, send, serve, tinyModel, withSettings } from "./setup.mjs";

let server, model;
before(async () => {
  model = tinyModel();
  server = await serve(model);
});
after(async () => {
  await browser.close();
  await server.kill();
});

/** Starts a reply over a WebSocket and pauses it, so that it stays as it is. The last message is in `window.last`. */
async function startPaused(page) {
  await page.evaluate(
    () =>
      new Promise((paused, failed) => {
        const socket = new WebSocket(location.origin.replace("http", "ws") + "/v1/stream");
        const messages = [{ role: "user", content: "a secret question" }];
        socket.onopen = () => {
          socket.send(JSON.stringify({ model: "tiny", messages, ignore_eos: true, max_tokens: 3900 }));
        };
        // Paused at its first text: a request that was paused before its first step does not count as running, and a
        // message without text comes before that step.
        let isSent = false;
        socket.onmessage = ({ data }) => {
          if (!isSent && JSON.parse(data).choices?.[0]?.delta?.content) {
            socket.send(JSON.stringify({ type: "pause" }));
            isSent = true;
          }
          window.last = data;
          if (data.includes('"paused"')) paused();
        };
        socket.onclose = (event) => failed(new Error(`closed with ${event.code}`));
        window.socket = socket;
      }),
  );
}

/** Value of a metric, summed over its labels. */
async function metric(name) {
  const lines = (await (await fetch(`${server.url}/metrics`)).text()).split("\n");
  const found = lines.filter((line) => line.startsWith(`${name} `) || line.startsWith(`${name}{`));
  return found.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

test("operations shows the metrics and the running requests, and cancels one", async () => {
  const { page, context, problems } = await open(server.url);
  await withSettings(page, { maxTokens: 12 });
  await send(page, "a question");
  await replyEnded(page);
  await startPaused(page);
  await page.keyboard.press("Escape");
  await page.keyboard.press("o");
  const row = page.locator(".running [data-request]");
  await row.waitFor();
  const { data } = await (await fetch(`${server.url}/requests`)).json();
  assert.equal(data.length, 1);
  assert.equal(await row.getAttribute("data-request"), data[0].id);
  const cells = await row.locator("th, td").allInnerTexts();
  // The reply is paused, so the numbers stay the same; after 10 seconds it would be marked as stuck.
  assert.deepEqual([cells[1], cells[2].split(",")[0], cells[7]], ["everybody", data[0].state, "tiny"]);
  assert.deepEqual([Number(cells[5]), Number(cells[6])], [data[0].tokens, data[0].prompt_tokens]);
  assert.ok(!(await page.locator(".running").innerText()).includes("secret"));
  // The charts and tables read /metrics, which do not change while nothing runs.
  const chart = (title) => page.locator(".cards .card", { hasText: title }).locator("svg").getAttribute("aria-label");
  for (let reading = 0; (await chart("Requests")) !== "Requests: running 1, waiting 0"; reading++) {
    assert.ok(reading < 100, `${await chart("Requests")}, ${await page.locator(".operations").innerText()}`);
    await page.waitForTimeout(200);
  }
  const held = ["in_use", "reserved", "idle"].map((state) => metric(`pellucid_kv_blocks_${state}`));
  const [inUse, reserved, idle] = await Promise.all(held);
  const label = await chart("KV blocks");
  assert.equal(label, `KV blocks: in use ${inUse}, reserved ${reserved}, idle in the prefix cache ${idle}`);
  const memory = await page.locator(".tenant-memory tbody tr").allInnerTexts();
  assert.equal(memory.length, 1);
  assert.match(memory[0], /^everybody\s+[\d.]+ [kM]B\s/);
  assert.match(await page.locator(".operations").innerText(), /tiny, [\d.]+ MB, context of 4,096/);
  // The first press asks, the second cancels; both with the keyboard.
  const button = row.locator("button");
  await button.focus();
  await page.keyboard.press("Enter");
  await row.locator("button:has-text('Really cancel')").waitFor();
  await page.keyboard.press("Enter");
  await row.waitFor({ state: "detached" });
  await page.waitForFunction(() => window.last.includes("cancelled_by_operator"));
  assert.equal(await metric('pellucid_requests_total{tenant="everybody",outcome="cancelled_by_operator"}'), 1);
  assert.deepEqual(problems, []);
  await context.close();
});

test("the chart of tokens shows those of replies that still run", async () => {
  const { page, context } = await open(server.url);
  await page.waitForSelector(".welcome");
  // Tokens of a request are added to the first counter when it ends, to the second in each step.
  let step = 0;
  await page.route("**/metrics", (route) =>
    route.fulfill({
      contentType: "text/plain",
      body: `pellucid_generated_tokens_total 7\npellucid_computed_output_tokens_total ${(step += 100)}\n`,
    }),
  );
  await page.keyboard.press("o");
  await page.waitForFunction(() =>
    [...document.querySelectorAll(".cards svg")].some((svg) => /generated [1-9]/.test(svg.ariaLabel ?? "")),
  );
  await context.close();
});

test("a key without the rights sees neither metrics nor requests, or cannot cancel", async () => {
  const file = join(scratch, "keys.toml");
  const tenant = (name, more) => `[[tenant]]\nname = "${name}"\nkeys = ["key-of-${name}"]\n${more}\n`;
  writeFileSync(
    file,
    tenant("user", "") + tenant("watcher", "metrics = true") + tenant("busy", "requests_per_minute = 1"),
  );
  const own = await serve(model, { flags: ["--keys-file", file] });
  const { page, context } = await open(own.url);
  const use = async (key) => {
    await page.evaluate((key) => sessionStorage.setItem("pellucid.key", key), key);
    await page.reload();
    await page.waitForSelector(".welcome");
  };
  await use("key-of-user");
  await page.keyboard.press("o");
  await page.waitForSelector(".operations .failure");
  assert.match(await page.locator(".operations .failure").innerText(), /needs the right metrics = true/);
  await use("key-of-watcher");
  await page.keyboard.press("o");
  await page.waitForSelector(".operations .running");
  assert.equal(await page.locator(".operations .failure").count(), 0);
  // A limit of the tenant refuses its second request for most of a minute.
  await use("key-of-busy");
  await send(page, "first");
  await replyEnded(page);
  await send(page, "second");
  await page.waitForSelector(".banner.busy");
  const banner = await page.locator(".banner.busy").innerText();
  const wait = banner.match(/^Overloaded[^]*requests per minute[^]*Trying again in (\d+) s/);
  // The page asks after half a minute at the latest, and says so.
  assert.ok(wait !== null && Number(wait[1]) <= 30, banner);
  assert.match(await lastReply(page).innerText(), /requests per minute/);
  await context.close();
  await own.kill();
});

test("a server that shuts down is told, and an operator sees what it waits for", async () => {
  const own = await serve(model);
  const first = await open(own.url);
  await first.page.waitForSelector(".welcome");
  await startPaused(first.page);
  own.terminate();
  await first.page.keyboard.press("o");
  await first.page.waitForSelector(".running [data-request]");
  await first.page.keyboard.press("o");
  await send(first.page, "too late");
  await first.page.waitForSelector(".banner.draining");
  assert.match(await first.page.locator(".banner.draining").innerText(), /^Shutting down/);
  await first.context.close();
  await own.kill();
});
