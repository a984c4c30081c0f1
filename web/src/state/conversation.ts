// A conversation as a tree: an edited message or another reply is a sibling, and one path is shown.

import type { Extension, ToolCall, TokenTrace, Usage } from "../api/types";

/** A token of a reply with its most probable alternatives. */
export interface Token {
  id: number;
  text: string;
  bytes: number[];
  logprob: number;
  top: { id: number; text: string; logprob: number }[];
  /** Milliseconds from sending the request to the arrival of the token. */
  at: number;
}

/** Everything that is known about how a reply came to be. */
export interface Recording {
  path: string;
  /** The request as it was sent. */
  request: Record<string, unknown>;
  tokens: Token[];
  /** Number of first tokens that the request contained: the reply was continued after them. */
  inherited: number;
  /** Traces by index of the token, as they arrived. */
  traces: Record<number, TokenTrace>;
  usage: Usage | null;
  pellucid: Extension | null;
  fingerprint: string;
  /** Milliseconds from sending the request. */
  firstAt: number | null;
  endAt: number | null;
}

export interface Node {
  id: string;
  parent: string | null;
  role: "user" | "assistant";
  text: string;
  thoughts: string;
  calls: ToolCall[];
  created: number;
  model: string;
  state: "done" | "stopped" | "failed" | "running";
  finish: string | null;
  error: string | null;
}

export interface Conversation {
  id: string;
  title: string;
  /** Whether the user chose the title. */
  isNamed: boolean;
  created: number;
  updated: number;
  system: string;
  nodes: Record<string, Node>;
  /** The child that is shown of each node; the key "" is the root. */
  chosen: Record<string, string>;
}

export const newId = (): string => crypto.randomUUID();

export function newConversation(): Conversation {
  const now = Date.now();
  const id = newId();
  return { id, title: "New chat", isNamed: false, created: now, updated: now, system: "", nodes: {}, chosen: {} };
}

export function newNode(parent: string | null, role: Node["role"], text: string, model: string): Node {
  const empty = { thoughts: "", calls: [], finish: null, error: null };
  const state = role === "user" ? "done" : "running";
  return { id: newId(), parent, role, text, created: Date.now(), model, state, ...empty };
}

export function newRecording(path: string, request: Record<string, unknown>): Recording {
  return {
    path,
    request,
    tokens: [],
    inherited: 0,
    traces: {},
    usage: null,
    pellucid: null,
    fingerprint: "",
    firstAt: null,
    endAt: null,
  };
}

const key = (parent: string | null): string => parent ?? "";

/** Nodes with the same parent, oldest first. */
export function siblings(conversation: Conversation, parent: string | null): Node[] {
  const nodes = Object.values(conversation.nodes).filter((node) => node.parent === parent);
  return nodes.sort((a, b) => a.created - b.created);
}

/** The nodes that are shown, from the first message on. */
export function shownPath(conversation: Conversation): Node[] {
  const path: Node[] = [];
  let parent: string | null = null;
  for (;;) {
    const children: Node[] = siblings(conversation, parent);
    const chosen: Node | undefined = children.find((n) => n.id === conversation.chosen[key(parent)]) ?? children.at(-1);
    if (!chosen) return path;
    path.push(chosen);
    parent = chosen.id;
  }
}

/** The nodes from the first message to `id`. */
export function pathTo(conversation: Conversation, id: string | null): Node[] {
  const path: Node[] = [];
  for (let node = id === null ? undefined : conversation.nodes[id]; node;) {
    path.unshift(node);
    node = node.parent === null ? undefined : conversation.nodes[node.parent];
  }
  return path;
}

export function addNode(conversation: Conversation, node: Node): void {
  conversation.nodes[node.id] = node;
  conversation.chosen[key(node.parent)] = node.id;
  conversation.updated = Date.now();
  if (!conversation.isNamed && node.role === "user" && node.parent === null) {
    conversation.title = titleOf(node.text);
  }
}

export function choose(conversation: Conversation, node: Node): void {
  conversation.chosen[key(node.parent)] = node.id;
}

function titleOf(text: string): string {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 57)}…` : line || "New chat";
}

/** Checks a conversation from a file, field by field. Throws an error that says what is wrong. */
export function readConversation(value: unknown): Conversation {
  const fail = (what: string): never => {
    throw new Error(`This file is no exported conversation: ${what}.`);
  };
  if (typeof value !== "object" || value === null) return fail("expected an object");
  const given = value as Record<string, unknown>;
  const text = (of: Record<string, unknown>, name: string): string => {
    const found = of[name];
    return typeof found === "string" ? found : fail(`${name} is not a text`);
  };
  const conversation = newConversation();
  conversation.title = text(given, "title");
  conversation.isNamed = true;
  conversation.system = text(given, "system");
  if (typeof given["nodes"] !== "object" || given["nodes"] === null) return fail("nodes is missing");
  for (const [id, entry] of Object.entries(given["nodes"])) {
    if (typeof entry !== "object" || entry === null) return fail(`the node ${id} is not an object`);
    const node = entry as Record<string, unknown>;
    const role = node["role"] === "user" || node["role"] === "assistant" ? node["role"] : fail("unknown role");
    const parent = node["parent"] === null ? null : text(node, "parent");
    conversation.nodes[id] = {
      id,
      parent,
      role,
      text: text(node, "text"),
      thoughts: text(node, "thoughts"),
      calls: readCalls(node["calls"]),
      created: Number(node["created"]) || 0,
      model: text(node, "model"),
      state: "done",
      finish: typeof node["finish"] === "string" ? node["finish"] : null,
      error: null,
    };
  }
  for (const node of Object.values(conversation.nodes)) {
    if (node.parent !== null && !conversation.nodes[node.parent]) fail("a node has no parent");
  }
  return conversation;
}

function readCalls(value: unknown): ToolCall[] {
  if (!Array.isArray(value)) return [];
  const texts = (call: { function?: { name?: unknown; arguments?: unknown } }) => ({
    function: { name: String(call.function?.name ?? ""), arguments: String(call.function?.arguments ?? "") },
  });
  return value.map(texts);
}
