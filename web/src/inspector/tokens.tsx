// Tokenization: the prompt as the template wrote it, cut into tokens, with ids and bytes.

import { promptOf } from "../api/replay";
import type { Rendered, Tokenized } from "../api/types";
import { grouped, hex, visible } from "../parts/format";
import { inspect } from "../state/actions";
import type { PanelProps } from "./inspector";
import { useLoaded } from "./load";

export function TokensPanel({ node, recording, token }: PanelProps) {
  const prompt = useLoaded(() => promptOf(recording), [recording]);
  const chosen = token === null ? undefined : recording.tokens[token];
  return (
    <>
      {chosen && (
        <dl class="pairs">
          <div>
            <dt>text</dt>
            <dd>
              <span class="piece">{visible(chosen.text)}</span>
            </dd>
          </div>
          <div>
            <dt>id</dt>
            <dd>{chosen.id}</dd>
          </div>
          <div>
            <dt>bytes</dt>
            <dd>
              <code>{hex(chosen.bytes)}</code>
            </dd>
          </div>
        </dl>
      )}
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
        Reply <small>{grouped(recording.tokens.length)} tokens</small>
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

function PromptTokens({ tokens, rendered }: { tokens: Tokenized; rendered: Rendered | null }) {
  const trusted = rendered ? trustedTokens(tokens, rendered) : tokens.tokens.map(() => false);
  return (
    <>
      <p class="legend">
        <span class="swatch template" /> written by the model's template
        <span class="swatch own" /> taken from messages: its text can never become a control token
      </p>
      <div class="pieces">
        {tokens.tokens.map((id, i) => (
          <span
            key={i}
            class={trusted[i] ? "piece-button template" : "piece-button own"}
            title={hex(tokens.token_bytes?.[i] ?? [])}
          >
            <span class="piece">{visible(tokens.token_strs?.[i] ?? "")}</span>
            <small>{id}</small>
          </span>
        ))}
      </div>
      <p class="hint">
        {grouped(tokens.count)} tokens of a context of {grouped(tokens.max_model_len)}.
      </p>
    </>
  );
}

/** Tells for each token whether the template wrote it, by walking through the bytes of the rendered segments. */
export function trustedTokens(tokens: Tokenized, rendered: Rendered): boolean[] {
  const encoder = new TextEncoder();
  const segments = rendered.segments.map((segment) => ({
    bytes: encoder.encode(segment.text),
    trusted: segment.trusted,
  }));
  const all = segments.flatMap(({ bytes, trusted }) => Array.from(bytes, (byte) => ({ byte, trusted })));
  let at = 0;
  return (tokens.token_bytes ?? []).map((bytes) => {
    const starts = (from: readonly number[]) => from.every((byte, i) => all[at + i]?.byte === byte);
    // Some tokenizers add a space before the text, and tokens around it, that the text does not have.
    const own = starts(bytes) ? bytes : bytes[0] === 32 && starts(bytes.slice(1)) ? bytes.slice(1) : null;
    if (own === null) return true;
    const isTrusted = all[at]?.trusted ?? true;
    at += own.length;
    return isTrusted;
  });
}
