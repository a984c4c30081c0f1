// One message: its text, its branches and its actions.

import { useState } from "preact/hooks";
import { CopyButton } from "../markdown/markdown";
import { grouped, milliseconds } from "../parts/format";
import { Icon } from "../parts/icons";
import { memo } from "../parts/memo";
import { inspect, loadRecordings, regenerate, saveCurrent } from "../state/actions";
import { type Node, type Recording, choose, siblings } from "../state/conversation";
import { say } from "../state/generate";
import type { ColorMode } from "../state/settings";
import { set, state } from "../state/store";
import { ReplyText } from "./reply_text";

interface Props {
  node: Node;
  /** Changes with the node; messages are drawn again for no other reason. */
  version: number;
  colors: ColorMode;
  selected: number | null;
  isRunning: boolean;
  numSiblings: number;
}

export const Message = memo(function Message(props: Props) {
  return props.node.role === "user" ? <UserMessage {...props} /> : <Reply {...props} />;
});

function UserMessage({ node, isRunning }: Props) {
  const [isEditing, setEditing] = useState(false);
  if (isEditing) return <Editor node={node} onClose={() => setEditing(false)} />;
  return (
    <article class="message user" data-node={node.id} aria-label="Your message">
      <div class="bubble">{node.text}</div>
      <div class="actions">
        <Branches node={node} />
        <CopyButton text={node.text} label="Copy message" />
        <button type="button" class="small edit" title="Edit (e)" disabled={isRunning} onClick={() => setEditing(true)}>
          Edit
        </button>
      </div>
    </article>
  );
}

/** Edits a message. The changed one becomes a branch beside it. */
function Editor({ node, onClose }: { node: Node; onClose: () => void }) {
  const [text, setText] = useState(node.text);
  const send = () => {
    onClose();
    void say(text, node.parent);
  };
  return (
    <article class="message user editing">
      <textarea
        aria-label="Edit message"
        value={text}
        rows={Math.min(12, text.split("\n").length + 1)}
        ref={(element) => element?.focus()}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") onClose();
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
          event.stopPropagation();
        }}
      />
      <div class="actions shown">
        <button type="button" class="small" onClick={onClose}>
          Cancel
        </button>
        <button type="button" class="small primary" disabled={text.trim() === ""} onClick={send}>
          Send as a branch
        </button>
      </div>
    </article>
  );
}

function Reply({ node, colors, selected, isRunning }: Props) {
  const recording = state.recordings.get(node.id);
  const open = (event: MouseEvent) => {
    const token = (event.target as Element).closest<HTMLElement>("[data-token]");
    const isLink = (event.target as Element).closest("a, button, summary") !== null;
    if (token && !isLink && getSelection()?.isCollapsed !== false) inspect(node.id, Number(token.dataset["token"]));
  };
  return (
    <article
      class={`message reply ${node.state}`}
      data-node={node.id}
      aria-label="Reply"
      aria-busy={node.state === "running"}
    >
      {node.thoughts !== "" && (
        <details class="folded">
          <summary>Thoughts</summary>
          <div class="thoughts">{node.thoughts}</div>
        </details>
      )}
      {/* Keys reach every token too: the arrows move through them while the inspector is open. */}
      <div class="reply-text" onClick={open}>
        <ReplyText node={node} recording={recording} colors={colors} selected={selected} />
        {node.state === "running" && <span class="cursor" aria-hidden="true" />}
      </div>
      {node.calls.map((call, i) => (
        <details class="folded" key={i}>
          <summary>
            Call of the tool <code>{call.function?.name}</code>
          </summary>
          <pre tabIndex={0}>{call.function?.arguments}</pre>
        </details>
      ))}
      {node.error !== null && (
        <p class="failure" role="alert">
          {node.error}
        </p>
      )}
      <Footer node={node} recording={recording} isRunning={isRunning} />
    </article>
  );
}

function Footer({ node, recording, isRunning }: { node: Node; recording: Recording | undefined; isRunning: boolean }) {
  if (node.state === "running") return <p class="facts">{liveFacts(recording)}</p>;
  const others = siblings(state.current, node.parent).filter((other) => other.role === "assistant" && other !== node);
  const compare = () => set({ compared: [others.at(-1)!.id, node.id] });
  return (
    <>
      <p class="facts">{facts(node, recording)}</p>
      <div class="actions">
        <Branches node={node} />
        <CopyButton text={node.text} label="Copy reply" />
        <button type="button" class="small" disabled={isRunning} onClick={() => regenerate(node)}>
          {node.state === "failed" ? "Try again" : "Regenerate"}
        </button>
        {recording && (
          <button type="button" class="small see" onClick={() => inspect(node.id, state.inspected?.token ?? 0)}>
            <Icon name="lens" /> See through it
          </button>
        )}
        {others.length > 0 && (
          <button type="button" class="small" onClick={compare}>
            Compare
          </button>
        )}
      </div>
    </>
  );
}

function Branches({ node }: { node: Node }) {
  const all = siblings(state.current, node.parent).filter((other) => other.role === node.role);
  if (all.length < 2) return null;
  const index = all.indexOf(node);
  const move = (by: number) => {
    const other = all[index + by];
    if (!other) return;
    choose(state.current, other);
    saveCurrent();
    void loadRecordings(state.current);
  };
  return (
    <span class="branches" role="group" aria-label="Branches">
      <button type="button" class="small" aria-label="Previous branch" disabled={index === 0} onClick={() => move(-1)}>
        <Icon name="left" />
      </button>
      <span>
        {index + 1}/{all.length}
      </span>
      <button
        type="button"
        class="small"
        aria-label="Next branch"
        disabled={index === all.length - 1}
        onClick={() => move(1)}
      >
        <Icon name="right" />
      </button>
    </span>
  );
}

const ENDINGS: Record<string, string> = {
  length: "reached the maximum length",
  repetition: "ended because it repeated itself",
  content_filter: "ended by a guard of the server",
  tool_calls: "calls a tool",
};

function facts(node: Node, recording: Recording | undefined): string {
  const parts: string[] = [];
  const { usage, pellucid } = recording ?? {};
  if (usage) parts.push(`${grouped(usage.completion_tokens)} tokens`);
  const perToken = pellucid?.timings.time_per_output_token_ms;
  if (perToken) parts.push(`${(1000 / perToken).toFixed(1)} tokens/s`);
  if (pellucid) parts.push(`first after ${milliseconds(pellucid.timings.time_to_first_token_ms)}`);
  if (usage && pellucid)
    parts.push(`${grouped(pellucid.cached_tokens)} of ${grouped(usage.prompt_tokens)} prompt tokens cached`);
  if (node.state === "stopped") parts.push("stopped by you");
  const ending = ENDINGS[node.finish ?? ""];
  if (ending) parts.push(ending);
  return parts.join(" · ");
}

function liveFacts(recording: Recording | undefined): string {
  const count = (recording?.tokens.length ?? 0) - (recording?.inherited ?? 0);
  if (!recording || count === 0) return "waiting for the first token";
  const seconds = ((recording.tokens.at(-1)?.at ?? 0) - (recording.firstAt ?? 0)) / 1000;
  const speed = seconds > 0 ? ` · ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${grouped(count)} tokens${speed}`;
}
