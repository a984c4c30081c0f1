// Tokenization: the prompt as the template wrote it, cut into tokens, with ids and bytes.

import { useState } from "preact/hooks";
import { promptOf } from "../api/replay";
import type { Rendered, TokenKind, Tokenized } from "../api/types";
import { grouped, hex, plural, visible } from "../parts/format";
import { inspect } from "../state/actions";
import type { PanelProps } from "./inspector";
import { useLoaded } from "./load";

export function TokensPanel({ node, recording, token }: PanelProps) {
  const prompt = useLoaded(() => promptOf(recording), [recording]);
  const chosen = token === null ? undefined : recording.tokens[token];
  return (
    <>
      {chosen && <Details text={chosen.text} id={chosen.id} bytes={chosen.bytes} />}
      <h3>Prompt</h3>
      {prompt.kind === "loading" && (
        <p class="hint" role="status">
          Asking the server…
        </p>
      )}
      {prompt.kind === "failed" && (
        <p class="failure" role="alert">
          {prompt.message}
        </p>
      )}
      {prompt.kind === "ready" && <PromptTokens tokens={prompt.value.tokens} rendered={prompt.value.rendered} />}
      <h3>
        Reply <small>{plural(recording.tokens.length, "token")}</small>
      </h3>
      <div class="pieces">
        {recording.tokens.map((one, i) => (
          <button
            key={i}
            type="button"
            class={`piece-button${i === token ? " selected" : ""}`}
            onClick={() => inspect(node.id, i)}
          >
            <span class="piece">{visible(one.text)}</span>
            <small>{one.id}</small>
          </button>
        ))}
      </div>
    </>
  );
}

interface DetailProps {
  text: string;
  id: number;
  bytes: readonly number[];
  /** Source of a token of the prompt. */
  origin?: string;
}

function Details({ text, id, bytes, origin }: DetailProps) {
  return (
    <dl class="pairs token-details">
      <div>
        <dt>text</dt>
        <dd>
          <span class="piece">{visible(text)}</span>
        </dd>
      </div>
      <div>
        <dt>id</dt>
        <dd>{id}</dd>
      </div>
      <div>
        <dt>{plural(bytes.length, "byte")}</dt>
        <dd>
          <code>{hex(bytes)}</code>
        </dd>
      </div>
      {origin !== undefined && (
        <div>
          <dt>origin</dt>
          <dd>{origin}</dd>
        </div>
      )}
    </dl>
  );
}

type Origin = "control" | "template" | "own";

const ORIGINS: Record<Origin, string> = {
  control: "control token: it marks structure, and only the template or the tokenizer writes it",
  template: "text that the model's template wrote",
  own: "text of a message: it can never become a control token",
};

function originOf(kind: TokenKind | undefined, isTrusted: boolean): Origin {
  if (kind === "control") return "control";
  return isTrusted ? "template" : "own";
}

function PromptTokens({ tokens, rendered }: { tokens: Tokenized; rendered: Rendered | null }) {
  const [selected, setSelected] = useState<number | null>(null);
  const trusted = rendered ? trustedTokens(tokens, rendered) : tokens.tokens.map(() => false);
  const origins = tokens.tokens.map((_, i) => originOf(tokens.token_kinds?.[i], trusted[i] ?? true));
  const text = (i: number) => tokens.token_strs?.[i] ?? "";
  return (
    <>
      <ul class="legend origins">
        {(["control", "template", "own"] as const)
          .filter((origin) => origins.includes(origin))
          .map((origin) => (
            <li key={origin}>
              <span class={`swatch ${origin}`} /> {ORIGINS[origin]}
            </li>
          ))}
      </ul>
      <div class="pieces">
        {tokens.tokens.map((id, i) => (
          <button
            key={i}
            type="button"
            class={`piece-button ${origins[i]}${i === selected ? " selected" : ""}`}
            aria-pressed={i === selected}
            onClick={() => setSelected(i === selected ? null : i)}
          >
            <span class="piece">{visible(text(i))}</span>
            <small>{id}</small>
          </button>
        ))}
      </div>
      {selected !== null && (
        <Details
          text={text(selected)}
          id={tokens.tokens[selected]!}
          bytes={tokens.token_bytes?.[selected] ?? []}
          origin={ORIGINS[origins[selected]!]}
        />
      )}
      <p class="hint">
        {plural(tokens.count, "token")} of a context of {grouped(tokens.max_model_len)}.
      </p>
    </>
  );
}

/** Bytes that are searched for the next token behind text that the tokenizer changed. */
const MAX_SKIPPED = 64;

/** Tells for each token whether the template wrote it, by walking through the bytes of the rendered segments. */
export function trustedTokens(tokens: Tokenized, rendered: Rendered): boolean[] {
  const encoder = new TextEncoder();
  const segments = rendered.segments.map((segment) => ({
    bytes: encoder.encode(segment.text),
    trusted: segment.trusted,
  }));
  const all = segments.flatMap(({ bytes, trusted }) => Array.from(bytes, (byte) => ({ byte, trusted })));
  const pieces = tokens.token_bytes ?? [];
  const starts = (bytes: readonly number[], from: number) => bytes.every((byte, i) => all[from + i]?.byte === byte);
  let at = 0;
  return pieces.map((bytes, index) => {
    const isTrusted = all[at]?.trusted ?? true;
    // Some tokenizers add a space before the text that the text does not have.
    const own = starts(bytes, at) ? bytes : bytes[0] === 32 && starts(bytes.slice(1), at) ? bytes.slice(1) : null;
    if (own !== null) {
      at += own.length;
      return isTrusted;
    }
    // Control tokens around the text are not part of it.
    if (tokens.token_kinds?.[index] === "control") return true;
    // Other tokens stand for text that the tokenizer changed, or cannot spell: the next token is searched behind it.
    const next = pieces[index + 1] ?? [];
    let length = 1;
    while (length < MAX_SKIPPED && !starts(next, at + length)) length++;
    at += length < MAX_SKIPPED ? length : 1;
    return isTrusted;
  });
}
