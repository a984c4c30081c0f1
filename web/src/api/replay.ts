// Traces of tokens that were not recorded: the server computes the step again.
//
// Replies depend on the request and the seed alone, so a replay gives the same numbers. If no setting counts the tokens
// of the reply apart from those of the prompt, one step is enough: a completion whose prompt is the ids of the prompt
// and of the reply so far, which the prefix cache holds. Otherwise the whole request runs again up to the token.

import type { Recording } from "../state/conversation";
import { ApiError, applyTemplate, json, tokenize } from "./client";
import type { ChatReply, CompletionReply, Extension, ProbeReport, Rendered, TokenTrace, Tokenized } from "./types";

/** The prompt of a reply as the model reads it. */
export interface Prompt {
  tokens: Tokenized;
  rendered: Rendered | null;
}

export interface Replay {
  trace: TokenTrace;
  how: "recorded" | "step" | "whole";
  /** Tokens of the prompt from the prefix cache, and tokens that were computed. */
  cached: number;
  computed: number;
}

const prompts = new WeakMap<Recording, Promise<Prompt>>();

/** Fields of a chat request that the routes which render prompts have as well. */
const PROMPT_FIELDS = [
  "model",
  "messages",
  "tools",
  "tool_choice",
  "parallel_tool_calls",
  "chat_template_kwargs",
  "reasoning_effort",
  "thinking_budget",
  "continue_final_message",
];

/** Returns the ids of the prompt and the text that the template made of the messages. */
export function promptOf(recording: Recording): Promise<Prompt> {
  let prompt = prompts.get(recording);
  if (!prompt) {
    prompt = readPrompt(recording.request);
    prompts.set(recording, prompt);
    prompt.catch(() => prompts.delete(recording));
  }
  return prompt;
}

async function readPrompt(request: Record<string, unknown>): Promise<Prompt> {
  if (typeof request["prompt"] === "string") {
    return { tokens: await tokenize({ model: request["model"], prompt: request["prompt"] }), rendered: null };
  }
  const body: Record<string, unknown> = {};
  for (const name of PROMPT_FIELDS) if (request[name] !== undefined) body[name] = request[name];
  const [tokens, rendered] = await Promise.all([tokenize(body), applyTemplate(body)]);
  return { tokens, rendered };
}

/** Sampling fields of the request that led to a reply. */
export function samplingOf(recording: Recording): Record<string, unknown> {
  const { pellucid, request } = recording;
  if (pellucid) return { ...pellucid.parameters, seed: pellucid.seed };
  const others = [
    ...PROMPT_FIELDS,
    "prompt",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "trace",
    "stop",
    "response_format",
    "max_completion_tokens",
    "max_tokens",
  ];
  return Object.fromEntries(Object.entries(request).filter(([name]) => !others.includes(name)));
}

/** Returns why one step cannot be computed alone; null if it can. */
export function reasonForWholeReplay(recording: Recording): string | null {
  const { request } = recording;
  const sampling = samplingOf(recording);
  const isSet = (name: string) => Number(sampling[name] ?? 0) !== 0;
  if (isSet("frequency_penalty") || isSet("presence_penalty")) return "a penalty counts the tokens of the reply alone";
  if (isSet("mirostat_tau")) return "Mirostat carries a state from token to token";
  if (isSet("min_tokens")) return "min_tokens counts the tokens of the reply";
  if (request["response_format"] || request["structured_outputs"]) return "a grammar follows the reply from its start";
  if (request["tools"]) return "the format of tool calls follows the reply from its start";
  if ((recording.usage?.completion_tokens_details.reasoning_tokens ?? 0) > 0) return "thoughts precede the answer";
  if (recording.tokens.some((token) => token.id === undefined)) return "the ids of the reply were not recorded";
  return null;
}

/** Position of a token in the sequence of prompt and reply. */
function positionOf(recording: Recording, prompt: Prompt, index: number): number {
  const thoughts = recording.usage?.completion_tokens_details.reasoning_tokens ?? 0;
  return prompt.tokens.count + thoughts + index - recording.inherited;
}

/** Returns how a token was chosen: as recorded, else computed again. */
export async function traceOf(recording: Recording, index: number, signal: AbortSignal): Promise<Replay> {
  if (index < recording.inherited) {
    throw new ApiError(0, "inherited", "This token was part of the request: the branch begins after it.");
  }
  const prompt = await promptOf(recording);
  const position = positionOf(recording, prompt, index);
  const recorded = recording.traces[position];
  if (recorded) return { trace: recorded, how: "recorded", cached: 0, computed: 0 };
  if (reasonForWholeReplay(recording) === null) return replayStep(recording, index, {}, signal);
  const replay = await replayWhole(recording, position, signal);
  if (replay.trace.id !== recording.tokens[index]?.id) {
    throw new ApiError(0, "differs", "The replay chose another token: the model or its settings have changed.");
  }
  return replay;
}

/** Computes one step again, with other sampling settings if `changes` has any. */
export async function replayStep(
  recording: Recording,
  index: number,
  changes: Record<string, unknown>,
  signal: AbortSignal,
): Promise<Replay> {
  const prompt = await promptOf(recording);
  const reply = recording.tokens.slice(recording.inherited, index).map((token) => token.id);
  const body = {
    ...samplingOf(recording),
    ...changes,
    model: recording.request["model"],
    prompt: [...prompt.tokens.tokens, ...reply],
    max_tokens: 1,
    trace: true,
  };
  const result = await json<CompletionReply>("/v1/completions", { body, signal });
  const trace = result.choices[0]?.trace?.[0];
  if (!trace) throw new ApiError(0, "no_trace", "The server returned no trace.");
  const { prompt_tokens, prompt_tokens_details } = result.usage;
  const cached = prompt_tokens_details.cached_tokens;
  return { trace, how: "step", cached, computed: prompt_tokens - cached };
}

/** Runs the request again up to a position and keeps all traces. */
async function replayWhole(recording: Recording, position: number, signal: AbortSignal): Promise<Replay> {
  const {
    stream_options: _,
    max_completion_tokens: __,
    logprobs: ___,
    top_logprobs: ____,
    ...request
  } = recording.request;
  const prompt = await promptOf(recording);
  const maximum = position - prompt.tokens.count + 1;
  const body = { ...request, trace: true, max_completion_tokens: maximum };
  const result = await json<ChatReply>(recording.path, { body, signal });
  for (const trace of result.choices[0]?.trace ?? []) recording.traces[trace.position] = trace;
  const trace = recording.traces[position];
  if (!trace) throw new ApiError(0, "no_trace", "The replay ended before this token.");
  const cached = result.usage.prompt_tokens_details.cached_tokens;
  const computed = result.usage.total_tokens - cached;
  return { trace, how: "whole", cached, computed };
}

/** Fields of a probe. */
export interface ProbeFields {
  layers?: number;
  attention?: { layer: number; head?: number; rows?: number };
}

/** Looks inside the model at a token of the reply: the server computes its position again. */
export async function probeOf(
  recording: Recording,
  index: number,
  fields: ProbeFields,
  signal: AbortSignal,
): Promise<ProbeReport> {
  if (index < recording.inherited) {
    throw new ApiError(0, "inherited", "This token was part of the request: the branch begins after it.");
  }
  const prompt = await promptOf(recording);
  const before = recording.tokens.slice(recording.inherited, index);
  const canStep =
    before.every((token) => token.id !== undefined) &&
    (recording.usage?.completion_tokens_details.reasoning_tokens ?? 0) === 0;
  // The layers and the attention do not depend on the sampler, so the ids before the token are enough.
  const { pellucid } = canStep
    ? await json<CompletionReply>("/v1/completions", {
        body: {
          model: recording.request["model"],
          prompt: [...prompt.tokens.tokens, ...before.map((token) => token.id)],
          max_tokens: 1,
          temperature: 0,
          logit_bias: { [String(recording.tokens[index]?.id)]: 100 },
          probe: fields,
        },
        signal,
      })
    : await probeWhole(recording, positionOf(recording, prompt, index) - prompt.tokens.count, fields, signal);
  if (!pellucid.probe) throw new ApiError(0, "no_probe", "The server returned no probe.");
  return pellucid.probe;
}

/** Runs the request again up to a token, and probes it there. */
function probeWhole(
  recording: Recording,
  token: number,
  fields: ProbeFields,
  signal: AbortSignal,
): Promise<{ pellucid: Extension }> {
  const { stream_options: _, stream: __, logprobs: ___, top_logprobs: ____, ...request } = recording.request;
  const body = { ...request, max_completion_tokens: token + 1, probe: { ...fields, token } };
  return json<ChatReply>(recording.path, { body, signal });
}
