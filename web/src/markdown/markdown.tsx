// Draws Markdown as elements. Nothing is ever parsed as HTML, so a reply cannot bring elements of its own.

import { createContext, type ComponentChildren } from "preact";
import { memo } from "../parts/memo";
import { useContext, useMemo, useState } from "preact/hooks";
import { type Block, linesOf, parseBlocks, sections } from "./blocks";
import { Formula } from "./formula";
import { highlight } from "./highlight";
import type { Inline } from "./inline";
import { type Leaf, Source } from "./source";

/** Draws the characters of a leaf; the chat splits them into tokens. */
export type DrawLeaf = (leaf: Leaf) => ComponentChildren;
export const LeafContext = createContext<DrawLeaf>((leaf) => leaf.text);

interface Props {
  text: string;
  /** Changes if the characters from `start` to `end` look different. */
  lookOf?: (start: number, end: number) => string;
}

export function Markdown({ text, lookOf }: Props) {
  return (
    <div class="markdown">
      {sections(text).map(({ text: part, at }) => (
        <Section key={at} text={part} at={at} look={lookOf?.(at, at + part.length) ?? ""} />
      ))}
    </div>
  );
}

/** A section is drawn again only if its text or the look of its tokens has changed. */
const Section = memo(function Section({ text, at }: { text: string; at: number; look: string }) {
  const blocks = useMemo(() => parseBlocks(linesOf(text, at)), [text, at]);
  return <Blocks blocks={blocks} />;
});

function Blocks({ blocks }: { blocks: Block[] }) {
  return (
    <>
      {blocks.map((block, i) => (
        <BlockView key={i} block={block} />
      ))}
    </>
  );
}

function BlockView({ block }: { block: Block }) {
  switch (block.kind) {
    case "paragraph":
      return (
        <p>
          <Inlines inlines={block.inlines} />
        </p>
      );
    case "heading": {
      // The page itself has the first two levels.
      const Heading = `h${Math.min(6, block.level + 2)}` as "h3";
      return (
        <Heading class={`level${block.level}`}>
          <Inlines inlines={block.inlines} />
        </Heading>
      );
    }
    case "rule":
      return <hr />;
    case "quote":
      return (
        <blockquote>
          <Blocks blocks={block.blocks} />
        </blockquote>
      );
    case "list": {
      const items = block.items.map((item, i) => (
        <li key={i}>
          <Item blocks={item} />
        </li>
      ));
      return block.start === null ? <ul>{items}</ul> : <ol start={block.start}>{items}</ol>;
    }
    case "table":
      return <Table block={block} />;
    case "math":
      return (
        <div class="formula" tabIndex={0}>
          <Formula tex={block.lines.map((line) => line.text).join("\n")} isDisplay>
            <Leaves source={Source.join(block.lines)} />
          </Formula>
        </div>
      );
    case "code":
      return <Code language={block.language} lines={block.lines} />;
  }
}

/** An item with one paragraph has no margins. */
function Item({ blocks }: { blocks: Block[] }) {
  const [first, ...rest] = blocks;
  if (first?.kind !== "paragraph") return <Blocks blocks={blocks} />;
  return (
    <>
      <Inlines inlines={first.inlines} />
      <Blocks blocks={rest} />
    </>
  );
}

function Table({ block }: { block: Extract<Block, { kind: "table" }> }) {
  const align = (i: number) => `align-${block.alignment[i] ?? "start"}`;
  return (
    <div class="table" tabIndex={0}>
      <table>
        <thead>
          <tr>
            {block.header.map((cell, i) => (
              <th key={i} class={align(i)}>
                <Inlines inlines={cell} />
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {block.rows.map((row, i) => (
            <tr key={i}>
              {row.map((cell, j) => (
                <td key={j} class={align(j)}>
                  <Inlines inlines={cell} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Inlines({ inlines }: { inlines: Inline[] }) {
  const draw = useContext(LeafContext);
  return (
    <>
      {inlines.map((inline, i) => (
        <InlineView key={i} inline={inline} draw={draw} />
      ))}
    </>
  );
}

function InlineView({ inline, draw }: { inline: Inline; draw: DrawLeaf }) {
  switch (inline.kind) {
    case "text":
      return <>{inline.leaves.map(draw)}</>;
    case "code":
      return <code>{inline.leaves.map(draw)}</code>;
    case "math":
      return (
        <Formula tex={inline.leaves.map((leaf) => leaf.text).join("")} isDisplay={false}>
          {inline.leaves.map(draw)}
        </Formula>
      );
    case "break":
      return <br />;
    case "strong":
      return (
        <strong>
          <Inlines inlines={inline.children} />
        </strong>
      );
    case "emphasis":
      return (
        <em>
          <Inlines inlines={inline.children} />
        </em>
      );
    case "deleted":
      return (
        <del>
          <Inlines inlines={inline.children} />
        </del>
      );
    case "link":
      return (
        <a href={inline.href} target="_blank" rel="noopener noreferrer nofollow" title={inline.href}>
          <Inlines inlines={inline.children} />
          {hidesHost(inline) && <small class="host"> ({new URL(inline.href).host || "mail"})</small>}
        </a>
      );
  }
}

/** Whether the text of a link does not say where it leads. */
function hidesHost({ href, children }: Extract<Inline, { kind: "link" }>): boolean {
  const first = children[0];
  const text = first?.kind === "text" && children.length === 1 ? first.leaves.map((leaf) => leaf.text).join("") : "";
  return !text.startsWith(`${new URL(href).protocol}//${new URL(href).host}`);
}

function Leaves({ source }: { source: Source }) {
  const draw = useContext(LeafContext);
  return <>{source.runs().map(draw)}</>;
}

function Code({ language, lines }: { language: string; lines: Source[] }) {
  const source = useMemo(() => Source.join(lines), [lines]);
  const pieces = useMemo(() => highlight(source.text, language), [source, language]);
  let start = 0;
  return (
    <figure class="code">
      <figcaption>
        <span>{language || "text"}</span>
        <CopyButton text={source.text} label="Copy code" />
      </figcaption>
      <pre tabIndex={0}>
        <code>
          {pieces.map((piece, i) => {
            const part = source.slice(start, start + piece.text.length);
            start += piece.text.length;
            return piece.kind === "plain" ? (
              <Leaves key={i} source={part} />
            ) : (
              <span key={i} class={`code-${piece.kind}`}>
                <Leaves source={part} />
              </span>
            );
          })}
        </code>
      </pre>
    </figure>
  );
}

export function CopyButton({ text, label }: { text: string; label: string }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button type="button" class="small" aria-label={label} onClick={() => void copy()}>
      {isCopied ? "Copied" : "Copy"}
    </button>
  );
}
