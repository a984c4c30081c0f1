// Whether the server can be reached, and what it serves.

import { ApiError, models, requestFields, send } from "../api/client";
import { changed, set, state } from "./store";

const RETRY_MS = 3000;
/** The longest wait before the server is asked again, whatever it says. */
const MAX_RETRY_MS = 30_000;
let timer: ReturnType<typeof setTimeout> | undefined;

/** Asks the server what it serves. After a failure it asks again. */
export async function connect(): Promise<void> {
  clearTimeout(timer);
  try {
    const cards = await models();
    set({ models: cards, connection: { kind: "ready" } });
    if (Object.keys(state.fields).length === 0) set({ fields: await requestFields() });
  } catch (error) {
    reportFailure(error);
  }
}

/** Shows why a request failed, and tries again if the reason may pass. */
export function reportFailure(error: unknown): void {
  if (!(error instanceof ApiError)) {
    set({ connection: { kind: "refused", message: String(error), retryAt: null } });
    return;
  }
  const waitMs = error.retryAfterS === null ? RETRY_MS : Math.min(error.retryAfterS * 1000, MAX_RETRY_MS);
  const retryAt = error.isTemporary ? Date.now() + waitMs : null;
  const kind = error.needsKey
    ? "key"
    : error.status === 0
      ? "offline"
      : error.code === "draining" || error.code === "shutting_down"
        ? "draining"
        : error.isTemporary
          ? "busy"
          : "refused";
  set({ connection: { kind, message: error.message, retryAt } });
  if (kind === "key") set({ panel: "key" });
  if (retryAt === null) return;
  clearTimeout(timer);
  timer = setTimeout(() => void check(), waitMs);
}

async function check(): Promise<void> {
  try {
    await send("/health");
    await connect();
  } catch (error) {
    reportFailure(error);
  }
}

/** Marks the server as usable after a request that succeeded. */
export function reportSuccess(): void {
  if (state.connection.kind === "ready") return;
  state.connection = { kind: "ready" };
  changed();
}
