// Sends a conversation to the model and keeps what comes back: text, tokens, times.

import { ApiError, canChat } from "../api/client";
import { stream } from "../api/stream";
import type { ChatMessage, ChatToken, Chunk, TokenTrace, ToolCall } from "../api/types";
import { connect, reportFailure, reportSuccess } from "./connection";
import {
  type Conversation,
  type Node,
  type Recording,
  type Token,
  addNode,
  newNode,
  newRecording,
  pathTo,
} from "./conversation";
import { database } from "./database";
import { changed, currentModel, currentPreset, notify, set, state } from "./store";

/** Alternatives that are recorded with each token; the API allows 20. */
const NUM_TOP = 10;

/** Maximum tokens of a completion: models without a chat template rarely end their texts. */
const MAX_COMPLETION = 256;

/** The beginning of a reply that the model continues. */
export interface Beginning {
  text: string;
  tokens: Token[];
}

/** Adds a message of the user after `parent` and asks for a reply. */
export async function say(text: string, parent: string | null): Promise<void> {
  const conversation = state.current;
  const node = newNode(parent, "user", text, "");
  addNode(conversation, node);
  if (!state.conversations.includes(conversation)) state.conversations.unshift(conversation);
  await askFor(conversation, node.id);
}

/** Asks for a reply to the message `parent`, or for the rest of one that begins with `beginning`. */
export async function askFor(conversation: Conversation, parent: string, beginning?: Beginning): Promise<void> {
  const model = currentModel();
  if (!model || state.running) return;
  const { path, body } = requestFor(conversation, parent, beginning);
  const node = newNode(parent, "assistant", beginning?.text ?? "", model.id);
  const recording = newRecording(path, body);
  if (beginning) {
    recording.tokens.push(...beginning.tokens);
    recording.inherited = beginning.tokens.length;
  }
  addNode(conversation, node);
  state.recordings.set(node.id, recording);
  const controller = new AbortController();
  set({ running: { node: node.id, controller }, spoken: "The reply is being written." });
  await save(conversation);
  await receive(node, recording, controller);
  set({ running: null, spoken: spokenReply(node) });
  recording.endAt ??= recording.tokens.at(-1)?.at ?? null;
  changed(node.id);
  // A model that was loaded for this reply tells more about itself now.
  if (node.state === "done" && !model.kv_block) void connect();
  await save(conversation);
  await database.saveRecording(node.id, recording);
}

/** Characters of a reply that screen readers say when it ends; the rest is read in the message. */
const MAX_SPOKEN = 1000;

/** Returns what screen readers say when a reply has ended. A failure is announced where it is shown. */
function spokenReply({ state: end, text }: Node): string {
  if (end === "failed") return "";
  return `${end === "stopped" ? "Stopped." : "Reply:"} ${text.slice(0, MAX_SPOKEN)}`;
}

/** Receives the stream of a reply, whatever its end. */
async function receive(node: Node, recording: Recording, controller: AbortController): Promise<void> {
  const sent = performance.now();
  try {
    await receiveChunks(node, recording, controller.signal, sent);
    node.state = "done";
    recording.endAt = performance.now() - sent;
    reportSuccess();
  } catch (error) {
    recording.endAt = performance.now() - sent;
    if (controller.signal.aborted) {
      node.state = "stopped";
      return;
    }
    const less = error instanceof ApiError ? requestForLess(recording.request, error) : null;
    if (less) {
      recording.request = less;
      notify(`This reply is recorded without probabilities: ${(error as ApiError).message}`);
      await receive(node, recording, controller);
      return;
    }
    node.state = "failed";
    node.error = error instanceof ApiError ? error.message : String(error);
    if (!(error instanceof ApiError) || error.isTemporary || error.needsKey) reportFailure(error);
  }
}

async function receiveChunks(node: Node, recording: Recording, signal: AbortSignal, sent: number): Promise<void> {
  for await (const { chunk, arrived } of stream(recording.path, recording.request, signal)) {
    take(node, recording, chunk, arrived - sent);
    changed(node.id);
  }
}

/** Returns the request without what the key may not ask for; null if that is not why it was refused. */
function requestForLess(request: Record<string, unknown>, error: ApiError): Record<string, unknown> | null {
  const isRefused = error.code === "logprob_budget" || error.code === "trace_not_allowed";
  if (!isRefused || !(request["logprobs"] || request["trace"])) return null;
  const { logprobs: _, top_logprobs: __, trace: ___, ...rest } = request;
  return error.code === "trace_not_allowed" && request["logprobs"]
    ? { ...rest, logprobs: request["logprobs"], top_logprobs: request["top_logprobs"] }
    : rest;
}

/** Adds a chunk to a reply. */
function take(node: Node, recording: Recording, chunk: Chunk, at: number): void {
  recording.fingerprint = chunk.system_fingerprint;
  recording.usage = chunk.usage ?? recording.usage;
  recording.pellucid = chunk.pellucid ?? recording.pellucid;
  for (const choice of chunk.choices) {
    const text = choice.delta?.content ?? choice.text ?? "";
    const thoughts = choice.delta?.reasoning_content ?? "";
    if (text !== "" || thoughts !== "" || choice.logprobs) recording.firstAt ??= at;
    node.text += text;
    node.thoughts += thoughts;
    for (const call of choice.delta?.tool_calls ?? []) addCall(node.calls, call);
    for (const token of choice.logprobs?.content ?? []) recording.tokens.push(toToken(token, at));
    for (const trace of choice.trace ?? []) {
      recording.traces[trace.position] = trace;
      if (isCompletion(recording)) recording.tokens.push(tokenOfTrace(trace, at));
    }
    if (choice.finish_reason !== null) node.finish = choice.finish_reason;
  }
}

function toToken(token: ChatToken, at: number): Token {
  const top = token.top_logprobs.map(({ id, token: text, logprob }) => ({ id, text, logprob }));
  return { id: token.id, text: token.token, bytes: token.bytes, logprob: token.logprob, top, at };
}

/** Log probabilities of a completion have no ids, so that its traces are requested instead. */
const isCompletion = (recording: Recording): boolean => recording.path === "/v1/completions";

function tokenOfTrace(trace: TokenTrace, at: number): Token {
  const candidates = trace.steps[0]?.candidates ?? [];
  const top = candidates.slice(0, NUM_TOP).map(({ id, text, before }) => ({ id, text, logprob: Math.log(before) }));
  return { id: trace.id, text: trace.text, bytes: bytesOf(trace.text), logprob: trace.logprob, top, at };
}

/** Bytes of a token's text. Those that are no text are spelled out, as in `bytes:\xe2\x80`. */
function bytesOf(text: string): number[] {
  if (!text.startsWith("bytes:\\x")) return [...new TextEncoder().encode(text)];
  return [...text.matchAll(/\\x([0-9a-f]{2})/g)].map((match) => Number.parseInt(match[1]!, 16));
}

/** Adds a piece of a call of a tool to the calls so far. */
function addCall(calls: ToolCall[], piece: ToolCall): void {
  const index = piece.index ?? calls.length;
  const call = (calls[index] ??= { function: { name: "", arguments: "" } });
  call.id ??= piece.id;
  call.function = {
    name: (call.function?.name ?? "") + (piece.function?.name ?? ""),
    arguments: (call.function?.arguments ?? "") + (piece.function?.arguments ?? ""),
  };
}

export function stop(): void {
  state.running?.controller.abort();
}

/** The messages from the first one to `last`. */
export function messagesTo(conversation: Conversation, last: string): ChatMessage[] {
  const path = pathTo(conversation, last).filter((node) => node.text !== "" || node.role === "user");
  const messages: ChatMessage[] = path.map((node) => ({ role: node.role, content: node.text }));
  const system = conversation.system.trim();
  return system === "" ? messages : [{ role: "system", content: system }, ...messages];
}

function requestFor(
  conversation: Conversation,
  parent: string,
  beginning: Beginning | undefined,
): { path: string; body: Record<string, unknown> } {
  const { settings } = state;
  const model = currentModel();
  const messages = messagesTo(conversation, parent);
  const body: Record<string, unknown> = {
    model: model?.id,
    ...settings.parameters,
    // The page chooses the seed, so that a reply that was stopped can be replayed too.
    seed: settings.seed ?? Math.floor(Math.random() * 2 ** 32),
    stream_options: { include_usage: true },
    explain_cache: true,
  };
  const preset = currentPreset();
  if (preset !== "") body["preset"] = preset;
  if (settings.stop.length > 0) body["stop"] = settings.stop;
  if (settings.recordsTraces) body["trace"] = true;
  const schema = settings.schema.trim();
  if (schema !== "") {
    body["response_format"] = { type: "json_schema", json_schema: { name: "reply", schema: JSON.parse(schema) } };
  }
  if (!canChat(model)) {
    const prompt = messages.map((message) => message.content).join("") + (beginning?.text ?? "");
    const trace = settings.recordsProbabilities || settings.recordsTraces ? { trace: true } : {};
    const maximum = Math.min(settings.maxTokens ?? MAX_COMPLETION, MAX_COMPLETION);
    return { path: "/v1/completions", body: { ...body, ...trace, prompt, max_tokens: maximum } };
  }
  if (settings.maxTokens !== null) body["max_completion_tokens"] = settings.maxTokens;
  if (settings.recordsProbabilities) Object.assign(body, { logprobs: true, top_logprobs: NUM_TOP });
  if (beginning) {
    messages.push({ role: "assistant", content: beginning.text });
    body["continue_final_message"] = true;
  }
  return { path: "/v1/chat/completions", body: { ...body, messages } };
}

async function save(conversation: Conversation): Promise<void> {
  try {
    await database.save(conversation);
  } catch (error) {
    set({ notice: `The conversation could not be kept in this browser: ${String(error)}` });
  }
}
