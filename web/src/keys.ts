// Keys of the page. Every action has one; the help lists them in groups.

import { STATIONS, walkTo } from "./inspector/walk";
import {
  cycleTheme,
  exportConversation,
  lastReply,
  moveToken,
  openConversation,
  regenerate,
  startConversation,
  toggleInspector,
} from "./state/actions";
import { connect } from "./state/connection";
import { shownPath } from "./state/conversation";
import { stop } from "./state/generate";
import type { ColorMode } from "./state/settings";
import { TABS, type Tab, notify, set, setSettings, state } from "./state/store";

export const GROUPS = ["Write", "Conversations", "Inspect", "The page"] as const;

interface Key {
  group: (typeof GROUPS)[number];
  /** `KeyboardEvent.key`, or several of them; none if a field or a component handles the key. */
  keys: string[];
  shown: string;
  meaning: string;
  run: (key: string) => void;
}

const focus = (selector: string) => document.querySelector<HTMLElement>(selector)?.focus();
/** Runs after the page was drawn with a change of the state. */
const afterDrawing = (run: () => void) => requestAnimationFrame(() => requestAnimationFrame(run));

function cycleColors(): void {
  const modes: ColorMode[] = ["off", "cut", "probability", "gap", "proposal"];
  setSettings({ colors: modes[(modes.indexOf(state.settings.colors) + 1) % modes.length]! });
}

function clickLast(selector: string): void {
  [...document.querySelectorAll<HTMLElement>(selector)].at(-1)?.click();
}

async function copy(text: string | undefined, what: string): Promise<void> {
  if (text === undefined) return;
  await navigator.clipboard.writeText(text);
  notify(`Copied ${what}.`);
}

const lastMessage = () => shownPath(state.current).findLast((node) => node.role === "user");

function moveTab(by: number): void {
  set({ tab: TABS[(TABS.indexOf(state.tab) + by + TABS.length) % TABS.length]! });
}

/** Opens a tab of the inspector on the last reply and then uses an element of it. */
function useTab(tab: Tab, use: () => void): void {
  if (!state.inspected) toggleInspector();
  if (!state.inspected) return;
  set({ tab, view: "chat" });
  afterDrawing(use);
}

/** Opens the list of conversations, where it is hidden, and then uses an element of it. */
function useList(use: () => void): void {
  set({ isSidebarOpen: true, view: "chat" });
  afterDrawing(use);
}

function moveConversation(by: number): void {
  const at = state.conversations.indexOf(state.current);
  const next = at < 0 ? state.conversations[0] : state.conversations[at + by];
  if (next) openConversation(next);
}

function compare(): void {
  const reply = lastReply();
  const others = Object.values(state.current.nodes).filter((node) => node.parent === reply?.parent && node !== reply);
  if (reply && others.length > 0) set({ compared: [others.at(-1)!.id, reply.id] });
  else notify("There is one reply: regenerate it, or continue with another token, to compare two.");
}

function walk(by: number): void {
  const reply = lastReply();
  if (state.walk !== null) walkTo(state.walk + by);
  else if (reply) set({ inspected: { node: reply.id, token: 0 }, walk: 0, tab: STATIONS[0]!.tab, view: "chat" });
}

/** A key with its group, its meaning and what it does. Capital letters are shown with Shift. */
function key(group: Key["group"], name: string, meaning: string, run: (key: string) => void): Key {
  const isCapital = name.length === 1 && name !== name.toLowerCase();
  return { group, keys: [name], shown: isCapital ? `Shift+${name}` : name, meaning, run };
}

/** A key that a field or a component handles itself. */
const told = (group: Key["group"], shown: string, meaning: string): Key => ({
  group,
  keys: [],
  shown,
  meaning,
  run: () => undefined,
});

export const KEYS: Key[] = [
  key("Write", "/", "Write a message", () => focus("#prompt")),
  told("Write", "Enter", "Send it; with Shift a new line"),
  key("Write", "a", "Attach a text file", () => clickLast(".composer .attach")),
  key("Write", "e", "Edit your last message; Ctrl+Enter sends it", () => clickLast(".message.user .edit")),
  key("Write", "r", "Regenerate the last reply", () => {
    const reply = lastReply();
    if (reply && !state.running) regenerate(reply);
  }),
  key("Write", "c", "Copy the last reply", () => void copy(lastReply()?.text, "the reply")),
  key("Write", "C", "Copy your last message", () => void copy(lastMessage()?.text, "your message")),
  key("Write", "v", "Copy the last code", () => clickLast('.reply [aria-label="Copy code"]')),
  key("Write", "[", "Previous branch of the last reply", () => clickLast('.reply [aria-label="Previous branch"]')),
  key("Write", "]", "Next branch of the last reply", () => clickLast('.reply [aria-label="Next branch"]')),
  key("Write", "{", "Previous version of your last message", () =>
    clickLast('.message.user [aria-label="Previous branch"]'),
  ),
  key("Write", "}", "Next version of your last message", () => clickLast('.message.user [aria-label="Next branch"]')),
  key("Write", "d", "Compare the last reply with another branch", compare),
  key("Conversations", "n", "New chat", startConversation),
  key("Conversations", "s", "Search", () => useList(() => focus(".sidebar input[type=search]"))),
  key("Conversations", "l", "Show or hide the list in a narrow window", () =>
    set({ isSidebarOpen: !state.isSidebarOpen }),
  ),
  key("Conversations", ",", "Older conversation", () => moveConversation(1)),
  key("Conversations", ".", "Newer conversation", () => moveConversation(-1)),
  key("Conversations", "R", "Rename", () => useList(() => clickLast(".entry-actions .rename"))),
  key("Conversations", "D", "Delete: Enter asks, Enter deletes", () => useList(() => focus(".entry-actions .delete"))),
  key("Conversations", "j", "Export as JSON", () => {
    if (shownPath(state.current).length > 0) exportConversation(state.current);
  }),
  key("Conversations", "J", "Import from JSON", () => clickLast(".sidebar .import")),
  key("Inspect", "i", "Open or close the inspector", toggleInspector),
  told("Inspect", "← →", "Previous and next token"),
  told("Inspect", "Alt+↑ ↓", "Previous and next tab"),
  {
    ...told("Inspect", "1 – 9", "A tab by its number"),
    keys: TABS.map((_, i) => `${i + 1}`),
    run: (name) => state.inspected && set({ tab: TABS[Number(name) - 1]! }),
  },
  key("Inspect", "w", "Guided walk, and its next station", () => walk(1)),
  key("Inspect", "W", "Previous station of the walk", () => state.walk !== null && walk(-1)),
  key("Inspect", "z", "What if: the settings of this token", () =>
    useTab("choice", () => focus(".what-if input[type=range]")),
  ),
  key("Inspect", "b", "Continue with another token", () => useTab("odds", () => focus(".alternatives button"))),
  key("Inspect", "f", "Search for the most probable texts", () => useTab("beams", () => clickLast(".search-beams"))),
  key("Inspect", "x", "Color the text: tokens, probability, time, drafts", cycleColors),
  key("The page", "m", "Choose the model", () => focus(".top .model")),
  key("The page", "p", "Settings of a reply", () => set({ panel: "parameters" })),
  key("The page", "k", "API key", () => set({ panel: "key" })),
  key("The page", "u", "Try to reach the server now", () => void connect()),
  key("The page", "o", "Chat or operations", () => set({ view: state.view === "chat" ? "operations" : "chat" })),
  key("The page", "q", "Operations: cancel the oldest request (asks)", () => {
    set({ view: "operations" });
    afterDrawing(() => focus(".running button"));
  }),
  key("The page", "t", "Theme: as the system, light, dark", cycleTheme),
  told("The page", "Esc", "Stop the reply, or close what is open"),
  key("The page", "?", "This list", () => set({ panel: "keys" })),
];

function escape(): void {
  if (state.running) stop();
  else if (state.isSidebarOpen) set({ isSidebarOpen: false });
  else if (state.walk !== null) set({ walk: null });
  else if (state.inspected) set({ inspected: null, walk: null });
}

export function handleKey(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  const isField = target.closest("input, textarea, select, [contenteditable]") !== null;
  // AltGr, with which many keyboards write brackets, counts as Ctrl and Alt together.
  const isAltGraph = event.getModifierState("AltGraph");
  if (document.querySelector("dialog[open]") !== null || event.metaKey || (event.ctrlKey && !isAltGraph)) return;
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
  const found = KEYS.find(({ keys }) => keys.includes(event.key));
  if (!found || (event.altKey && !isAltGraph)) return;
  event.preventDefault();
  found.run(event.key);
}
