// The frame of the page: top bar, views, dialogs and keys.

import { useEffect, useState } from "preact/hooks";
import { apiKey } from "./api/client";
import { Chat } from "./chat/chat";
import { Compare } from "./chat/compare";
import { HoverCard } from "./chat/hover_card";
import { Parameters } from "./chat/parameters";
import { Sidebar } from "./chat/sidebar";
import { Inspector } from "./inspector/inspector";
import { GROUPS, KEYS, handleKey } from "./keys";
import { Operations } from "./operations/operations";
import { Dialog } from "./parts/dialog";
import { Icon, Logo } from "./parts/icons";
import { cycleTheme } from "./state/actions";
import { connect } from "./state/connection";
import type { ColorMode } from "./state/settings";
import { type Connection, type State, currentModel, set, setSettings, useApp } from "./state/store";

export function App() {
  const state = useApp();
  const { view, panel, settings, inspected, notice, spoken } = state;
  useEffect(() => {
    document.addEventListener("keydown", handleKey);
    return () => document.removeEventListener("keydown", handleKey);
  }, []);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const apply = () => {
      const system = dark.matches ? "dark" : "light";
      document.documentElement.dataset["theme"] = settings.theme === "auto" ? system : settings.theme;
    };
    apply();
    dark.addEventListener("change", apply);
    return () => dark.removeEventListener("change", apply);
  }, [settings.theme]);
  return (
    <div class={`app${inspected && view === "chat" ? " inspecting" : ""}`}>
      <a class="skip" href="#main">
        Skip to the content
      </a>
      <TopBar state={state} />
      <Banner connection={state.connection} />
      <div class="views">
        {view === "chat" ? (
          <>
            <Sidebar />
            <Chat />
            <Inspector />
          </>
        ) : (
          <Operations />
        )}
      </div>
      {panel === "parameters" && <Parameters />}
      {panel === "keys" && <Keys />}
      {panel === "key" && <KeyDialog />}
      <Compare />
      {settings.colors !== "off" && <HoverCard />}
      <p class="notice" role="status">
        {notice}
      </p>
      <p class="unseen spoken" role="status">
        {spoken}
      </p>
    </div>
  );
}

const COLORS: [ColorMode, string][] = [
  ["off", "Plain text"],
  ["cut", "Tokens"],
  ["probability", "Probability"],
  ["gap", "Time"],
  ["proposal", "Drafts"],
];

function TopBar({ state }: { state: State }) {
  const { view, settings, models, isSidebarOpen } = state;
  const themes = {
    auto: ["half", "Theme: as the system"],
    light: ["sun", "Theme: light"],
    dark: ["moon", "Theme: dark"],
  } as const;
  const [themeIcon, themeLabel] = themes[settings.theme];
  return (
    <header class="top">
      {view === "chat" && (
        <button
          type="button"
          class="icon-button menu"
          aria-label="Conversations"
          aria-expanded={isSidebarOpen}
          aria-controls="conversations"
          onClick={() => set({ isSidebarOpen: !isSidebarOpen })}
        >
          <Icon name="menu" />
        </button>
      )}
      <span class="brand">
        <Logo /> Pellucid
      </span>
      <nav class="switch" aria-label="Views">
        {(["chat", "operations"] as const).map((name) => (
          <button
            key={name}
            type="button"
            aria-current={view === name ? "page" : undefined}
            onClick={() => set({ view: name })}
          >
            {name === "chat" ? "Chat" : "Operations"}
          </button>
        ))}
      </nav>
      {models.length > 0 && (
        <select
          class="model"
          aria-label="Model"
          value={currentModel()?.id}
          onChange={(event) => setSettings({ model: event.currentTarget.value })}
        >
          {models.map((card) => (
            <option key={card.id} value={card.id}>
              {card.id}
            </option>
          ))}
        </select>
      )}
      <span class="space" />
      {view === "chat" && (
        <select
          class="colors"
          aria-label="Color of the text"
          value={settings.colors}
          onChange={(event) => setSettings({ colors: event.currentTarget.value as ColorMode })}
        >
          {COLORS.map(([mode, name]) => (
            <option key={mode} value={mode}>
              {name}
            </option>
          ))}
        </select>
      )}
      <button
        type="button"
        class="icon-button"
        aria-label="Settings of a reply"
        title="Settings of a reply (p)"
        onClick={() => set({ panel: "parameters" })}
      >
        <Icon name="sliders" />
      </button>
      <button
        type="button"
        class="icon-button"
        aria-label="API key"
        title="API key (k)"
        onClick={() => set({ panel: "key" })}
      >
        <Icon name="key" />
      </button>
      <button
        type="button"
        class="icon-button"
        aria-label={themeLabel}
        title={`${themeLabel} (t)`}
        onClick={cycleTheme}
      >
        <Icon name={themeIcon} />
      </button>
      <button
        type="button"
        class="icon-button help"
        aria-label="Keys"
        title="Keys (?)"
        onClick={() => set({ panel: "keys" })}
      >
        ?
      </button>
    </header>
  );
}

const STATES: Record<string, string> = {
  offline: "Offline",
  busy: "Overloaded",
  draining: "Shutting down",
  key: "Key needed",
  refused: "Refused",
};

function Banner({ connection }: { connection: Connection }) {
  const [, tick] = useState(0);
  const isShown = connection.kind !== "ready" && connection.kind !== "starting";
  useEffect(() => {
    if (!isShown) return;
    const timer = setInterval(() => tick((count) => count + 1), 500);
    return () => clearInterval(timer);
  }, [isShown]);
  if (!isShown || !("message" in connection)) return null;
  const wait = connection.retryAt === null ? null : Math.max(0, Math.ceil((connection.retryAt - Date.now()) / 1000));
  return (
    <div class={`banner ${connection.kind}`} role="alert">
      <b>{STATES[connection.kind]}</b> <span>{connection.message}</span>
      {wait !== null && <span>Trying again{wait > 0 ? ` in ${wait} s` : " now"}.</span>}
      {connection.kind === "key" ? (
        <button type="button" class="small" onClick={() => set({ panel: "key" })}>
          Enter a key
        </button>
      ) : (
        <button type="button" class="small" onClick={() => void connect()}>
          Try now
        </button>
      )}
    </div>
  );
}

function Keys() {
  return (
    <Dialog title="Keys" class="panel wide" onClose={() => set({ panel: null })}>
      <div class="key-groups">
        {GROUPS.map((group) => (
          <section key={group}>
            <h3>{group}</h3>
            <table class="keys">
              <tbody>
                {KEYS.filter((key) => key.group === group).map(({ shown, meaning }) => (
                  <tr key={shown}>
                    <th scope="row">
                      <kbd>{shown}</kbd>
                    </th>
                    <td>{meaning}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </section>
        ))}
      </div>
      <p class="hint">
        Letters work while no field has the focus; Tab reaches everything else. <a href="/docs">API</a> ·{" "}
        <a href="/overview">Overview</a>
      </p>
    </Dialog>
  );
}

function KeyDialog() {
  const [key, setKey] = useState(apiKey.get());
  const [keep, setKeep] = useState(apiKey.isKept());
  const save = (event: Event) => {
    event.preventDefault();
    apiKey.set(key.trim(), keep);
    set({ panel: null });
    void connect();
  };
  return (
    <Dialog title="API key" class="panel" onClose={() => set({ panel: null })}>
      <form onSubmit={save}>
        <label class="block">
          <span>Key of this server</span>
          <input
            type="password"
            autocomplete="off"
            value={key}
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </label>
        <label class="check">
          <input type="checkbox" checked={keep} onChange={(event) => setKeep(event.currentTarget.checked)} /> Keep it in
          this browser; otherwise it is forgotten with this tab
        </label>
        <button type="submit" class="primary">
          Use this key
        </button>
        <p class="hint">The key is sent to this server alone. A server without keys needs none.</p>
      </form>
    </Dialog>
  );
}
