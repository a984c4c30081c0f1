// Time: a waterfall of the request, and the gaps between tokens.

import { gapOf, medianGap } from "../chat/tokens";
import { grouped, milliseconds } from "../parts/format";
import { inspect } from "../state/actions";
import type { Recording } from "../state/conversation";
import type { PanelProps } from "./inspector";

export function TimePanel({ node, recording, token }: PanelProps) {
  const { pellucid } = recording;
  const timings = pellucid?.timings;
  const perToken = timings?.time_per_output_token_ms;
  return (
    <>
      <Waterfall recording={recording} />
      <dl class="pairs">
        <div>
          <dt>first token</dt>
          <dd>
            {milliseconds(timings?.time_to_first_token_ms)} in the server, {milliseconds(recording.firstAt)} here
          </dd>
        </div>
        <div>
          <dt>tokens per second</dt>
          <dd>{perToken ? (1000 / perToken).toFixed(1) : "–"}</dd>
        </div>
        <div>
          <dt>whole reply</dt>
          <dd>
            {milliseconds(timings?.total_ms)} in the server, {milliseconds(recording.endAt)} here
          </dd>
        </div>
      </dl>
      <Gaps node={node.id} recording={recording} token={token} />
    </>
  );
}

interface Span {
  name: string;
  start: number;
  length: number;
  note: string;
}

/** Spans of a request. The server's clock starts when it has read the request; the rest is network and parsing. */
function spansOf(recording: Recording): Span[] {
  const { pellucid, usage, firstAt, endAt, tokens } = recording;
  if (!pellucid || firstAt === null || endAt === null) return [];
  const { queue_ms: queue, time_to_first_token_ms: first, decode_ms: decode } = pellucid.timings;
  const prefill = Math.max(0, (first ?? 0) - queue);
  const before = Math.max(0, firstAt - (first ?? 0));
  const computed = (usage?.prompt_tokens ?? 0) - pellucid.cached_tokens;
  const numDecoded = Math.max(0, (usage?.completion_tokens ?? tokens.length) - 1);
  const decodeEnd = before + queue + prefill + decode;
  return [
    { name: "network, parsing", start: 0, length: before, note: "outside of the engine, both ways" },
    { name: "queue", start: before, length: queue, note: "until the first step" },
    {
      name: "prefill",
      start: before + queue,
      length: prefill,
      note: `${grouped(computed)} tokens computed, ${grouped(pellucid.cached_tokens)} cached`,
    },
    {
      name: "decode",
      start: before + queue + prefill,
      length: decode,
      note: `${grouped(numDecoded)} tokens after the first`,
    },
    {
      name: "delivery",
      start: Math.min(decodeEnd, endAt),
      length: Math.max(0, endAt - decodeEnd),
      note: "last bytes to this page",
    },
  ];
}

function Waterfall({ recording }: { recording: Recording }) {
  const spans = spansOf(recording);
  if (spans.length === 0) return <p class="hint">The server tells its times at the end of the reply.</p>;
  const total = Math.max(...spans.map((span) => span.start + span.length));
  return (
    <table class="waterfall">
      <tbody>
        {spans.map((span) => (
          <tr key={span.name}>
            <th scope="row">
              {span.name}
              <small>{span.note}</small>
            </th>
            <td>
              <span class="lane">
                <span
                  class={`span ${span.name.split(",")[0]}`}
                  style={{
                    left: `${(100 * span.start) / total}%`,
                    width: `${Math.max(0.6, (100 * span.length) / total)}%`,
                  }}
                />
              </span>
            </td>
            <td class="number">{milliseconds(span.length)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const NUM_BINS = 16;

function Gaps({ node, recording, token }: { node: string; recording: Recording; token: number | null }) {
  const { tokens, inherited } = recording;
  const gaps = tokens.map((_, i) => gapOf(recording, i));
  const own = gaps.slice(inherited + 1);
  if (own.length < 2) return null;
  const sorted = [...own].sort((a, b) => a - b);
  const p95 = sorted[Math.floor(sorted.length * 0.95)] ?? 0;
  const longest = sorted.at(-1) ?? 1;
  const width = Math.max(2, Math.min(12, 480 / tokens.length));
  const pick = (event: MouseEvent) => {
    const bar = (event.target as Element).closest<SVGElement>("[data-token]");
    if (bar) inspect(node, Number(bar.dataset["token"]));
  };
  return (
    <section>
      <h3>Gaps between tokens</h3>
      <figure class="chart">
        <div class="scroll" tabIndex={0} role="region" aria-label="Gap before each token">
          <svg
            width={width * tokens.length}
            height={80}
            role="img"
            aria-label={`Gaps before ${tokens.length} tokens`}
            onClick={pick}
          >
            {gaps.map((gap, i) => (
              <g key={i} data-token={i} class={i === token ? "selected" : ""}>
                <rect class="hit" x={i * width} y={0} width={width} height={80} />
                <rect
                  class="mark"
                  x={i * width}
                  y={78 - Math.max(1, (76 * gap) / longest)}
                  width={Math.max(1, width - 1)}
                  height={Math.max(1, (76 * gap) / longest)}
                />
              </g>
            ))}
          </svg>
        </div>
        <figcaption>
          As they arrived here: median {milliseconds(medianGap(recording))}, 95 % under {milliseconds(p95)}, longest{" "}
          {milliseconds(longest)}.
        </figcaption>
      </figure>
      <Histogram gaps={sorted} limit={Math.max(p95 * 1.5, 0.1)} />
    </section>
  );
}

function Histogram({ gaps, limit }: { gaps: number[]; limit: number }) {
  const bins = Array.from({ length: NUM_BINS }, () => 0);
  for (const gap of gaps) bins[Math.min(NUM_BINS - 1, Math.floor((NUM_BINS * gap) / limit))]! += 1;
  const most = Math.max(...bins);
  return (
    <figure class="chart">
      <svg viewBox="0 0 320 76" class="wide" role="img" aria-label="Histogram of gaps">
        {bins.map((count, i) => (
          <rect
            key={i}
            class="mark"
            x={i * 20 + 1}
            y={60 - (56 * count) / most}
            width={18}
            height={(56 * count) / most}
          >
            <title>{count} gaps</title>
          </rect>
        ))}
        <text x={0} y={73}>
          0
        </text>
        <text x={320} y={73} text-anchor="end">
          {milliseconds(limit)} and more
        </text>
      </svg>
    </figure>
  );
}
