// Markdown blocks: headings, lists, quotes, code, tables, math. HTML blocks are paragraphs of text.

import { type Inline, parseInline } from "./inline";
import { Source } from "./source";

export type Block =
  | { kind: "paragraph"; inlines: Inline[] }
  | { kind: "heading"; level: number; inlines: Inline[] }
  | { kind: "code"; language: string; lines: Source[] }
  | { kind: "math"; lines: Source[] }
  | { kind: "quote"; blocks: Block[] }
  | { kind: "list"; start: number | null; items: Block[][] }
  | { kind: "table"; alignment: string[]; header: Inline[][]; rows: Inline[][][] }
  | { kind: "rule" };

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,7})([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MATH_OPEN = /^\s*(\$\$|\\\[)/;
const MAX_DEPTH = 10;

const isBlank = (line: Source) => line.text.trim() === "";

/** Splits a reply into lines that know their offsets. */
export function linesOf(text: string, at = 0): Source[] {
  let offset = at;
  return text.split("\n").map((line) => {
    const source = Source.of(line, offset);
    offset += line.length + 1;
    return source;
  });
}

/**
 * Cuts a reply at blank lines outside of code and math, so that a growing reply is parsed again from its last section
 * only. A section that begins with an indented line or a list item continues the one before.
 */
export function sections(text: string): { text: string; at: number }[] {
  const found: { text: string; at: number }[] = [];
  let start = 0;
  let offset = 0;
  let fence = "";
  let wasBlank = false;
  for (const line of text.split("\n")) {
    const mark = line.match(FENCE)?.[1] ?? "";
    const canCut = wasBlank && fence === "" && !/^( |\t|[-*+] |\d+[.)] )/.test(line) && line.trim() !== "";
    if (canCut && offset > start) {
      found.push({ text: text.slice(start, offset), at: start });
      start = offset;
    }
    if (fence === "") fence = mark || (/^\s*(\$\$|\\\[)\s*$/.test(line) ? "math" : "");
    else if (fence === "math" ? /(\$\$|\\\])\s*$/.test(line) : mark !== "" && mark.startsWith(fence)) fence = "";
    wasBlank = line.trim() === "";
    offset += line.length + 1;
  }
  if (start < text.length) found.push({ text: text.slice(start), at: start });
  return found;
}

export function parseBlocks(lines: Source[], depth = 0): Block[] {
  const blocks: Block[] = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i]!;
    if (isBlank(line)) {
      i++;
      continue;
    }
    const parsed = depth < MAX_DEPTH ? blockAt(lines, i, depth) : null;
    if (parsed) {
      blocks.push(parsed.block);
      i = parsed.end;
      continue;
    }
    let end = i + 1;
    while (end < lines.length && !isBlank(lines[end]!) && !interrupts(lines[end]!.text)) end++;
    const paragraph = Source.join(lines.slice(i, end).map(trimmed));
    blocks.push({ kind: "paragraph", inlines: parseInline(paragraph) });
    i = end;
  }
  return blocks;
}

function trimmed(line: Source): Source {
  const start = line.text.length - line.text.trimStart().length;
  return line.slice(start, line.text.trimEnd().length);
}

/** Whether a line ends the paragraph before it. */
function interrupts(text: string): boolean {
  return [FENCE, HEADING, RULE, QUOTE, ITEM, MATH_OPEN].some((pattern) => pattern.test(text));
}

type Parsed = { block: Block; end: number };

function blockAt(lines: Source[], i: number, depth: number): Parsed | null {
  const line = lines[i]!;
  const fence = line.text.match(FENCE);
  if (fence) return codeAt(lines, i, fence[1]!, fence[2]!);
  const heading = line.text.match(HEADING);
  if (heading) {
    const start = line.text.indexOf(heading[2]!, heading[1]!.length);
    const inlines = parseInline(line.slice(start, start + heading[2]!.length));
    return { block: { kind: "heading", level: heading[1]!.length, inlines }, end: i + 1 };
  }
  if (RULE.test(line.text)) return { block: { kind: "rule" }, end: i + 1 };
  if (MATH_OPEN.test(line.text)) return mathAt(lines, i);
  if (QUOTE.test(line.text)) return quoteAt(lines, i, depth);
  if (ITEM.test(line.text)) return listAt(lines, i, depth);
  if (line.text.includes("|") && DIVIDER.test(lines[i + 1]?.text ?? "") && lines[i + 1]!.text.includes("-")) {
    return tableAt(lines, i);
  }
  return null;
}

/** A block of code lasts to its closing fence, or to the end while it is written. */
function codeAt(lines: Source[], i: number, fence: string, language: string): Parsed {
  const closing = new RegExp(`^ {0,3}${fence[0] === "~" ? "~" : "`"}{${fence.length},}\\s*$`);
  let end = i + 1;
  while (end < lines.length && !closing.test(lines[end]!.text)) end++;
  return { block: { kind: "code", language, lines: lines.slice(i + 1, end) }, end: end + 1 };
}

function mathAt(lines: Source[], i: number): Parsed | null {
  const opening = lines[i]!.text.match(MATH_OPEN)!;
  const closing = opening[1] === "$$" ? "$$" : "\\]";
  const found: Source[] = [];
  for (let end = i; end < lines.length; end++) {
    const line = lines[end]!;
    const start = end === i ? opening[0].length : 0;
    const close = line.text.indexOf(closing, start);
    if (close >= 0) {
      found.push(line.slice(start, close));
      return { block: { kind: "math", lines: found.filter((part) => !isBlank(part)) }, end: end + 1 };
    }
    found.push(line.slice(start));
  }
  return null;
}

function quoteAt(lines: Source[], i: number, depth: number): Parsed {
  const inside: Source[] = [];
  let end = i;
  while (end < lines.length && !isBlank(lines[end]!)) {
    const mark = lines[end]!.text.match(QUOTE);
    if (!mark && interrupts(lines[end]!.text)) break;
    inside.push(lines[end]!.slice(mark?.[0].length ?? 0));
    end++;
  }
  return { block: { kind: "quote", blocks: parseBlocks(inside, depth + 1) }, end };
}

function listAt(lines: Source[], i: number, depth: number): Parsed {
  const first = lines[i]!.text.match(ITEM)!;
  const isOrdered = /\d/.test(first[2]!);
  const items: Block[][] = [];
  let end = i;
  while (end < lines.length) {
    const mark = lines[end]!.text.match(ITEM);
    if (!mark || /\d/.test(mark[2]!) !== isOrdered || mark[1]!.length > first[1]!.length + 1) break;
    if (RULE.test(lines[end]!.text)) break;
    const indent = mark[0].length;
    const inside = [lines[end]!.slice(indent)];
    end++;
    while (end < lines.length && belongsToItem(lines, end, mark[1]!.length)) {
      const blank = lines[end]!.text.length - lines[end]!.text.trimStart().length;
      inside.push(lines[end]!.slice(Math.min(blank, indent)));
      end++;
    }
    items.push(parseBlocks(inside, depth + 1));
    while (end < lines.length && isBlank(lines[end]!) && ITEM.test(lines[end + 1]?.text ?? "")) end++;
  }
  return { block: { kind: "list", start: isOrdered ? Number.parseInt(first[2]!, 10) : null, items }, end };
}

/** Whether a line continues an item: it is indented further, or it is a paragraph without a blank line before it. */
function belongsToItem(lines: Source[], i: number, indent: number): boolean {
  const { text } = lines[i]!;
  const own = text.length - text.trimStart().length;
  if (isBlank(lines[i]!)) {
    const next = lines[i + 1]?.text ?? "";
    return next.trim() !== "" && next.length - next.trimStart().length > indent + 1;
  }
  if (own > indent + 1) return true;
  return !isBlank(lines[i - 1]!) && !interrupts(text);
}

function cellsOf(line: Source): Source[] {
  const start = line.text.match(/^\s*\|?/)?.[0].length ?? 0;
  const cells: Source[] = [];
  let from = start;
  for (let i = start; i <= line.text.length; i++) {
    const isEnd = i === line.text.length;
    if (!isEnd && (line.text[i] !== "|" || line.text[i - 1] === "\\")) continue;
    if (!isEnd || line.text.slice(from).trim() !== "") cells.push(trimmed(line.slice(from, i)));
    from = i + 1;
  }
  return cells;
}

function tableAt(lines: Source[], i: number): Parsed {
  const header = cellsOf(lines[i]!).map((cell) => parseInline(cell));
  const alignment = cellsOf(lines[i + 1]!).map(({ text }) => {
    if (text.startsWith(":") && text.endsWith(":")) return "center";
    return text.endsWith(":") ? "end" : "start";
  });
  const rows: Inline[][][] = [];
  let end = i + 2;
  while (end < lines.length && lines[end]!.text.includes("|")) {
    rows.push(
      cellsOf(lines[end]!)
        .slice(0, header.length)
        .map((cell) => parseInline(cell)),
    );
    end++;
  }
  return { block: { kind: "table", alignment, header, rows }, end };
}
