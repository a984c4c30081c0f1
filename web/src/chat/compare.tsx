// Two branches side by side, with the first token at which they differ; the first character, if the tokens of one were
// not recorded.

import { useEffect } from "preact/hooks";
import { Dialog } from "../parts/dialog";
import { percent, plural, visible } from "../parts/format";
import { loadRecording } from "../state/actions";
import { siblings } from "../state/conversation";
import { set, useApp } from "../state/store";
import { heat } from "./tokens";

export function Compare() {
  const { compared, current, recordings } = useApp();
  useEffect(() => compared?.forEach((id) => void loadRecording(id)), [compared]);
  if (!compared) return null;
  const nodes = compared.map((id) => current.nodes[id]).filter((node) => node !== undefined);
  const [left, right] = nodes;
  if (!left || !right) return null;
  const replies = siblings(current, left.parent).filter((node) => node.role === "assistant");
  const tokens = [left, right].map((node) => recordings.get(node.id)?.tokens ?? []);
  const isRecorded = tokens.every((all) => all.length > 0);
  const unit = isRecorded ? "token" : "character";
  const [a = [], b = []] = isRecorded
    ? tokens.map((all) => all.map((token) => token.text))
    : [[...left.text], [...right.text]];
  let first = 0;
  while (first < a.length && a[first] === b[first]) first++;
  const isEqual = first === a.length && first === b.length;
  return (
    <Dialog title="Two branches" class="compare" onClose={() => set({ compared: null })}>
      <p>
        {isEqual ? (
          `Both replies are equal, ${unit} by ${unit}.`
        ) : (
          <>
            {first === 0
              ? "They differ from the start."
              : `The first ${plural(first, unit)} ${first === 1 ? "is" : "are"} equal.`}{" "}
            One side goes on with <Next text={a[first]} />, the other with <Next text={b[first]} />.
          </>
        )}
      </p>
      <div class="columns">
        {[left, right].map((node, side) => (
          <section key={side} aria-label={`Branch ${side + 1}`}>
            <select
              aria-label={`Branch on the ${side === 0 ? "left" : "right"}`}
              value={node.id}
              onChange={(event) =>
                set({
                  compared: side === 0 ? [event.currentTarget.value, right.id] : [left.id, event.currentTarget.value],
                })
              }
            >
              {replies.map((reply, i) => (
                <option key={reply.id} value={reply.id}>
                  Branch {i + 1}
                </option>
              ))}
            </select>
            <div class="raw-tokens">
              {(side === 0 ? a : b).map((text, i) => {
                const p = isRecorded ? Math.exp(tokens[side]![i]!.logprob) : null;
                const rest = p === null ? "token" : `token heat-${heat(p)}`;
                const look = i < first ? "token" : i === first ? "token difference" : rest;
                return (
                  <span key={i} class={look} title={p === null ? undefined : percent(p)}>
                    {text}
                  </span>
                );
              })}
            </div>
          </section>
        ))}
      </div>
    </Dialog>
  );
}

function Next({ text }: { text: string | undefined }) {
  return text === undefined ? <i>the end</i> : <b class="piece">{visible(text)}</b>;
}
