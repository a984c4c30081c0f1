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
  steps: SamplerStep[];
  draw: { entrants: number; winner: Runner; runner_up: Runner | null };
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
  time_per_output_token_ms: number | null;
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

/** The object `pellucid` of a reply. */
export interface Extension {
  seed: number;
  parameters: Record<string, unknown>;
  end_token_ids: number[];
  cached_tokens: number;
  preemptions: number;
  speculation: DraftCounts & { drafters: Record<string, DraftCounts>; note?: string };
  timings: Timings;
  endings: Ending[];
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
}

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
