// The inspector: what happened at one token of a reply, in one tab for each part of inference.

import { useEffect, useRef } from "preact/hooks";
import { percent, visible } from "../parts/format";
import { Icon } from "../parts/icons";
import { inspect, moveToken } from "../state/actions";
import type { Node, Recording } from "../state/conversation";
import { TABS, type Tab, set, useApp } from "../state/store";
import { BeamsPanel } from "./beams";
import { CachePanel } from "./cache";
import { ChoicePanel } from "./choice";
import { DraftsPanel } from "./drafts";
import { InsidePanel } from "./inside";
import { OddsPanel } from "./odds";
import { RequestPanel } from "./request";
import { TimePanel } from "./time";
import { TokensPanel } from "./tokens";
import { Walk } from "./walk";

/** One sentence for each tab. */
const CAPTIONS: Record<Tab, [string, string]> = {
  tokens: [
    "Tokens",
    "The model reads no letters: the tokenizer cuts your text, and what the model's template adds, into numbered pieces.",
  ],
  choice: ["Choice", "Each step of the sampler changes or cuts the model's probabilities; the last one draws a token."],
  odds: ["Odds", "The probability that the model gave each token, and the tokens it might have written instead."],
  inside: [
    "Inside",
    "Each layer refines a guess of the next token, and attention decides which earlier tokens it looks at.",
  ],
  cache: ["Cache", "Keys and values of earlier tokens are kept in blocks, so that each step computes new tokens only."],
  time: [
    "Time",
    "Where the time went: waiting, prefill of the prompt, then a step for each token, or for several where drafts are right.",
  ],
  drafts: [
    "Drafts",
    "A drafter guesses several tokens ahead; the model checks them in one step and keeps what it would have chosen.",
  ],
  beams: ["Beams", "Beam search keeps the most probable continuations side by side instead of drawing one."],
  request: [
    "Request",
    "What was sent, and every setting that was in effect: the same request to the same server gives the same bytes.",
  ],
};

export interface PanelProps {
  node: Node;
  recording: Recording;
  token: number | null;
}

export function Inspector() {
  const { inspected, current, recordings, tab, walk } = useApp();
  const heading = useRef<HTMLHeadingElement>(null);
  const node = inspected ? current.nodes[inspected.node] : undefined;
  const recording = inspected ? recordings.get(inspected.node) : undefined;
  const id = inspected?.node;
  const body = useRef<HTMLDivElement>(null);
  useEffect(() => heading.current?.focus({ preventScroll: true }), [id]);
  // Another tab, or a station of the walk, begins at its top.
  useEffect(() => void body.current?.scrollTo(0, 0), [tab, walk]);
  if (!inspected || !node || !recording) return null;
  const props: PanelProps = { node, recording, token: inspected.token };
  return (
    <aside class="inspector" aria-label="Inspector">
      <header>
        <h2 tabIndex={-1} ref={heading}>
          See through it
        </h2>
        <TokenSwitch {...props} />
        <button
          type="button"
          class="icon-button"
          aria-label="Close the inspector"
          onClick={() => set({ inspected: null, walk: null })}
        >
          <Icon name="close" />
        </button>
      </header>
      <Tabs tab={tab} />
      <div
        class="panel-body"
        role="tabpanel"
        id="inspector-panel"
        aria-labelledby={`tab-${tab}`}
        tabIndex={0}
        ref={body}
      >
        {walk !== null && <Walk station={walk} />}
        <p class="caption">{CAPTIONS[tab][1]}</p>
        <Panel tab={tab} {...props} />
      </div>
    </aside>
  );
}

function Panel({ tab, ...props }: PanelProps & { tab: Tab }) {
  switch (tab) {
    case "tokens":
      return <TokensPanel {...props} />;
    case "choice":
      return <ChoicePanel {...props} />;
    case "odds":
      return <OddsPanel {...props} />;
    case "inside":
      return <InsidePanel {...props} />;
    case "cache":
      return <CachePanel {...props} />;
    case "time":
      return <TimePanel {...props} />;
    case "drafts":
      return <DraftsPanel {...props} />;
    case "beams":
      return <BeamsPanel key={props.node.id} {...props} />;
    case "request":
      return <RequestPanel {...props} />;
  }
}

function Tabs({ tab }: { tab: Tab }) {
  const move = (event: KeyboardEvent) => {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (by === 0) return;
    event.stopPropagation();
    const next = TABS[(TABS.indexOf(tab) + by + TABS.length) % TABS.length]!;
    set({ tab: next });
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="Parts of inference" onKeyDown={move}>
      {TABS.map((name) => (
        <button
          key={name}
          type="button"
          role="tab"
          id={`tab-${name}`}
          aria-controls="inspector-panel"
          aria-selected={name === tab}
          tabIndex={name === tab ? 0 : -1}
          onClick={() => set({ tab: name })}
        >
          {CAPTIONS[name][0]}
        </button>
      ))}
    </div>
  );
}

/** The token that is inspected, with buttons to its neighbors. */
function TokenSwitch({ node, recording, token }: PanelProps) {
  const chosen = token === null ? undefined : recording.tokens[token];
  if (!chosen || token === null) {
    return recording.tokens.length > 0 ? (
      <button type="button" class="small" onClick={() => inspect(node.id, 0)}>
        Choose a token
      </button>
    ) : (
      <span class="hint">no tokens recorded</span>
    );
  }
  return (
    <div class="token-switch">
      <button
        type="button"
        class="small"
        aria-label="Previous token"
        disabled={token === 0}
        onClick={() => moveToken(-1)}
      >
        <Icon name="left" />
      </button>
      <span class="token-name" aria-live="polite">
        <b>{visible(chosen.text)}</b> {token + 1} of {recording.tokens.length} · {percent(Math.exp(chosen.logprob))}
      </span>
      <button
        type="button"
        class="small"
        aria-label="Next token"
        disabled={token === recording.tokens.length - 1}
        onClick={() => moveToken(1)}
      >
        <Icon name="right" />
      </button>
    </div>
  );
}
