// The state of the page, and the hook through which components follow it.

import { useEffect, useState } from "preact/hooks";
import type { ModelCard, SchemaProperty } from "../api/types";
import { type Conversation, type Recording, newConversation } from "./conversation";
import { type Settings, loadSettings, saveSettings } from "./settings";

export type View = "chat" | "operations";
export type Panel = "parameters" | "keys" | "key" | "walk" | null;
export const TABS = ["tokens", "choice", "odds", "inside", "cache", "time", "drafts", "beams", "request"] as const;
export type Tab = (typeof TABS)[number];

/** Whether the server can be used, and if not, why. */
export type Connection =
  | { kind: "starting" | "ready" }
  | { kind: "offline" | "busy" | "draining" | "key" | "refused"; message: string; retryAt: number | null };

export interface State {
  view: View;
  panel: Panel;
  isSidebarOpen: boolean;
  connection: Connection;
  models: ModelCard[];
  fields: Record<string, SchemaProperty>;
  settings: Settings;
  conversations: Conversation[];
  current: Conversation;
  recordings: Map<string, Recording>;
  /** Counts changes of each node, so that unchanged messages are not drawn again. */
  versions: Map<string, number>;
  running: { node: string; controller: AbortController } | null;
  /** The reply that the inspector shows, and its token. */
  inspected: { node: string; token: number | null } | null;
  tab: Tab;
  /** The station of the guided walk. */
  walk: number | null;
  /** Two replies side by side. */
  compared: [string, string] | null;
  notice: string;
  /** Text that screen readers say: that a reply is being written, and the reply. */
  spoken: string;
}

export const state: State = {
  view: "chat",
  panel: null,
  isSidebarOpen: false,
  connection: { kind: "starting" },
  models: [],
  fields: {},
  settings: loadSettings(),
  conversations: [],
  current: newConversation(),
  recordings: new Map(),
  versions: new Map(),
  running: null,
  inspected: null,
  tab: "choice",
  walk: null,
  compared: null,
  notice: "",
  spoken: "",
};

const listeners = new Set<() => void>();
let isScheduled = false;

/** Draws the page again before the next frame. */
export function changed(node?: string): void {
  if (node !== undefined) state.versions.set(node, (state.versions.get(node) ?? 0) + 1);
  if (isScheduled) return;
  isScheduled = true;
  const draw = () => {
    isScheduled = false;
    for (const listener of listeners) listener();
  };
  // A hidden page has no frames.
  if (document.hidden) setTimeout(draw, 50);
  else requestAnimationFrame(draw);
}

/** Changes the state and draws the page again. */
export function set(change: Partial<State>): void {
  Object.assign(state, change);
  changed();
}

export function setSettings(change: Partial<Settings>): void {
  state.settings = { ...state.settings, ...change };
  saveSettings(state.settings);
  changed();
}

/** Makes a component follow the state. */
export function useApp(): State {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((count) => count + 1);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
  return state;
}

export function currentModel(): ModelCard | undefined {
  return state.models.find((card) => card.id === state.settings.model) ?? state.models[0];
}

/**
 * The preset of the next reply. If neither the server nor the model has defaults of its own, it is that of `pellucid run`:
 * the API's default, temperature 1 without any cut, suits few models.
 */
export function currentPreset(): string {
  if (state.settings.preset !== null) return state.settings.preset;
  const defaults = Object.values(currentModel()?.sampling_defaults ?? {});
  return defaults.every(({ source }) => source === "openai") ? "chat" : "";
}

/** Announces a result to people who see the page and to screen readers. */
export function notify(text: string): void {
  set({ notice: text });
  setTimeout(() => state.notice === text && set({ notice: "" }), 6000);
}
