// The text of a reply, cut into tokens that can be clicked: as Markdown, or raw with every character visible.

import { useCallback, useMemo, useRef } from "preact/hooks";
import { LeafContext, Markdown } from "../markdown/markdown";
import type { Leaf } from "../markdown/source";
import { memo } from "../parts/memo";
import type { Node, Recording } from "../state/conversation";
import type { ColorMode } from "../state/settings";
import { tokenAt, tokenClass, tokenStarts } from "./tokens";

interface Props {
  node: Node;
  recording: Recording | undefined;
  colors: ColorMode;
  selected: number | null;
}

export function ReplyText({ node, recording, colors, selected }: Props) {
  if (!recording || recording.tokens.length === 0) return <Markdown text={node.text} />;
  if (colors === "off") return <ClickableMarkdown node={node} recording={recording} selected={selected} />;
  return <RawTokens recording={recording} colors={colors} selected={selected} />;
}

type ClickableProps = { node: Node; recording: Recording; selected: number | null };

function ClickableMarkdown({ node, recording, selected }: ClickableProps) {
  const starts = useMemo(() => tokenStarts(recording.tokens, node.text), [recording, node.text]);
  // The function that draws stays the same, so that sections whose look does not change are not drawn again.
  const latest = useRef({ starts, selected });
  latest.current = { starts, selected };
  const draw = useCallback((leaf: Leaf) => spansOf(leaf, latest.current.starts, latest.current.selected), []);
  const selectedAt = selected === null ? -1 : (starts[selected] ?? -1);
  const lookOf = (start: number, end: number) => (selectedAt >= start && selectedAt < end ? `${selected}` : "");
  return (
    <LeafContext.Provider value={draw}>
      <Markdown text={node.text} lookOf={lookOf} />
    </LeafContext.Provider>
  );
}

/** Cuts a leaf at the beginnings of tokens. */
function spansOf(leaf: Leaf, starts: readonly number[], selected: number | null) {
  if (leaf.at < 0) return leaf.text;
  const spans = [];
  const end = leaf.at + leaf.text.length;
  for (let from = leaf.at; from < end;) {
    const index = tokenAt(starts, from);
    const isLast = index >= starts.length - 2;
    const to = isLast ? end : Math.min(end, Math.max(from + 1, starts[index + 1] ?? end));
    const text = leaf.text.slice(from - leaf.at, to - leaf.at);
    spans.push(
      <span key={from} data-token={index} class={index === selected ? "token selected" : "token"}>
        {text}
      </span>,
    );
    from = to;
  }
  return spans;
}

const GROUP = 64;

/** Tokens as they are, in groups that are drawn again only if one of their tokens has changed. */
function RawTokens({
  recording,
  colors,
  selected,
}: {
  recording: Recording;
  colors: ColorMode;
  selected: number | null;
}) {
  const { tokens } = recording;
  const groups = [];
  for (let start = 0; start < tokens.length; start += GROUP) {
    const end = Math.min(tokens.length, start + GROUP);
    const own = selected !== null && selected >= start && selected < end ? selected : null;
    const version = `${end}${colors === "gap" || colors === "proposal" ? tokens.length + (recording.endAt ?? 0) : ""}`;
    groups.push(
      <Group
        key={start}
        recording={recording}
        start={start}
        end={end}
        colors={colors}
        selected={own}
        version={version}
      />,
    );
  }
  return <div class="raw-tokens">{groups}</div>;
}

interface GroupProps {
  recording: Recording;
  start: number;
  end: number;
  colors: ColorMode;
  selected: number | null;
  version: string;
}

const Group = memo(function Group({ recording, start, end, colors, selected, version }: GroupProps) {
  return useMemo(
    () => (
      <>
        {recording.tokens.slice(start, end).map((token, i) => {
          const index = start + i;
          const look = `token ${tokenClass(recording, index, colors)}${index === selected ? " selected" : ""}`;
          return (
            <span key={index} data-token={index} class={look}>
              {rawText(token.text)}
            </span>
          );
        })}
      </>
    ),
    [recording, start, end, colors, selected, version],
  );
});

function rawText(text: string): string {
  return text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}
