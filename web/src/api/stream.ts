// Server-sent events of a streamed reply.

import { ApiError, send } from "./client";
import type { Chunk } from "./types";

/** Sends a request with `stream: true` and yields its chunks, each with the time at which it arrived. */
export async function* stream(
  path: string,
  body: object,
  signal: AbortSignal,
): AsyncGenerator<{ chunk: Chunk; arrived: number }> {
  const response = await send(path, { body: { ...body, stream: true }, signal, accept: "text/event-stream" });
  if (response.body === null) throw new ApiError(0, "no_body", "The reply has no body.");
  let isComplete = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        isComplete = true;
        continue;
      }
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new ApiError(500, chunk.error.code ?? "", chunk.error.message);
      yield { chunk, arrived: performance.now() };
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    throw new ApiError(0, "interrupted", "The connection broke before the reply was complete.");
  }
  if (!isComplete) throw new ApiError(0, "interrupted", "The reply ended early: the server closed the connection.");
}

/** Yields the data of each event. Comment lines, which keep the connection alive, are skipped. */
async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line.startsWith("data: ")) yield line.slice(6).replace(/\r$/, "");
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
