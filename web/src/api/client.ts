// Requests to the server that delivered the page. The page sends requests to no other host.

import type { ModelCard, Rendered, SchemaProperty, Tokenized } from "./types";

/** A refusal of the server, or a request that did not reach it. */
export class ApiError extends Error {
  constructor(
    /** HTTP status; 0 if there was no response. */
    readonly status: number,
    readonly code: string,
    message: string,
    readonly retryAfterS: number | null = null,
  ) {
    super(message);
  }

  get needsKey(): boolean {
    return this.status === 401;
  }

  /** Whether the same request may succeed later. */
  get isTemporary(): boolean {
    return this.status === 0 || this.status === 429 || this.status === 503;
  }
}

const KEY_NAME = "pellucid.key";

/** The API key: kept for the tab, or for this browser if the user says so. */
export const apiKey = {
  get: (): string => sessionStorage.getItem(KEY_NAME) ?? localStorage.getItem(KEY_NAME) ?? "",
  isKept: (): boolean => localStorage.getItem(KEY_NAME) !== null,
  set(key: string, keep: boolean): void {
    sessionStorage.removeItem(KEY_NAME);
    localStorage.removeItem(KEY_NAME);
    if (key !== "") (keep ? localStorage : sessionStorage).setItem(KEY_NAME, key);
  },
};

export interface Call {
  body?: unknown;
  /** POST with a body, else GET. */
  method?: string;
  signal?: AbortSignal | undefined;
  accept?: string;
}

/** Sends a request and returns the response, or throws an `ApiError`. */
export async function send(path: string, call: Call = {}): Promise<Response> {
  const headers: Record<string, string> = { Accept: call.accept ?? "application/json" };
  const key = apiKey.get();
  if (key !== "") headers["Authorization"] = `Bearer ${key}`;
  const options: RequestInit = { headers, cache: "no-store", credentials: "omit" };
  if (call.signal) options.signal = call.signal;
  if (call.method) options.method = call.method;
  if (call.body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(call.body);
    headers["Content-Type"] = "application/json";
  }
  let response: Response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (call.signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response: Response): Promise<ApiError> {
  const wait = Number(response.headers.get("Retry-After"));
  const retryAfter = Number.isFinite(wait) && wait > 0 ? wait : null;
  try {
    const { error } = (await response.json()) as { error: { message: string; code: string | null } };
    return new ApiError(response.status, error.code ?? "", error.message, retryAfter);
  } catch {
    return new ApiError(response.status, "", `The server answered with status ${response.status}.`, retryAfter);
  }
}

export async function json<T>(path: string, call: Call = {}): Promise<T> {
  return (await (await send(path, call)).json()) as T;
}

export async function text(path: string, call: Call = {}): Promise<string> {
  return await (await send(path, call)).text();
}

/** Models that generate text. */
export async function models(): Promise<ModelCard[]> {
  const list = await json<{ data: ModelCard[] }>("/v1/models");
  const generates = (card: ModelCard) => card.capabilities?.includes("completions") ?? true;
  return list.data.filter(generates);
}

export const canChat = (model: ModelCard | undefined): boolean => model?.capabilities?.includes("chat") ?? true;

/** Descriptions, ranges and defaults of the fields of a chat request, from the server's own document. */
export async function requestFields(): Promise<Record<string, SchemaProperty>> {
  type Document = { components: { schemas: Record<string, { properties?: Record<string, SchemaProperty> }> } };
  const document = await json<Document>("/openapi.json");
  return document.components.schemas["ChatRequest"]?.properties ?? {};
}

export function tokenize(body: object, signal?: AbortSignal): Promise<Tokenized> {
  const parts = { return_token_strs: true, return_token_bytes: true, return_token_kinds: true };
  return json<Tokenized>("/tokenize", { body: { ...body, ...parts }, signal });
}

export function applyTemplate(body: object, signal?: AbortSignal): Promise<Rendered> {
  return json<Rendered>("/apply-template", { body, signal });
}
