// Actions on conversations that buttons and keys share.

import { type Conversation, type Node, newConversation, readConversation, shownPath } from "./conversation";
import { database } from "./database";
import { type Beginning, askFor, stop } from "./generate";
import { changed, notify, set, setSettings, state, type Tab } from "./store";

export async function loadConversations(): Promise<void> {
  try {
    const conversations = await database.conversations();
    conversations.sort((a, b) => b.updated - a.updated);
    for (const conversation of conversations) endInterrupted(conversation);
    set({ conversations });
  } catch (error) {
    notify(`Earlier conversations could not be read: ${String(error)}`);
  }
}

/** Marks replies that were running when the page was closed. */
function endInterrupted(conversation: Conversation): void {
  for (const node of Object.values(conversation.nodes)) {
    if (node.state === "running") node.state = "stopped";
  }
}

export function startConversation(): void {
  stop();
  set({ current: newConversation(), inspected: null, compared: null, view: "chat", isSidebarOpen: false });
  requestAnimationFrame(() => document.querySelector<HTMLElement>("#prompt")?.focus());
}

export function openConversation(conversation: Conversation): void {
  stop();
  set({ current: conversation, inspected: null, compared: null, view: "chat", isSidebarOpen: false });
  void loadRecordings(conversation);
}

/** Loads the recordings of the replies that are shown. */
export async function loadRecordings(conversation: Conversation): Promise<void> {
  for (const node of shownPath(conversation)) if (node.role === "assistant") await loadRecording(node.id);
}

export async function loadRecording(node: string): Promise<void> {
  if (state.recordings.has(node)) return;
  const recording = await database.recording(node);
  if (recording) state.recordings.set(node, recording);
  changed(node);
}

export function saveCurrent(): void {
  if (state.conversations.includes(state.current)) void database.save(state.current);
  changed();
}

export async function removeConversation(conversation: Conversation): Promise<void> {
  await database.remove(conversation);
  state.conversations = state.conversations.filter((other) => other !== conversation);
  if (state.current === conversation) startConversation();
  notify(`Deleted “${conversation.title}”.`);
}

export function rename(conversation: Conversation, title: string): void {
  conversation.title = title.trim() || conversation.title;
  conversation.isNamed = true;
  void database.save(conversation);
  changed();
}

/** Offers a conversation as a JSON file. */
export function exportConversation(conversation: Conversation): void {
  const file = new Blob([JSON.stringify({ format: "pellucid.conversation.1", ...conversation }, null, 2)], {
    type: "application/json",
  });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50) || "conversation"}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

export async function importConversation(file: File): Promise<void> {
  try {
    const conversation = readConversation(JSON.parse(await file.text()));
    await database.save(conversation);
    state.conversations.unshift(conversation);
    openConversation(conversation);
  } catch (error) {
    notify(error instanceof SyntaxError ? "The file is not JSON." : String((error as Error).message));
  }
}

/** Asks for another reply to the message that `node` answers. */
export function regenerate(node: Node): void {
  if (node.parent !== null) void askFor(state.current, node.parent);
}

/** Continues the reply `node` after `beginning`, as a branch beside it. */
export function branch(node: Node, beginning: Beginning): void {
  if (node.parent !== null) void askFor(state.current, node.parent, beginning);
}

export function inspect(node: string, token: number | null, tab?: Tab): void {
  set({ inspected: { node, token }, view: "chat", ...(tab ? { tab } : {}) });
}

export function lastReply(): Node | undefined {
  return shownPath(state.current).findLast((node) => node.role === "assistant");
}

/** Opens or closes the inspector on the last reply. */
export function toggleInspector(): void {
  const reply = lastReply();
  if (state.inspected) set({ inspected: null });
  else if (reply) inspect(reply.id, 0);
  else notify("Send a message first: the inspector shows how its reply came to be.");
}

/** Moves to the next or the previous token of the inspected reply. */
export function moveToken(by: number): void {
  const { inspected } = state;
  if (!inspected) return;
  const last = (state.recordings.get(inspected.node)?.tokens.length ?? 0) - 1;
  if (last >= 0) inspect(inspected.node, Math.max(0, Math.min(last, (inspected.token ?? -1) + by)));
}

export function cycleTheme(): void {
  const next = { auto: "light", light: "dark", dark: "auto" } as const;
  setSettings({ theme: next[state.settings.theme] });
}
