// Numbers and tokens as texts.

export const grouped = (value: number): string => Math.round(value).toLocaleString("en-US");

/** A probability as a percentage with two or three significant digits. */
export function percent(p: number): string {
  if (p >= 0.9995) return "100 %";
  if (p >= 0.1) return `${(100 * p).toFixed(1)} %`;
  if (p >= 0.0001) return `${(100 * p).toPrecision(2)} %`;
  return p === 0 ? "0" : `${(100 * p).toExponential(1)} %`;
}

export function milliseconds(ms: number | null | undefined): string {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

/** A size in decimal units, as the server writes it. */
export function bytesText(bytes: number): string {
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(2)} GB`;
  return bytes >= 1e6 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e3).toFixed(1)} kB`;
}

/** Text of a token with its spaces and line ends visible. */
export function visible(text: string): string {
  if (text === "") return "∅";
  return text
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/^ | $/g, "␣")
    .replace(/ {2,}/g, (run) => "␣".repeat(run.length));
}

export const hex = (bytes: readonly number[]): string =>
  bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");

export const plural = (count: number, word: string): string => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;

export function dateOf(time: number): string {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday
    ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString([], { day: "numeric", month: "short" });
}
