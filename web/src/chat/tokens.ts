// The tokens of a reply as ranges of its text, and their look.

import type { Recording, Token } from "../state/conversation";
import type { ColorMode } from "../state/settings";

/**
 * Returns the offset in the text at which each token begins, and the length of the text at the end. A token that ends
 * within a character has no characters of its own: they belong to the token that completes the character. Nor has a
 * control token, which the text of a reply leaves out.
 */
export function tokenStarts(tokens: readonly Token[], text: string): number[] {
  const decoder = new TextDecoder();
  const starts: number[] = [];
  let length = 0;
  for (const token of tokens) {
    starts.push(length);
    const piece = decoder.decode(new Uint8Array(token.bytes), { stream: true });
    if (text.startsWith(piece, length)) length += piece.length;
  }
  starts.push(length);
  return starts;
}

/** Returns the index of the token that holds the character at `offset`. */
export function tokenAt(starts: readonly number[], offset: number): number {
  let low = 0;
  let high = starts.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((starts[middle] ?? 0) <= offset) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Returns the class for the color of a token: 0 is unremarkable, 6 stands out. */
export function tokenClass(recording: Recording, index: number, mode: ColorMode): string {
  const token = recording.tokens[index];
  if (!token) return "";
  if (index < recording.inherited) return mode === "off" ? "" : "given";
  switch (mode) {
    case "off":
      return "";
    case "cut":
      return index % 2 === 0 ? "cut-even" : "cut-odd";
    case "probability":
      return `heat-${heat(Math.exp(token.logprob))}`;
    case "gap":
      return `slow-${slowness(recording, index)}`;
    case "proposal": {
      const trace = recording.traces[positionIn(recording, index)];
      if (!trace) return "unknown";
      return trace.proposal === null ? "" : trace.proposal.accepted ? "accepted" : "rejected";
    }
  }
}

/** Steps of the color scale, from the probability that the model gave the token. */
export function heat(p: number): number {
  const limits = [0.9, 0.7, 0.5, 0.3, 0.1, 0.03];
  return limits.filter((limit) => p < limit).length;
}

/** Steps of the color scale, from the time since the token before relative to the median. */
function slowness(recording: Recording, index: number): number {
  const gap = gapOf(recording, index);
  const ratio = gap / Math.max(0.1, medianGap(recording));
  return [1.2, 1.5, 2, 3, 5, 8].filter((limit) => ratio >= limit).length;
}

export function gapOf({ tokens, inherited }: Recording, index: number): number {
  if (index <= inherited) return 0;
  return (tokens[index]?.at ?? 0) - (tokens[index - 1]?.at ?? 0);
}

export function medianGap(recording: Recording): number {
  const gaps = recording.tokens
    .map((_, i) => gapOf(recording, i))
    .slice(recording.inherited + 1)
    .sort((a, b) => a - b);
  return gaps[gaps.length >> 1] ?? 0;
}

/** Position of a token in the sequence of prompt and reply; negative while the length of the prompt is not known. */
export function positionIn({ usage, inherited }: Recording, index: number): number {
  if (!usage) return -1;
  return usage.prompt_tokens + usage.completion_tokens_details.reasoning_tokens + index - inherited;
}
