// The built server with a tiny model, and a browser, for the tests of the page.
import { spawn, spawnSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { after } from "node:test";

const binaries = resolve(process.env.PELLUCID_BINARIES ?? "target/debug");
const modules = createRequire(resolve(process.env.PELLUCID_NODE_MODULES ?? "target/clients/node_modules", "x.js"));
const { chromium } = modules("playwright-core");
export const axeSource = modules("axe-core").source;

export const scratch = mkdtempSync(join(tmpdir(), "pellucid-page-"));
process.on("exit", () => rmSync(scratch, { recursive: true, force: true }));

/** Writes the tiny model and returns its folder. */
export function tinyModel() {
  const folder = join(scratch, "tiny");
  const made = spawnSync(join(binaries, "examples/tiny_model"), [folder, "4096", "words"]);
  if (made.status !== 0) throw new Error(`tiny_model failed: ${made.stderr}`);
  return folder;
}

/** A model for tests that hold for any that chats: that of PELLUCID_PAGE_MODEL, or the tiny one. */
export const anyModel = () => process.env.PELLUCID_PAGE_MODEL ?? tinyModel();

// A test that fails leaves its server running, and node would wait for it.
const servers = new Set();
const killServers = () => servers.forEach((child) => child.kill("SIGKILL"));
after(killServers);
process.on("exit", killServers);

/** Starts a server; `port` 0 is a free one. */
export async function serve(model, { port = 0, name = "tiny", flags = [], env = {} } = {}) {
  const words = ["serve", "--model", model, "--served-model-name", name, "--port", `${port}`, "--log-format", "json"];
  const child = spawn(join(binaries, "pellucid"), [...words, ...flags], {
    stdio: ["ignore", "ignore", "pipe"],
    env: { PATH: process.env.PATH, PELLUCID_HOME: scratch, ...env },
  });
  servers.add(child);
  const log = [];
  const url = await new Promise((found, failed) => {
    createInterface({ input: child.stderr }).on("line", (line) => {
      log.push(line);
      const fields = JSON.parse(line.startsWith("{") ? line : "{}");
      if (fields.message === "listening") found(fields.url);
    });
    child.on("exit", () => failed(new Error(`the server ended:\n${log.join("\n")}`)));
  });
  const ended = new Promise((done) => child.on("exit", done));
  return {
    url,
    port: Number(new URL(url).port),
    /** Ends the server at once, as a crash would. */
    async kill() {
      child.kill("SIGKILL");
      await ended;
    },
    /** Asks the server to shut down: it completes the replies in flight first. */
    terminate() {
      child.kill("SIGTERM");
    },
    async post(path, body, key) {
      const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
      const response = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
      return await response.json();
    },
  };
}

const found = spawnSync("sh", ["-c", "command -v chromium || command -v chromium-browser || command -v google-chrome"]);
const executablePath = process.env.CHROMIUM ?? found.stdout.toString().trim();
export const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });

/** Opens the page in a fresh profile. Every request to another host and every error fails the test that checks them. */
export async function open(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  await context.grantPermissions(["clipboard-read", "clipboard-write"], { origin: url });
  const page = await context.newPage();
  page.setDefaultTimeout(30_000);
  const problems = [];
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("request", (request) => {
    const address = request.url();
    if (!address.startsWith(url) && !/^(data|blob):/.test(address)) problems.push(`request to ${address}`);
  });
  page.on("console", (message) => {
    if (/Content Security Policy|Trusted/i.test(message.text())) problems.push(message.text());
  });
  // Tests a page that was just built, without building the server again: PELLUCID_PAGE_DIST=web/dist.
  if (process.env.PELLUCID_PAGE_DIST) {
    for (const [name, contentType] of [
      ["app.js", "text/javascript"],
      ["app.css", "text/css"],
    ]) {
      const path = join(process.env.PELLUCID_PAGE_DIST, name);
      await context.route(`${url}/page/${name}`, (route) => route.fulfill({ path, contentType }));
    }
  }
  await page.goto(url);
  return { page, context, problems };
}

/** Sets options that the page keeps in localStorage, and loads it again. */
export async function withSettings(page, settings) {
  await page.evaluate((given) => localStorage.setItem("pellucid.settings", JSON.stringify(given)), settings);
  await page.reload();
  // Before the page knows the models, it sends nothing.
  await page.waitForSelector(".welcome");
}

/** Makes the page receive so few bytes a second that a long reply takes a minute; returns a way back. */
export async function slowNetwork(page) {
  const session = await page.context().newCDPSession(page);
  await session.send("Network.enable");
  const limit = (downloadThroughput) =>
    session.send("Network.emulateNetworkConditions", {
      offline: false,
      latency: 0,
      downloadThroughput,
      uploadThroughput: -1,
    });
  await limit(20_000);
  return () => limit(-1);
}

export async function send(page, text) {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

/** Waits until the first element has this text: the page is drawn in the frame after a change. */
export const shows = (page, selector, text) =>
  page.waitForFunction(([one, text]) => document.querySelector(one)?.textContent === text, [selector, text]);

/** Waits until the last reply has ended. */
export async function replyEnded(page) {
  await page.waitForSelector(".message.reply:not(.running) .actions");
  await page.waitForFunction(() => !document.querySelector(".message.reply.running"));
}

export const lastReply = (page) => page.locator(".message.reply").last();
