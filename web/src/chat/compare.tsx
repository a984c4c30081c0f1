// Two branches side by side, with the first token at which they differ.

import { Dialog } from "../parts/dialog";
import { percent, visible } from "../parts/format";
import { siblings } from "../state/conversation";
import { set, useApp } from "../state/store";
import { heat } from "./tokens";

export function Compare() {
  const { compared, current, recordings } = useApp();
  if (!compared) return null;
  const nodes = compared.map((id) => current.nodes[id]).filter((node) => node !== undefined);
  const [left, right] = nodes;
  if (!left || !right) return null;
  const replies = siblings(current, left.parent).filter((node) => node.role === "assistant");
  const texts = (id: string, text: string) => recordings.get(id)?.tokens.map((token) => token.text) ?? [...text];
  const [a, b] = [texts(left.id, left.text), texts(right.id, right.text)];
  let first = 0;
  while (first < a.length && a[first] === b[first]) first++;
  const isEqual = first === a.length && first === b.length;
  return (
    <Dialog title="Two branches" class="compare" onClose={() => set({ compared: null })}>
      <p>
        {isEqual ? (
          "Both replies are equal, token by token."
        ) : (
          <>
            The first {first} tokens are equal. Then one has <b class="piece">{visible(a[first] ?? "")}</b>, the other{" "}
            <b class="piece">{visible(b[first] ?? "")}</b>.
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
              {texts(node.id, node.text).map((text, i) => {
                const p = Math.exp(recordings.get(node.id)?.tokens[i]?.logprob ?? 0);
                const look = i < first ? "token" : i === first ? "token difference" : `token heat-${heat(p)}`;
                return (
                  <span key={i} class={look} title={percent(p)}>
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
