// How a token was chosen: the candidates after each step of the sampler, the draw, and what other settings would do.

import { useState } from "preact/hooks";
import { type Replay, reasonForWholeReplay, replayStep, samplingOf, traceOf } from "../api/replay";
import type { Candidate, Runner, SamplerStep, TokenTrace } from "../api/types";
import { grouped, percent, visible } from "../parts/format";
import type { Recording } from "../state/conversation";
import { useApp } from "../state/store";
import type { PanelProps } from "./inspector";
import { useLoaded } from "./load";

/** Candidates that are shown before "show all". */
const NUM_SHOWN = 10;

export function ChoicePanel({ node, recording, token }: PanelProps) {
  if (token === null || !recording.tokens[token]) return <p class="hint">Choose a token of the reply.</p>;
  if (token < recording.inherited) {
    const isLast = token === recording.inherited - 1;
    return (
      <p class="hint">
        {isLast
          ? "You chose this token: the branch begins with it."
          : "This token was given with the request, so nothing was chosen here."}
      </p>
    );
  }
  if (node.state === "running") return <p class="hint">The steps can be seen when the reply is complete.</p>;
  return <Choice key={`${node.id} ${token}`} recording={recording} token={token} />;
}

function Choice({ recording, token }: { recording: Recording; token: number }) {
  const replay = useLoaded((signal) => traceOf(recording, token, signal), [recording, token]);
  if (replay.kind === "loading")
    return (
      <p class="hint" role="status">
        Asking the server…
      </p>
    );
  if (replay.kind === "failed")
    return (
      <p class="failure" role="alert">
        {replay.message}
      </p>
    );
  const { trace } = replay.value;
  const isSame = trace.id === recording.tokens[token]?.id;
  return (
    <>
      <p class="origin">{originOf(replay.value)}</p>
      {!isSame && (
        <p class="failure" role="alert">
          The replay chose another token: the model or its settings have changed.
        </p>
      )}
      <Steps trace={trace} />
      <Draw trace={trace} />
      {trace.guards?.map(({ guard, verdict }) => (
        <p key={guard} class="hint">
          {verdict === "passed"
            ? `The guard ${guard} passed it.`
            : `The guard ${guard} failed, and failures pass here.`}
        </p>
      ))}
      <WhatIf recording={recording} token={token} />
    </>
  );
}

function originOf({ how, cached, computed }: Replay): string {
  switch (how) {
    case "recorded":
      return "Recorded while the reply was generated.";
    case "step":
      return `Replayed: the server computed this step again (${grouped(computed)} tokens computed, ${grouped(cached)} from its cache). The same seed gives the same numbers.`;
    case "whole":
      return `Replayed: the server ran the request again up to this token (${grouped(computed)} tokens computed, ${grouped(cached)} from its cache). The same seed gives the same numbers.`;
  }
}

interface Row {
  id: number;
  text: string;
  /** Probability of the model, then after each step; undefined if it is not among those that the server reports. */
  cells: (Candidate | undefined)[];
  first: number;
}

/** Joins the candidates of all steps into rows. */
function rowsOf(steps: SamplerStep[]): Row[] {
  const rows = new Map<number, Row>();
  steps.forEach((step, i) => {
    for (const candidate of step.candidates) {
      const row = rows.get(candidate.id) ?? {
        id: candidate.id,
        text: candidate.text,
        cells: [],
        first: candidate.before,
      };
      row.cells[i] = candidate;
      rows.set(candidate.id, row);
    }
  });
  const best = (row: Row) => Math.max(...row.cells.map((cell) => Math.max(cell?.before ?? 0, cell?.after ?? 0)));
  return [...rows.values()].sort((a, b) => best(b) - best(a));
}

export function Steps({ trace }: { trace: TokenTrace }) {
  const [showsAll, setShowsAll] = useState(false);
  const rows = rowsOf(trace.steps);
  if (trace.steps.length === 0) {
    return <p>No step changed the probabilities: the token was drawn from the model's own distribution.</p>;
  }
  const chosen = rows.findIndex((row) => row.id === trace.id);
  const shown = rows.filter((_, i) => showsAll || i < NUM_SHOWN || i === chosen);
  const vocabulary = trace.steps[0]?.entered ?? 0;
  return (
    <div class="steps" tabIndex={0} role="region" aria-label="Candidates after each step">
      <table>
        <thead>
          <tr>
            <th scope="col">candidate</th>
            <th scope="col">
              <b>model</b>
              <small>{grouped(vocabulary)} tokens</small>
            </th>
            {trace.steps.map((step, i) => (
              <th scope="col" key={i}>
                <b>{step.name.replaceAll("_", " ")}</b>
                <small>{step.setting}</small>
                <small>{step.left < step.entered ? `${grouped(step.left)} left` : "cuts none"}</small>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => (
            <tr key={row.id} class={row.id === trace.id ? "chosen" : ""}>
              <th scope="row">
                <span class="piece">{visible(row.text)}</span>
                <small>{row.id}</small>
              </th>
              <td>
                <Bar p={row.cells.find((cell) => cell)?.before ?? 0} />
              </td>
              {trace.steps.map((_, i) => (
                <td key={i}>
                  <Cell row={row} step={i} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > shown.length && (
        <button type="button" class="small" onClick={() => setShowsAll(true)}>
          Show {rows.length - shown.length} more candidates
        </button>
      )}
    </div>
  );
}

function Cell({ row, step }: { row: Row; step: number }) {
  const cell = row.cells[step];
  if (cell?.cut) return <span class="cut">cut</span>;
  if (cell) return <Bar p={cell.after} />;
  const wasCut = row.cells.slice(0, step).some((earlier) => earlier?.cut);
  return (
    <span class="gone" aria-label={wasCut ? "cut before" : "not reported"}>
      {wasCut ? "" : "·"}
    </span>
  );
}

function Bar({ p }: { p: number }) {
  return (
    <span class="bar">
      <span class="fill" style={{ width: `${Math.max(100 * p, p > 0 ? 1 : 0)}%` }} />
      <span class="value">{percent(p)}</span>
    </span>
  );
}

function Draw({ trace }: { trace: TokenTrace }) {
  const { entrants, winner, runner_up: second } = trace.draw;
  if (entrants === 1 || second === null) {
    return (
      <p class="draw">
        One candidate was left, so there was nothing to draw: <b>{visible(winner.text)}</b>.
      </p>
    );
  }
  const longest = Math.max(winner.time, second.time);
  const runner = (name: string, one: Runner) => (
    <tr>
      <th scope="row">
        {name} <span class="piece">{visible(one.text)}</span>
      </th>
      <td>{percent(one.probability)}</td>
      <td>{one.u.toFixed(4)}</td>
      <td>
        <span class="bar time">
          <span class="fill" style={{ width: `${(100 * one.time) / longest}%` }} />
          <span class="value">{one.time.toPrecision(3)}</span>
        </span>
      </td>
    </tr>
  );
  return (
    <section>
      <h3>The draw</h3>
      <p class="hint">
        Each of {grouped(entrants)} candidates gets the time −ln(u) / p, where u depends on seed, position and token
        alone. The shortest time wins.
      </p>
      <table class="draw">
        <thead>
          <tr>
            <th scope="col">candidate</th>
            <th scope="col">p</th>
            <th scope="col">u</th>
            <th scope="col">time</th>
          </tr>
        </thead>
        <tbody>
          {runner("first", winner)}
          {runner("second", second)}
        </tbody>
      </table>
    </section>
  );
}

const SLIDERS = [
  { name: "temperature", minimum: 0, maximum: 2, step: 0.05 },
  { name: "top_k", minimum: 0, maximum: 100, step: 1 },
  { name: "typical_p", minimum: 0, maximum: 1, step: 0.01 },
  { name: "top_p", minimum: 0, maximum: 1, step: 0.01 },
  { name: "min_p", minimum: 0, maximum: 0.5, step: 0.01 },
] as const;

/** Sliders that compute the step with other settings, on the server. */
function WhatIf({ recording, token }: { recording: Recording; token: number }) {
  const [changes, setChanges] = useState<Record<string, number>>({});
  const { fields } = useApp();
  const reason = reasonForWholeReplay(recording);
  if (reason !== null) {
    return (
      <section>
        <h3>What if?</h3>
        <p class="hint">This step cannot be computed alone, because {reason}.</p>
      </section>
    );
  }
  const now = samplingOf(recording);
  const initial = (name: string) => Number(now[name] ?? fields[name]?.default ?? 0);
  return (
    <section class="what-if">
      <h3>What if?</h3>
      <p class="hint">The server computes this step again with other settings and the same random numbers.</p>
      {SLIDERS.map(({ name, minimum, maximum, step }) => (
        <div class="slider" key={name}>
          <label for={`what-if-${name}`}>
            <code>{name}</code>
          </label>
          <input
            id={`what-if-${name}`}
            type="range"
            min={minimum}
            max={maximum}
            step={step}
            value={changes[name] ?? initial(name)}
            onInput={(event) => setChanges({ ...changes, [name]: Number(event.currentTarget.value) })}
          />
          <output for={`what-if-${name}`}>{changes[name] ?? initial(name)}</output>
        </div>
      ))}
      {Object.keys(changes).length > 0 && (
        <>
          <button type="button" class="small" onClick={() => setChanges({})}>
            Back to the settings of the reply
          </button>
          <Outcome recording={recording} token={token} changes={changes} />
        </>
      )}
    </section>
  );
}

function Outcome({
  recording,
  token,
  changes,
}: {
  recording: Recording;
  token: number;
  changes: Record<string, number>;
}) {
  const replay = useLoaded(
    (signal) => replayStep(recording, token, changes, signal),
    [JSON.stringify(changes), token],
    250,
  );
  if (replay.kind === "loading")
    return (
      <p class="hint" role="status">
        Asking the server…
      </p>
    );
  if (replay.kind === "failed")
    return (
      <p class="failure" role="alert">
        {replay.message}
      </p>
    );
  const { trace } = replay.value;
  const before = recording.tokens[token];
  const isSame = trace.id === before?.id;
  return (
    <div class="outcome">
      <p role="status">
        The draw {isSame ? "would still choose" : "would choose"} <b class="piece">{visible(trace.text)}</b>
        {!isSame && before && (
          <>
            {" "}
            instead of <b class="piece">{visible(before.text)}</b>
          </>
        )}
        ; {grouped(trace.draw.entrants)} {trace.draw.entrants === 1 ? "candidate" : "candidates"} in the race.
      </p>
      <Steps trace={trace} />
    </div>
  );
}
