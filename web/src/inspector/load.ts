// A value that a panel loads, with its failure.

import { useEffect, useState } from "preact/hooks";

export type Loaded<T> = { kind: "loading" } | { kind: "ready"; value: T } | { kind: "failed"; message: string };

/** Loads a value again whenever one of `inputs` changes; an earlier request is cancelled. */
export function useLoaded<T>(
  load: (signal: AbortSignal) => Promise<T>,
  inputs: readonly unknown[],
  delayMs = 0,
): Loaded<T> {
  const [loaded, setLoaded] = useState<Loaded<T>>({ kind: "loading" });
  useEffect(() => {
    const controller = new AbortController();
    setLoaded((before) => (before.kind === "ready" && delayMs > 0 ? before : { kind: "loading" }));
    const start = async () => {
      try {
        const value = await load(controller.signal);
        if (!controller.signal.aborted) setLoaded({ kind: "ready", value });
      } catch (error) {
        if (!controller.signal.aborted) setLoaded({ kind: "failed", message: (error as Error).message });
      }
    };
    const timer = setTimeout(() => void start(), delayMs);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, inputs);
  return loaded;
}
