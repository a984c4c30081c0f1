// Inside the model: the guess after each layer, and the tokens that attention looks at. The server computes the
// position again for it.

import { useState } from "preact/hooks";
import { probeOf } from "../api/replay";
import type { AttentionReport, ProbeReport } from "../api/types";
import { percent, visible } from "../parts/format";
import type { Recording } from "../state/conversation";
import type { PanelProps } from "./inspector";
import { useLoaded } from "./load";

/** Guesses that are shown after each layer. */
const NUM_GUESSES = 3;
/** Positions of the matrix. */
const NUM_ROWS = 24;
/** Tokens over which arcs are drawn. */
const MAX_TOKENS = 80;
/** Size of a cell of the matrix. */
const CELL = 12;
const ARC_HEIGHT = 90;

export function InsidePanel({ node, recording, token }: PanelProps) {
  if (token === null || !recording.tokens[token]) return <p class="hint">Choose a token of the reply.</p>;
  if (node.state === "running") return <p class="hint">The model can be looked into when the reply is complete.</p>;
  return <Inside key={`${node.id} ${token}`} recording={recording} token={token} />;
}

function Inside({ recording, token }: { recording: Recording; token: number }) {
  const [layer, setLayer] = useState(0);
  const [head, setHead] = useState<number | null>(null);
  const layers = useLoaded((signal) => probeOf(recording, token, { layers: NUM_GUESSES }, signal), [recording, token]);
  const attention = useLoaded(
    (signal) =>
      probeOf(recording, token, { attention: { layer, ...(head === null ? {} : { head }), rows: NUM_ROWS } }, signal),
    [recording, token, layer, head],
    150,
  );
  if (layers.kind === "loading")
    return (
      <p class="hint" role="status">
        Asking the server…
      </p>
    );
  if (layers.kind === "failed")
    return (
      <p class="failure" role="alert">
        {layers.message}
      </p>
    );
  const probe = layers.value;
  return (
    <>
      <p class="origin">
        Probed: the server computed this position again, outside the batch, with the same bits as in the reply.
      </p>
      <section>
        <h3>Layers</h3>
        <p class="hint">
          The most probable tokens if the output followed after each layer, and the chance of{" "}
          <span class="piece">{visible(probe.text)}</span> there.
        </p>
        <Layers probe={probe} />
      </section>
      <section>
        <h3>Attention</h3>
        <p class="choose">
          <Choose id="attention-layer" name="layer" count={probe.num_layers} value={layer} onChange={setLayer} />
          <Choose id="attention-head" name="head" count={probe.num_heads} value={head} mean onChange={setHead} />
        </p>
        {attention.kind === "failed" && (
          <p class="failure" role="alert">
            {attention.message}
          </p>
        )}
        {attention.kind === "ready" && attention.value.attention && (
          <>
            <Arcs map={attention.value.attention} />
            <Matrix map={attention.value.attention} />
          </>
        )}
      </section>
    </>
  );
}

function Choose<T extends number | null>(props: {
  id: string;
  name: string;
  count: number;
  value: T;
  mean?: boolean;
  onChange: (value: T) => void;
}) {
  const pick = (event: Event) => {
    const { value } = event.currentTarget as HTMLSelectElement;
    props.onChange((value === "" ? null : Number(value)) as T);
  };
  return (
    <label for={props.id}>
      {props.name}{" "}
      <select id={props.id} value={props.value ?? ""} onChange={pick}>
        {props.mean && <option value="">mean of all</option>}
        {Array.from({ length: props.count }, (_, i) => (
          <option key={i} value={i}>
            {i}
          </option>
        ))}
      </select>
    </label>
  );
}

const chance = (logprob: number | null) => (logprob === null ? 0 : Math.exp(logprob));

/** A step of the heat scale, 1 to 6; 0 for almost nothing. */
const heat = (p: number) => (p < 0.005 ? 0 : Math.min(6, 1 + Math.floor(6 * Math.sqrt(p))));

function Layers({ probe }: { probe: ProbeReport }) {
  return (
    <div class="steps" tabIndex={0} role="region" aria-label="Guesses after each layer">
      <table class="layers">
        <thead>
          <tr>
            <th scope="col">layer</th>
            <th scope="col" colSpan={NUM_GUESSES}>
              guesses
            </th>
            <th scope="col">this token</th>
          </tr>
        </thead>
        <tbody>
          {probe.layers.map(({ layer, logprob, top }) => (
            <tr key={layer}>
              <th scope="row">{layer}</th>
              {top.map((guess) => (
                <td
                  key={guess.id}
                  class={`guess heat-${heat(chance(guess.logprob))} ${guess.id === probe.id ? "is-chosen" : ""}`}
                >
                  <span class="piece">{visible(guess.text)}</span> <small>{percent(chance(guess.logprob))}</small>
                </td>
              ))}
              <td>
                <span class="bar">
                  <span class="fill" style={{ width: `${100 * chance(logprob)}%` }} />
                  <span class="value">{percent(chance(logprob))}</span>
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Positions over which arcs are drawn: all of a short text; else those with the largest weights, and the last ones. */
function drawn(weights: number[]): number[] {
  const all = weights.map((_, position) => position);
  if (all.length <= MAX_TOKENS) return all;
  const largest = [...all].sort((a, b) => weights[b]! - weights[a]!).slice(0, MAX_TOKENS / 2);
  return [...new Set([...largest, ...all.slice(-MAX_TOKENS / 2)])].sort((a, b) => a - b);
}

function Arcs({ map }: { map: AttentionReport }) {
  const weights = map.weights.at(-1) ?? [];
  const positions = drawn(weights);
  let x = 4;
  const places = positions.map((position, i) => {
    const text = visible(map.tokens[position]?.text ?? "");
    const isGap = i > 0 && positions[i - 1] !== position - 1;
    const width = 7 * [...text].length + 6;
    const start = x + (isGap ? 14 : 0);
    x = start + width;
    return { position, text, isGap, start, width, center: start + width / 2 };
  });
  const end = places.at(-1)!;
  const arc = (from: number) => {
    const span = end.center - from;
    const height = Math.min(ARC_HEIGHT - 6, 10 + span / 3);
    return `M${end.center} ${ARC_HEIGHT}C${end.center} ${ARC_HEIGHT - 1.3 * height} ${from} ${ARC_HEIGHT - 1.3 * height} ${from} ${ARC_HEIGHT}`;
  };
  const sum = weights.reduce((all, weight) => all + weight, 0);
  const shown = positions.reduce((all, position) => all + weights[position]!, 0);
  return (
    <figure class="chart arcs">
      <div
        class="scroll"
        tabIndex={0}
        role="region"
        aria-label="Attention of this position over the text"
        ref={(element) => {
          if (element) element.scrollLeft = element.scrollWidth;
        }}
      >
        <svg width={x + 4} height={ARC_HEIGHT + 34} role="img" aria-label={`Weights of ${weights.length} tokens`}>
          {places.map(({ position, center }) => {
            const weight = weights[position]!;
            return weight < 0.002 || position === end.position ? null : (
              <path
                key={position}
                class="arc"
                d={arc(center)}
                stroke-width={1 + 5 * weight}
                opacity={0.25 + 0.75 * weight}
              />
            );
          })}
          {places.map(({ position, text, isGap, start, width, center }) => (
            <g key={position} data-position={position} data-weight={weights[position]}>
              <title>{`${text} ${percent(weights[position]!)}`}</title>
              <rect
                class={`cell heat-fill-of-${heat(weights[position]!)}`}
                x={start}
                y={ARC_HEIGHT + 2}
                width={width - 2}
                height={17}
              />
              <text class="word" x={center} y={ARC_HEIGHT + 14} text-anchor="middle">
                {text}
              </text>
              <text x={center} y={ARC_HEIGHT + 30} text-anchor="middle">
                {weights[position]! >= 0.01 ? Math.round(100 * weights[position]!) : ""}
              </text>
              {isGap && (
                <text x={start - 9} y={ARC_HEIGHT + 14}>
                  …
                </text>
              )}
            </g>
          ))}
        </svg>
      </div>
      <figcaption>
        Weights in percent.{" "}
        {positions.length < weights.length &&
          `${weights.length - positions.length} tokens with ${percent(sum - shown)} are left out. `}
        {sum < 0.99 && `A sink takes the other ${percent(1 - sum)}.`}
      </figcaption>
    </figure>
  );
}

/** The last rows and columns of the matrix; a position cannot look at those after it. */
function Matrix({ map }: { map: AttentionReport }) {
  const first = map.first_position;
  const count = map.weights.length;
  const size = count * CELL;
  return (
    <figure class="chart matrix">
      <svg
        width={size + CELL + 4}
        height={size}
        role="img"
        aria-label={`Attention matrix of the last ${count} positions; those above the diagonal are masked`}
      >
        {map.weights.map((weights, row) => {
          const before = weights.slice(0, first).reduce((all, weight) => all + weight, 0);
          const y = row * CELL;
          return (
            <g key={row} data-row={first + row}>
              {first > 0 && (
                <rect class={`cell heat-fill-of-${heat(before)}`} x={0} y={y} width={CELL - 1} height={CELL - 1}>
                  <title>{`${nameOf(map, first + row)} at all earlier tokens: ${percent(before)}`}</title>
                </rect>
              )}
              {Array.from({ length: count }, (_, column) => {
                const weight = weights[first + column];
                const kind = weight === undefined ? "masked" : `heat-fill-of-${heat(weight)}`;
                return (
                  <rect
                    key={column}
                    class={`cell ${kind}`}
                    x={CELL + 4 + column * CELL}
                    y={y}
                    width={CELL - 1}
                    height={CELL - 1}
                  >
                    <title>
                      {weight === undefined
                        ? "masked: a position cannot look ahead"
                        : `${nameOf(map, first + row)} at ${nameOf(map, first + column)}: ${percent(weight)}`}
                    </title>
                  </rect>
                );
              })}
            </g>
          );
        })}
      </svg>
      <figcaption>
        The last {count} positions: each row looks at the columns, itself included. The first column is the sum of all
        earlier tokens; the upper right is masked, because a position cannot look ahead.
      </figcaption>
    </figure>
  );
}

const nameOf = (map: AttentionReport, position: number) => visible(map.tokens[position]?.text ?? "");
