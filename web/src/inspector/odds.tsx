// Probabilities of a reply's tokens, and branches from tokens that were not chosen.

import { tokenize } from "../api/client";
import { percent, visible } from "../parts/format";
import { branch, inspect } from "../state/actions";
import type { Node, Recording, Token } from "../state/conversation";
import { notify, set, setSettings, useApp } from "../state/store";
import { heat } from "../chat/tokens";
import type { PanelProps } from "./inspector";

export function OddsPanel({ node, recording, token }: PanelProps) {
  const { settings } = useApp();
  const { tokens } = recording;
  if (tokens.length === 0) return <p class="hint">No probabilities were recorded for this reply.</p>;
  const own = tokens.slice(recording.inherited);
  const mean = own.reduce((sum, one) => sum + one.logprob, 0) / Math.max(1, own.length);
  const chosen = token === null ? undefined : tokens[token];
  return (
    <>
      <ProbabilityChart node={node} recording={recording} token={token} />
      <p class="hint">
        Perplexity of the reply {Math.exp(-mean).toFixed(2)}: on average the model was as unsure as between that number
        of equal choices. These are the model's own probabilities, before the sampler.
      </p>
      {settings.colors !== "probability" && (
        <button type="button" class="small" onClick={() => setSettings({ colors: "probability" })}>
          Color the text by probability
        </button>
      )}
      {chosen && token !== null && <Alternatives node={node} recording={recording} token={token} chosen={chosen} />}
    </>
  );
}

function ProbabilityChart({ node, recording, token }: PanelProps) {
  const { tokens } = recording;
  const width = Math.max(2, Math.min(12, 480 / tokens.length));
  const pick = (event: MouseEvent) => {
    const bar = (event.target as Element).closest<SVGElement>("[data-token]");
    if (bar) inspect(node.id, Number(bar.dataset["token"]));
  };
  return (
    <figure class="chart">
      <div class="scroll" tabIndex={0} role="region" aria-label="Probability of each token">
        <svg
          width={width * tokens.length}
          height={90}
          role="img"
          aria-label={`Probabilities of ${tokens.length} tokens`}
          onClick={pick}
        >
          {tokens.map((one, i) => {
            const p = Math.exp(one.logprob);
            const height = Math.max(1, 84 * p);
            return (
              <g key={i} data-token={i} class={i === token ? "selected" : ""}>
                <rect class="hit" x={i * width} y={0} width={width} height={90} />
                <rect
                  class={`heat-fill-${heat(p)}`}
                  x={i * width}
                  y={88 - height}
                  width={Math.max(1, width - 1)}
                  height={height}
                />
              </g>
            );
          })}
        </svg>
      </div>
      <figcaption>Each bar is a token of the reply; its height is the probability.</figcaption>
    </figure>
  );
}

interface AlternativesProps {
  node: Node;
  recording: Recording;
  token: number;
  chosen: Token;
}

function Alternatives({ node, recording, token, chosen }: AlternativesProps) {
  const { running } = useApp();
  const isListed = chosen.top.some((one) => one.id === chosen.id);
  const rows = isListed ? chosen.top : [...chosen.top, chosen];
  const obstacle = obstacleTo(node, recording);
  return (
    <section>
      <h3>At this position</h3>
      <table class="alternatives">
        <thead>
          <tr>
            <th scope="col">token</th>
            <th scope="col">probability</th>
            <th scope="col">
              <span class="unseen">branch</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map((one) => {
            const p = Math.exp(one.logprob);
            const isChosen = one.id === chosen.id;
            const isText = !one.text.startsWith("bytes:\\x");
            return (
              <tr key={one.id} class={isChosen ? "chosen" : ""}>
                <th scope="row">
                  <span class="piece">{visible(one.text)}</span>
                  <small>{one.id}</small>
                </th>
                <td>
                  <span class="bar">
                    <span class="fill" style={{ width: `${Math.max(1, 100 * p)}%` }} />
                    <span class="value">{percent(p)}</span>
                  </span>
                </td>
                <td>
                  {isChosen
                    ? "chosen"
                    : obstacle === null &&
                      isText && (
                        <button
                          type="button"
                          class="small"
                          disabled={running !== null}
                          aria-label={`Continue with it: ${visible(one.text)}`}
                          onClick={() => void branchAt(node, recording, token, one)}
                        >
                          Continue with it
                        </button>
                      )}
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
      <p class="hint">
        {obstacle ??
          "“Continue with it” asks the model for the rest of the reply after that token. The text before comes from the prefix cache."}
      </p>
    </section>
  );
}

/** Returns why a branch cannot begin within this reply. */
function obstacleTo(node: Node, recording: Recording): string | null {
  if (node.state === "running") return "Branches can begin when the reply is complete.";
  if (recording.request["response_format"]) return "A reply that follows a schema cannot be continued in its middle.";
  if (node.calls.length > 0) return "A reply that calls tools cannot be continued in its middle.";
  return null;
}

/** Continues the reply with another token. A control token has no text that would be read as one. */
async function branchAt(node: Node, recording: Recording, token: number, other: Token["top"][number]): Promise<void> {
  if (/^(<.+>|\[.+\])$/s.test(other.text)) {
    const body = { model: recording.request["model"], prompt: other.text, add_special_tokens: false };
    const { tokens } = await tokenize(body);
    if (tokens.length !== 1) return notify("This is a control token: the text of a message cannot contain it.");
  }
  const before = recording.tokens.slice(0, token);
  const bytes = [...new TextEncoder().encode(other.text)];
  const given: Token = { ...recording.tokens[token]!, id: other.id, text: other.text, bytes, logprob: other.logprob };
  const text = new TextDecoder().decode(new Uint8Array(before.flatMap((one) => one.bytes))) + other.text;
  // A narrow window shows the inspector over the messages, where the branch appears.
  if (matchMedia("(max-width: 56rem)").matches) set({ inspected: null, walk: null });
  branch(node, { text, tokens: [...before, given].map((one) => ({ ...one, at: 0 })) });
}
