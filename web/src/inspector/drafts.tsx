// Speculation: tokens that drafters proposed, and whether the model chose them as well.

import { grouped, visible } from "../parts/format";
import { positionIn } from "../chat/tokens";
import { setSettings, useApp } from "../state/store";
import type { PanelProps } from "./inspector";

const DRAFTERS: Record<string, string> = {
  draft: "a smaller model",
  mtp: "a layer of the model itself, trained to guess further tokens",
  ngram: "earlier text with the same last tokens",
  suffix: "text of earlier replies",
  prediction: "the prediction of the request",
  custom: "a drafter of the program",
};

export function DraftsPanel({ recording, token }: PanelProps) {
  const { settings } = useApp();
  const speculation = recording.pellucid?.speculation;
  if (!speculation) return <p class="hint">The server tells the number of drafted tokens at the end of the reply.</p>;
  const trace = token === null ? undefined : recording.traces[positionIn(recording, token)];
  const hasTraces = Object.keys(recording.traces).length > 0;
  return (
    <>
      {speculation.drafted === 0 &&
        (speculation.note ? (
          <p>No tokens were drafted: {speculation.note}.</p>
        ) : (
          <p>
            No tokens were drafted for this reply. With <code>pellucid serve --speculate ngram</code> the server guesses
            from earlier text.
          </p>
        ))}
      {speculation.drafted > 0 && (
        <table class="counts">
          <thead>
            <tr>
              <th scope="col">drafter</th>
              <th scope="col">proposed</th>
              <th scope="col">accepted</th>
              <th scope="col">share</th>
            </tr>
          </thead>
          <tbody>
            {Object.entries(speculation.drafters).map(([name, counts]) => (
              <tr key={name}>
                <th scope="row">
                  {name}
                  <small>{DRAFTERS[name] ?? ""}</small>
                </th>
                <td>{grouped(counts.drafted)}</td>
                <td>{grouped(counts.accepted)}</td>
                <td>
                  <span class="bar">
                    <span class="fill" style={{ width: `${(100 * counts.accepted) / Math.max(1, counts.drafted)}%` }} />
                    <span class="value">{Math.round((100 * counts.accepted) / Math.max(1, counts.drafted))} %</span>
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {trace && !trace.proposal && <p>Nothing was proposed for this token.</p>}
      {trace?.proposal && (
        <p>
          For this token <b>{trace.proposal.drafter}</b>
          {DRAFTERS[trace.proposal.drafter] && ` (${DRAFTERS[trace.proposal.drafter]})`} proposed{" "}
          <b class="piece">{visible(trace.proposal.text)}</b>, and the model{" "}
          {trace.proposal.accepted ? "chose it as well" : "chose another"}.
        </p>
      )}
      {hasTraces ? (
        <button type="button" class="small" onClick={() => setSettings({ colors: "proposal" })}>
          Color the text by drafts
        </button>
      ) : (
        <p class="hint">
          Who proposed each token is known only for replies whose steps were recorded.{" "}
          {!settings.recordsTraces && (
            <button type="button" class="small" onClick={() => setSettings({ recordsTraces: true })}>
              Record the steps from now on
            </button>
          )}
        </p>
      )}
      <p class="hint">The reply is the same with and without drafts; they change how fast it comes.</p>
    </>
  );
}
