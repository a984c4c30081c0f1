// Shapes of the server's JSON, as far as the page reads them. `/docs` describes the fields.

export interface SamplingDefault {
  value: unknown;
  source: "server" | "model" | "openai";
}

export interface ModelCard {
  id: string;
  root: string;
  max_model_len: number;
  system_fingerprint: string;
  capabilities?: string[];
  sampling_defaults?: Record<string, SamplingDefault>;
  /** A block of keys and values. */
  kv_block?: { positions: number; bytes: number };
}

export interface ToolCall {
  index?: number;
  id?: string;
  type?: "function";
  function?: { name?: string; arguments?: string };
}

export interface ChatMessage {
  role: "system" | "user" | "assistant";
  content: string;
  reasoning_content?: string;
}

export interface TopToken {
  id: number;
  token: string;
  logprob: number;
  bytes: number[];
}

export interface ChatToken extends TopToken {
  top_logprobs: TopToken[];
}

export interface Candidate {
  id: number;
  text: string;
  /** Probability among the candidates before the step. */
  before: number;
  /** Probability among the candidates after the step; 0 if it was cut. */
  after: number;
  cut: boolean;
}

export interface SamplerStep {
  name: string;
  setting: string;
  entered: number;
  left: number;
  candidates: Candidate[];
}

export interface Runner {
  id: number;
  text: string;
  probability: number;
  u: number;
  time: number;
}

/** How one token was chosen. */
export interface TokenTrace {
  position: number;
  id: number;
  text: string;
  logprob: number;
  /** Sequences in the step that computed the token. */
  batch_size?: number;
  steps: SamplerStep[];
  draw: { entrants: number; winner: Runner; runner_up: Runner | null };
  /** Verdicts of the server's guards on the token. */
  guards?: { guard: string; verdict: "passed" | "failed" }[];
  proposal: { drafter: string; id: number; text: string; accepted: boolean } | null;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
  completion_tokens_details: { reasoning_tokens: number };
}

export interface Timings {
  queue_ms: number;
  time_to_first_token_ms: number | null;
  prefill_ms: number | null;
  tokens_per_second: number | null;
  /** Gaps between tokens in the server; the last count has no bound. */
  gaps: { bounds_ms: number[]; counts: number[] } | null;
  time_per_output_token_ms: number | null;
  /** Part of the steps in which tokens were sampled. */
  sampling_ms: number | null;
  /** Time that guards took beside the steps; null without guards. */
  guard_ms: number | null;
  decode_ms: number;
  total_ms: number;
}

export interface DraftCounts {
  drafted: number;
  accepted: number;
  rejected: number;
}

export interface Ending {
  index: number;
  reason: string;
  token_id?: number;
  stop?: string;
  guard?: string;
}

/** Why a prompt was not found whole in the prefix cache. */
export interface CacheMiss {
  reused_tokens: number;
  reason: "differs" | "evicted" | "other_salt" | "no_snapshot" | "no_window" | "new";
  position?: number;
  before?: string;
  prompt?: string;
  cached?: string;
}

/** The object `pellucid` of a reply. */
export interface Extension {
  seed: number;
  parameters: Record<string, unknown>;
  end_token_ids: number[];
  cached_tokens: number;
  preemptions: number;
  speculation: DraftCounts & { drafters: Record<string, DraftCounts>; note?: string };
  timings: Timings;
  cache_misses?: CacheMiss[];
  probe?: ProbeReport;
  endings: Ending[];
}

/** A token with its log probability. */
export interface Guess {
  id: number;
  text: string;
  logprob: number | null;
}

export interface AttentionReport {
  layer: number;
  head: number | null;
  first_position: number;
  tokens: { id: number; text: string }[];
  /** A row for each position from `first_position` on, as long as the positions that it may look at. */
  weights: number[][];
}

/** One token, looked at from inside the model. */
export interface ProbeReport {
  token: number;
  position: number;
  id: number;
  text: string;
  num_layers: number;
  num_heads: number;
  layers: { layer: number; logprob: number | null; top: Guess[] }[];
  attention?: AttentionReport;
}

export interface ChatChoice {
  index: number;
  message: { content: string | null };
  finish_reason: string | null;
  logprobs: { content: ChatToken[] } | null;
  trace?: TokenTrace[];
}

export interface ChatReply {
  id: string;
  model: string;
  system_fingerprint: string;
  choices: ChatChoice[];
  usage: Usage;
  pellucid: Extension;
}

export interface CompletionReply {
  system_fingerprint: string;
  choices: {
    index: number;
    text: string;
    finish_reason: string | null;
    trace?: TokenTrace[];
    logprobs: { tokens: string[]; token_logprobs: (number | null)[]; bytes: number[][] } | null;
  }[];
  usage: Usage;
  pellucid: Extension;
}

/** A chunk of a stream, of a chat or of a completion. */
export interface Chunk {
  system_fingerprint: string;
  choices: {
    index: number;
    delta?: { content?: string | null; reasoning_content?: string; tool_calls?: ToolCall[] };
    text?: string;
    finish_reason: string | null;
    logprobs?: { content: ChatToken[] } | null;
    trace?: TokenTrace[];
  }[];
  usage?: Usage | null;
  pellucid?: Extension;
  error?: { message: string; code: string | null };
}

export interface Tokenized {
  count: number;
  max_model_len: number;
  tokens: number[];
  token_strs?: string[];
  token_bytes?: number[][];
  token_kinds?: TokenKind[];
}

/** A control token is never made of the text of a message. */
export type TokenKind = "normal" | "control" | "user_defined" | "byte" | "unknown" | "unused";

export interface Rendered {
  prompt: string;
  segments: { text: string; trusted: boolean }[];
}

/** A property of a JSON schema in `/openapi.json`. */
export interface SchemaProperty {
  type?: string | string[];
  description?: string;
  minimum?: number;
  maximum?: number;
  default?: unknown;
  enum?: string[];
  anyOf?: SchemaProperty[];
}

/** A request that is being generated, from `/requests`. */
export interface RunningRequest {
  id: string;
  tenant: string;
  model: string;
  state: "queued" | "prefill" | "decode" | "cancelled";
  age_ms: number;
  prompt_tokens: number;
  tokens: number;
  since_last_token_ms: number | null;
  waits_for_client: boolean;
}

export interface RunningRequests {
  data: RunningRequest[];
  total: number;
  may_cancel: boolean;
}
