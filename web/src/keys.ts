// Keys of the page. Every action has one.

import {
  cycleTheme,
  exportConversation,
  lastReply,
  moveToken,
  regenerate,
  startConversation,
  toggleInspector,
} from "./state/actions";
import { shownPath } from "./state/conversation";
import { stop } from "./state/generate";
import type { ColorMode } from "./state/settings";
import { TABS, notify, set, setSettings, state } from "./state/store";

interface Key {
  /** `KeyboardEvent.key`, or several of them. */
  keys: string[];
  shown: string;
  meaning: string;
  run: () => void;
}

const focus = (selector: string) => document.querySelector<HTMLElement>(selector)?.focus();

function cycleColors(): void {
  const modes: ColorMode[] = ["off", "cut", "probability", "gap", "proposal"];
  setSettings({ colors: modes[(modes.indexOf(state.settings.colors) + 1) % modes.length]! });
}

function clickLast(selector: string): void {
  [...document.querySelectorAll<HTMLElement>(selector)].at(-1)?.click();
}

async function copyReply(): Promise<void> {
  const reply = lastReply();
  if (!reply) return;
  await navigator.clipboard.writeText(reply.text);
  notify("Copied the reply.");
}

function moveTab(by: number): void {
  set({ tab: TABS[(TABS.indexOf(state.tab) + by + TABS.length) % TABS.length]! });
}

const letter = (key: string, meaning: string, run: () => void): Key => ({ keys: [key], shown: key, meaning, run });

export const KEYS: Key[] = [
  { keys: ["Enter"], shown: "Enter", meaning: "Send the message; with Shift a new line", run: () => undefined },
  { keys: ["Escape"], shown: "Esc", meaning: "Stop the reply, or close what is open", run: escape },
  { keys: ["/"], shown: "/", meaning: "Write a message", run: () => focus("#prompt") },
  letter("n", "New chat", startConversation),
  letter("s", "Search conversations", () => {
    set({ isSidebarOpen: true, view: "chat" });
    requestAnimationFrame(() => focus(".sidebar input[type=search]"));
  }),
  letter("e", "Edit your last message", () => clickLast(".message.user .actions button:last-child")),
  letter("r", "Regenerate the last reply", () => {
    const reply = lastReply();
    if (reply && !state.running) regenerate(reply);
  }),
  letter("c", "Copy the last reply", () => void copyReply()),
  letter("[", "Previous branch of the last reply", () => clickLast('.reply [aria-label="Previous branch"]')),
  letter("]", "Next branch of the last reply", () => clickLast('.reply [aria-label="Next branch"]')),
  letter("d", "Compare the last reply with another branch", () => {
    const reply = lastReply();
    const others = Object.values(state.current.nodes).filter((node) => node.parent === reply?.parent && node !== reply);
    if (reply && others.length > 0) set({ compared: [others.at(-1)!.id, reply.id] });
  }),
  letter("i", "Open or close the inspector", toggleInspector),
  {
    keys: ["ArrowLeft", "ArrowRight"],
    shown: "← →",
    meaning: "Previous and next token in the inspector",
    run: () => undefined,
  },
  {
    keys: ["ArrowUp", "ArrowDown"],
    shown: "↑ ↓",
    meaning: "Previous and next tab of the inspector (with Alt)",
    run: () => undefined,
  },
  letter("x", "Color the text: tokens, probability, time, drafts", cycleColors),
  letter("p", "Settings of a reply", () => set({ panel: "parameters" })),
  letter("k", "API key", () => set({ panel: "key" })),
  letter("o", "Chat or operations", () => set({ view: state.view === "chat" ? "operations" : "chat" })),
  letter("w", "Guided walk through the last reply", () => {
    const reply = lastReply();
    if (reply) set({ inspected: { node: reply.id, token: 0 }, walk: 0, tab: "request", view: "chat" });
  }),
  letter("t", "Theme: as the system, light, dark", cycleTheme),
  letter("j", "Export the conversation as JSON", () => {
    if (shownPath(state.current).length > 0) exportConversation(state.current);
  }),
  { keys: ["?"], shown: "?", meaning: "This list", run: () => set({ panel: "keys" }) },
];

function escape(): void {
  if (state.running) stop();
  else if (state.isSidebarOpen) set({ isSidebarOpen: false });
  else if (state.inspected) set({ inspected: null, walk: null });
}

export function handleKey(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  const isField = target.closest("input, textarea, select, [contenteditable]") !== null;
  if (document.querySelector("dialog[open]") !== null || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape") {
    if (isField && !state.running) target.blur();
    else escape();
    return;
  }
  if (isField) return;
  if (state.inspected && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    event.preventDefault();
    moveToken(event.key === "ArrowLeft" ? -1 : 1);
    return;
  }
  if (state.inspected && event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
    event.preventDefault();
    moveTab(event.key === "ArrowUp" ? -1 : 1);
    return;
  }
  const key = KEYS.find(
    ({ keys }) =>
      keys.includes(event.key) && !["Enter", "Escape"].includes(event.key) && !event.key.startsWith("Arrow"),
  );
  if (!key || event.altKey) return;
  event.preventDefault();
  key.run();
}
