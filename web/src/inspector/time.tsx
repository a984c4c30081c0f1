// Time: a waterfall of the request, and the gaps between tokens.

import { gapOf, medianGap } from "../chat/tokens";
import { grouped, milliseconds, plural } from "../parts/format";
import { inspect } from "../state/actions";
import type { Recording } from "../state/conversation";
import { setSettings, useApp } from "../state/store";
import type { PanelProps } from "./inspector";

export function TimePanel({ node, recording, token }: PanelProps) {
  const { pellucid } = recording;
  const timings = pellucid?.timings;
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
          <dd>{(timings ? timings.tokens_per_second : liveSpeed(recording))?.toFixed(1) ?? "–"}</dd>
        </div>
        <div>
          <dt>whole reply</dt>
          <dd>
            {milliseconds(timings?.total_ms)} in the server, {milliseconds(recording.endAt)} here
          </dd>
        </div>
      </dl>
      <Gaps node={node.id} recording={recording} token={token} />
      {timings?.gaps && <ServerGaps bounds={timings.gaps.bounds_ms} counts={timings.gaps.counts} />}
      <BatchSizes recording={recording} />
    </>
  );
}

interface Span {
  name: string;
  start: number;
  length: number;
  note: string;
  /** Whether it is the sum of pieces that lie within or beside other spans. */
  isShare?: boolean;
}

/** Tokens a second so far, as they arrived here. */
function liveSpeed({ tokens, inherited, firstAt }: Recording): number | null {
  const seconds = ((tokens.at(-1)?.at ?? 0) - (firstAt ?? 0)) / 1000;
  return seconds > 0 ? (tokens.length - inherited - 1) / seconds : null;
}

/** Spans of a reply that runs or was stopped: what this page has seen of it. */
function seenSpans({ tokens, inherited, firstAt }: Recording): Span[] {
  if (firstAt === null) return [];
  const numTokens = tokens.length - inherited;
  return [
    {
      name: "first token",
      start: 0,
      length: firstAt,
      note: "network, queue and prefill; the server tells their shares at the end",
    },
    {
      name: "decode",
      start: firstAt,
      length: Math.max(0, (tokens.at(-1)?.at ?? 0) - firstAt),
      note: `${plural(numTokens, "token")} so far`,
    },
  ];
}

/** Spans of a request. The server's clock starts when it has read the request; the rest is network and parsing. */
function spansOf(recording: Recording): Span[] {
  const { pellucid, usage, firstAt, endAt, tokens } = recording;
  if (!pellucid || firstAt === null || endAt === null) return seenSpans(recording);
  const { queue_ms: queue, prefill_ms, time_to_first_token_ms: first, decode_ms: decode } = pellucid.timings;
  const { sampling_ms: sampling, guard_ms: guard } = pellucid.timings;
  const prefill = prefill_ms ?? 0;
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
      note: `${plural(numDecoded, "token")} after the first`,
    },
    ...shareOf("sampling", "choosing the tokens, in all steps together", before + queue + prefill, sampling),
    ...shareOf("guard", "judging prompt and reply, beside the steps", 0, guard),
    {
      name: "delivery",
      start: Math.min(decodeEnd, endAt),
      length: Math.max(0, endAt - decodeEnd),
      note: "last bytes to this page",
    },
  ];
}

/** The span of a sum of times; none if the server did not tell it. */
function shareOf(name: string, note: string, start: number, length: number | null | undefined): Span[] {
  return length === null || length === undefined ? [] : [{ name, start, length, note, isShare: true }];
}

function Waterfall({ recording }: { recording: Recording }) {
  const spans = spansOf(recording);
  if (spans.length === 0) return <p class="hint">Waiting for the first token.</p>;
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
                  class={`span ${span.name.split(/[, ]/)[0]}${span.isShare ? " share" : ""}`}
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

/** The server's own histogram of gaps between the steps that gave the reply tokens. */
function ServerGaps({ bounds, counts }: { bounds: number[]; counts: number[] }) {
  const shown = counts.map((count, i) => ({ count, i })).filter(({ count }) => count > 0);
  if (shown.length === 0) return null;
  const most = Math.max(...counts);
  const name = (i: number) =>
    i < bounds.length ? `up to ${milliseconds(bounds[i])}` : `over ${milliseconds(bounds.at(-1))}`;
  return (
    <section>
      <h3>Gaps in the server</h3>
      <table class="costs gaps">
        <tbody>
          {shown.map(({ count, i }) => (
            <tr key={i}>
              <th scope="row">{name(i)}</th>
              <td>
                <span class="bar">
                  <span class="fill" style={{ width: `${(100 * count) / most}%` }} />
                  <span class="value">{grouped(count)}</span>
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

/** The number of sequences in each step, which traces record. */
function BatchSizes({ recording }: { recording: Recording }) {
  const { settings } = useApp();
  const sizes = Object.entries(recording.traces)
    .map(([position, trace]) => ({ position: Number(position), size: trace.batch_size ?? 0 }))
    .sort((a, b) => a.position - b.position);
  const most = Math.max(1, ...sizes.map(({ size }) => size));
  const width = Math.max(2, Math.min(12, 480 / Math.max(1, sizes.length)));
  return (
    <section>
      <h3>The batch</h3>
      {sizes.length === 0 ? (
        <p class="hint">
          How many sequences ran in each step is known only for replies whose steps were recorded.{" "}
          {!settings.recordsTraces && (
            <button type="button" class="small" onClick={() => setSettings({ recordsTraces: true })}>
              Record the steps from now on
            </button>
          )}
        </p>
      ) : (
        <figure class="chart batch">
          <div class="scroll" tabIndex={0} role="region" aria-label="Sequences in each step">
            <svg width={width * sizes.length} height={56} role="img" aria-label={`At most ${most} sequences in a step`}>
              {sizes.map(({ position, size }, i) => (
                <rect
                  key={position}
                  class="mark"
                  data-size={size}
                  x={i * width}
                  y={54 - (52 * size) / most}
                  width={Math.max(1, width - 1)}
                  height={(52 * size) / most}
                >
                  <title>{`${size} sequences`}</title>
                </rect>
              ))}
            </svg>
          </div>
          <figcaption>
            Sequences that ran in the step of each token, this one included; at most {most}. They share the work of
            reading the weights, and change none of its bits.
          </figcaption>
        </figure>
      )}
    </section>
  );
}
