// The KV cache: the blocks of this reply, and the work that they saved.

import { promptOf } from "../api/replay";
import { grouped } from "../parts/format";
import type { Recording } from "../state/conversation";
import type { PanelProps } from "./inspector";
import { useLoaded } from "./load";

/** Positions of a block. */
const BLOCK = 32;
/** Blocks that are drawn one by one. */
const MAX_DRAWN = 2048;

export function CachePanel({ recording }: PanelProps) {
  const { usage, pellucid } = recording;
  const numReply = recording.tokens.length - recording.inherited;
  if (!usage || !pellucid) return <Unfinished recording={recording} />;
  const cached = pellucid.cached_tokens;
  const prompt = usage.prompt_tokens;
  const generated = usage.completion_tokens || numReply;
  return (
    <>
      <BlockMap prompt={prompt} cached={cached} generated={generated} />
      <dl class="pairs">
        <div>
          <dt>from the prefix cache</dt>
          <dd>
            {grouped(cached)} of {grouped(prompt)} prompt tokens
          </dd>
        </div>
        <div>
          <dt>computed</dt>
          <dd>
            {grouped(prompt - cached)} of the prompt, {grouped(generated)} of the reply
          </dd>
        </div>
        {pellucid.preemptions > 0 && (
          <div>
            <dt>preempted</dt>
            <dd>{pellucid.preemptions} times, and computed again</dd>
          </div>
        )}
      </dl>
      <h3>What the cache saves</h3>
      <Costs prompt={prompt} cached={cached} generated={generated} />
      <p class="hint">
        A number of rows is the number of tokens that pass through all layers. Only whole blocks of {BLOCK} are reused,
        and only those of your own requests.
      </p>
      {whyNot(recording, cached, prompt)}
    </>
  );
}

/** While a reply runs, only the length of its prompt and its tokens so far are known. */
function Unfinished({ recording }: { recording: Recording }) {
  const prompt = useLoaded(() => promptOf(recording), [recording]);
  const generated = recording.tokens.length - recording.inherited;
  return (
    <>
      {prompt.kind === "ready" && <BlockMap prompt={prompt.value.tokens.count} cached={0} generated={generated} />}
      <p class="hint">
        {recording.endAt === null
          ? "The server tells at the end of the reply which blocks came from the cache."
          : "The reply was stopped, so the server did not tell which blocks came from the cache."}
      </p>
    </>
  );
}

function whyNot({ inherited }: Recording, cached: number, prompt: number) {
  if (cached >= Math.floor((prompt - 1) / BLOCK) * BLOCK) return null;
  return (
    <p class="hint">
      {inherited > 0 ? "Not every block before the branch was found. " : ""}A block is computed if its text is new, if
      it was evicted, or if the request has another cache_salt. The server does not say yet which of them it was.
    </p>
  );
}

function BlockMap({ prompt, cached, generated }: { prompt: number; cached: number; generated: number }) {
  const numBlocks = Math.min(MAX_DRAWN, Math.ceil((prompt + generated) / BLOCK));
  const kinds = Array.from({ length: numBlocks }, (_, i) => {
    const start = i * BLOCK;
    if (start + BLOCK <= cached) return "cached";
    return start < prompt ? "prompt" : "reply";
  });
  const counts = (kind: string) => kinds.filter((one) => one === kind).length;
  const last = (prompt + generated) % BLOCK || BLOCK;
  const label = `${numBlocks} blocks: ${counts("cached")} from the cache, ${counts("prompt")} of the prompt, ${counts("reply")} of the reply`;
  return (
    <figure class="blocks-figure">
      <div class="blocks" role="img" aria-label={label}>
        {kinds.map((kind, i) => (
          <span
            key={i}
            class={`kv-block ${kind}`}
            title={`positions ${i * BLOCK} to ${i * BLOCK + (i === numBlocks - 1 ? last : BLOCK) - 1}`}
          >
            {i === numBlocks - 1 && last < BLOCK && (
              <span class="free" style={{ width: `${100 * (1 - last / BLOCK)}%` }} />
            )}
          </span>
        ))}
      </div>
      <figcaption class="legend">
        <span class="swatch cached" /> from the prefix cache <span class="swatch prompt" /> computed for the prompt{" "}
        <span class="swatch reply" /> written with the reply
      </figcaption>
    </figure>
  );
}

function Costs({ prompt, cached, generated }: { prompt: number; cached: number; generated: number }) {
  const rows = [
    ["with both caches", prompt - cached + generated],
    ["without the prefix cache", prompt + generated],
    // Without keys and values, each token computes all tokens before it again.
    ["without any cache", generated * prompt + (generated * (generated - 1)) / 2],
  ] as const;
  const largest = Math.max(...rows.map(([, value]) => value));
  return (
    <table class="costs">
      <tbody>
        {rows.map(([name, value]) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td>
              <span class="bar">
                <span class="fill" style={{ width: `${Math.max(0.5, (100 * value) / largest)}%` }} />
                <span class="value">{grouped(value)} rows</span>
              </span>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
