// A card with the alternatives of the token under the pointer.

import { useEffect, useState } from "preact/hooks";
import { percent, visible } from "../parts/format";
import { state } from "../state/store";

interface Hovered {
  node: string;
  token: number;
  left: number;
  top: number;
}

export function HoverCard() {
  const [hovered, setHovered] = useState<Hovered | null>(null);
  useEffect(() => {
    const move = (event: PointerEvent) => {
      if (event.pointerType !== "mouse") return;
      const token = (event.target as Element).closest?.<HTMLElement>(".raw-tokens [data-token]");
      const node = token?.closest<HTMLElement>("[data-node]")?.dataset["node"];
      if (!token || !node) return setHovered(null);
      const box = token.getBoundingClientRect();
      setHovered({
        node,
        token: Number(token.dataset["token"]),
        left: Math.min(box.left, innerWidth - 240),
        top: box.bottom + 6,
      });
    };
    document.addEventListener("pointerover", move);
    return () => document.removeEventListener("pointerover", move);
  }, []);
  const token = hovered ? state.recordings.get(hovered.node)?.tokens[hovered.token] : undefined;
  if (!hovered || !token) return null;
  const isListed = token.top.some((one) => one.id === token.id);
  const rows = [...token.top.slice(0, isListed ? 6 : 5), ...(isListed ? [] : [token])];
  const isLow = hovered.top > innerHeight - 210;
  return (
    <div
      class="hover-card"
      aria-hidden="true"
      style={{ left: `${hovered.left}px`, top: `${isLow ? hovered.top - 230 : hovered.top}px` }}
    >
      {rows.map((one) => (
        <div key={one.id} class={one.id === token.id ? "chosen" : ""}>
          <span class="piece">{visible(one.text)}</span>
          <span class="bar">
            <span class="fill" style={{ width: `${Math.max(1, 100 * Math.exp(one.logprob))}%` }} />
            <span class="value">{percent(Math.exp(one.logprob))}</span>
          </span>
        </div>
      ))}
    </div>
  );
}
