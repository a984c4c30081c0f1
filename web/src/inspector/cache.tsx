// The KV cache: the blocks of this reply, and the work that they saved.

import { promptOf } from "../api/replay";
import type { CacheMiss, ModelCard } from "../api/types";
import { bytesText, grouped, plural } from "../parts/format";
import type { Recording } from "../state/conversation";
import { state } from "../state/store";
import type { PanelProps } from "./inspector";
import { useLoaded } from "./load";

/** Blocks that are drawn one by one. */
const MAX_DRAWN = 2048;

export function CachePanel({ recording }: PanelProps) {
  const { usage, pellucid } = recording;
  const numReply = recording.tokens.length - recording.inherited;
  if (!usage || !pellucid) return <Unfinished recording={recording} />;
  const cached = pellucid.cached_tokens;
  const prompt = usage.prompt_tokens;
  const generated = usage.completion_tokens || numReply;
  const block = blockOf(recording);
  return (
    <>
      <BlockMap block={block} prompt={prompt} cached={cached} generated={generated} />
      <dl class="pairs">
        <Memory block={block} positions={prompt + generated} shared={cached} />
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
        A number of rows is the number of tokens that pass through all layers. Only whole blocks of {block.positions}{" "}
        tokens are reused, and only those of your own requests or of a prompt that the operator shares. All blocks are
        in memory, none on disk.
      </p>
      {(pellucid.cache_misses ?? []).map((miss, i) => (
        <WhyNot key={i} miss={miss} />
      ))}
    </>
  );
}

type Block = NonNullable<ModelCard["kv_block"]>;

/** The size of a block of the model that wrote the reply. A model that is not loaded does not tell its bytes. */
function blockOf(recording: Recording): Block {
  const model = state.models.find((card) => card.id === recording.request["model"]);
  return model?.kv_block ?? { positions: 32, bytes: 0 };
}

/** Memory of the blocks that a reply used. */
function Memory({ block, positions, shared }: { block: Block; positions: number; shared: number }) {
  const size = (count: number) => bytesText(Math.ceil(count / block.positions) * block.bytes);
  if (block.bytes === 0) return null;
  return (
    <div>
      <dt>memory</dt>
      <dd>
        {size(positions)} in blocks of {bytesText(block.bytes)}
        {shared > 0 && `, ${size(shared)} of it shared with earlier replies`}
      </dd>
    </div>
  );
}

/** While a reply runs, only the length of its prompt and its tokens so far are known. */
function Unfinished({ recording }: { recording: Recording }) {
  const prompt = useLoaded(() => promptOf(recording), [recording]);
  const block = blockOf(recording);
  const generated = recording.tokens.length - recording.inherited;
  return (
    <>
      {prompt.kind === "ready" && (
        <>
          <BlockMap block={block} prompt={prompt.value.tokens.count} cached={null} generated={generated} />
          <dl class="pairs">
            <Memory block={block} positions={prompt.value.tokens.count + generated} shared={0} />
          </dl>
        </>
      )}
      <p class="hint">
        {recording.endAt === null
          ? "The server tells at the end of the reply which blocks came from the cache."
          : "The reply was stopped, so the server did not tell which blocks came from the cache."}
      </p>
    </>
  );
}

/** Says why the rest of the prompt was computed. */
function WhyNot({ miss }: { miss: CacheMiss }) {
  return (
    <section class="why-not">
      <h3>Why no more was reused</h3>
      <p>{reasonOf(miss)}</p>
      {miss.reason === "differs" && (
        <table class="prompt-difference">
          <tbody>
            <tr>
              <th scope="row">this prompt</th>
              <td>
                …{miss.before}
                <mark>{miss.prompt}</mark>
              </td>
            </tr>
            <tr>
              <th scope="row">cached</th>
              <td>
                …{miss.before}
                <mark>{miss.cached}</mark>
              </td>
            </tr>
          </tbody>
        </table>
      )}
    </section>
  );
}

function reasonOf({ reason, reused_tokens: reused, position }: CacheMiss): string {
  switch (reason) {
    case "differs":
      return `Token ${position} differs from that of your nearest cached prompt, so its block and all after it were computed.`;
    case "evicted":
      return `The block after ${reused} tokens was cached and has been evicted, because its memory was needed.`;
    case "other_salt":
      return `The block after ${reused} tokens is cached under another cache_salt, which this request may not use.`;
    case "no_snapshot":
      return `The block after ${reused} tokens is cached, but no snapshot of the model's recurrent state is.`;
    case "no_window":
      return `The block after ${reused} tokens is cached, but not the windows that some layers need to go on.`;
    case "new":
      return reused === 0
        ? "No prompt of yours with this beginning is cached."
        : `The block after ${reused} tokens is not cached; only whole blocks of tokens are.`;
  }
}

interface MapProps {
  block: Block;
  prompt: number;
  /** Tokens from the prefix cache; null while the server has not told. */
  cached: number | null;
  generated: number;
}

function BlockMap({ block, prompt, cached, generated }: MapProps) {
  const size = block.positions;
  const numBlocks = Math.min(MAX_DRAWN, Math.ceil((prompt + generated) / size));
  const kinds = Array.from({ length: numBlocks }, (_, i) => {
    const start = i * size;
    if (start + size <= (cached ?? 0)) return "cached";
    return start < prompt ? "prompt" : "reply";
  });
  const counts = (kind: string) => kinds.filter((one) => one === kind).length;
  const last = (prompt + generated) % size || size;
  const label = `${plural(numBlocks, "block")}: ${counts("cached")} from the cache, ${counts("prompt")} of the prompt, ${counts("reply")} of the reply`;
  return (
    <figure class="blocks-figure">
      <div class="blocks" role="img" aria-label={label}>
        {kinds.map((kind, i) => (
          <span
            key={i}
            class={`kv-block ${kind}`}
            title={`positions ${i * size} to ${i * size + (i === numBlocks - 1 ? last : size) - 1}`}
          >
            {i === numBlocks - 1 && last < size && (
              <span class="free" style={{ width: `${100 * (1 - last / size)}%` }} />
            )}
          </span>
        ))}
      </div>
      <figcaption class="legend">
        {cached !== null && (
          <>
            <span class="swatch cached" /> shared: from the prefix cache{" "}
          </>
        )}
        <span class="swatch prompt" /> {cached === null ? "of the prompt" : "new: computed for the prompt"}{" "}
        <span class="swatch reply" /> new: written with the reply
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
