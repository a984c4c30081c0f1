// Markdown within a paragraph: emphasis, code, links, math. HTML is text, and images become links.

import { type Leaf, Source } from "./source";

export type Inline =
  | { kind: "text"; leaves: Leaf[] }
  | { kind: "code"; leaves: Leaf[] }
  | { kind: "math"; leaves: Leaf[] }
  | { kind: "break" }
  | { kind: "strong" | "emphasis" | "deleted"; children: Inline[] }
  | { kind: "link"; href: string; children: Inline[] };

/** Depth at which nested marks are taken as text. */
const MAX_DEPTH = 8;

/** Returns an address that a link may have; null for all that could run a program. */
export function safeHref(address: string): string | null {
  try {
    const url = new URL(address.trim());
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const ESCAPE = /^\\([!-/:-@[-`{-~])/;
const CODE = /^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/;
const MATH = /^(?:\\\((.+?)\\\)|\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d))/;
const LINK =
  /^(!?)\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\))?[^\s<>()]*)>?(?:\s+"[^"]*")?\s*\)/;
const AUTOLINK = /^<((?:https?|mailto):[^\s<>]+)>/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]]/;
const MARKS: [RegExp, "strong" | "emphasis" | "deleted"][] = [
  [/^\*\*(?=\S)([\s\S]*?\S\*?)\*\*/, "strong"],
  [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, "strong"],
  [/^~~(?=\S)([\s\S]*?\S)~~/, "deleted"],
  [/^\*(?=\S)((?:[^*]|\*\*[^*]+\*\*)*?[^\s*])\*(?!\*)/, "emphasis"],
  [/^_(?=\S)([^_]*?\S)_(?!\w)/, "emphasis"],
];
const SPECIAL = /[\\`*_~$[!<h\n]/g;

export function parseInline(source: Source, depth = 0): Inline[] {
  const inlines: Inline[] = [];
  let plain: Leaf[] = [];
  const flush = () => {
    if (plain.length > 0) inlines.push({ kind: "text", leaves: plain });
    plain = [];
  };
  const addText = (part: Source) => plain.push(...part.runs());
  let i = 0;
  while (i < source.text.length) {
    const found = depth < MAX_DEPTH ? construct(source, i, depth) : null;
    if (found) {
      if ("text" in found) addText(found.text);
      else {
        flush();
        inlines.push(found.inline);
      }
      i = found.end;
      continue;
    }
    SPECIAL.lastIndex = i + 1;
    const next = SPECIAL.exec(source.text)?.index ?? source.text.length;
    addText(source.slice(i, next));
    i = next;
  }
  flush();
  return inlines;
}

type Found = { end: number } & ({ inline: Inline } | { text: Source });

/** Returns the construct that begins at `i`; null for plain text. */
function construct(source: Source, i: number, depth: number): Found | null {
  const rest = source.text.slice(i);
  const before = source.text[i - 1] ?? " ";
  let match: RegExpMatchArray | null;
  const inner = (start: number, length: number) => source.slice(i + start, i + start + length);
  const end = () => i + (match?.[0].length ?? 0);
  switch (rest[0]) {
    case "\n":
      return { end: i + 1, inline: { kind: "break" } };
    case "\\":
      if ((match = rest.match(MATH))) return mathAt(source, i, match);
      return (match = rest.match(ESCAPE)) ? { end: end(), text: inner(1, 1) } : null;
    case "`":
      match = rest.match(CODE);
      if (!match)
        return { end: i + (rest.match(/^`+/)?.[0].length ?? 1), text: inner(0, rest.match(/^`+/)?.[0].length ?? 1) };
      return { end: end(), inline: { kind: "code", leaves: inner(match[1]!.length, match[2]!.length).runs() } };
    case "$":
      return (match = rest.match(MATH)) ? mathAt(source, i, match) : null;
    case "[":
    case "!":
      match = rest.match(LINK);
      return match ? linkAt(source, i, match, depth) : null;
    case "<":
      match = rest.match(AUTOLINK);
      return match ? addressAt(end(), match[1]!, inner(1, match[1]!.length)) : null;
    case "h":
      match = /\w/.test(before) ? null : rest.match(ADDRESS);
      return match ? addressAt(end(), match[0], inner(0, match[0].length)) : null;
  }
  if (rest[0] === "_" && /\w/.test(before)) return null;
  for (const [pattern, kind] of MARKS) {
    match = rest.match(pattern);
    if (!match) continue;
    const width = kind === "emphasis" ? 1 : 2;
    return { end: end(), inline: { kind, children: parseInline(inner(width, match[1]!.length), depth + 1) } };
  }
  return null;
}

function mathAt(source: Source, i: number, match: RegExpMatchArray): Found {
  const width = match[0].startsWith("$") ? 1 : 2;
  const text = match[1] ?? match[2] ?? "";
  const leaves = source.slice(i + width, i + width + text.length).runs();
  return { end: i + match[0].length, inline: { kind: "math", leaves } };
}

function linkAt(source: Source, i: number, match: RegExpMatchArray, depth: number): Found {
  const [whole, bang, label, address] = match as unknown as [string, string, string, string];
  const href = safeHref(address);
  const start = i + bang.length + 1;
  // An address that is not allowed stays visible as it was written.
  if (href === null) return { end: i + whole.length, text: source.slice(i, i + whole.length) };
  const children = label === "" ? textOf(address) : parseInline(source.slice(start, start + label.length), depth + 1);
  return { end: i + whole.length, inline: { kind: "link", href, children } };
}

function addressAt(end: number, address: string, shown: Source): Found {
  const href = safeHref(address);
  const leaves = shown.runs();
  return {
    end,
    inline: href ? { kind: "link", href, children: [{ kind: "text", leaves }] } : { kind: "text", leaves },
  };
}

const textOf = (text: string): Inline[] => [{ kind: "text", leaves: [{ text, at: -1 }] }];
