// Conversations of this browser: search, rename, delete, export and import.

import { useRef, useState } from "preact/hooks";
import { dateOf } from "../parts/format";
import { Icon } from "../parts/icons";
import {
  exportConversation,
  importConversation,
  openConversation,
  removeConversation,
  rename,
  startConversation,
} from "../state/actions";
import type { Conversation } from "../state/conversation";
import { useApp } from "../state/store";

export function Sidebar() {
  const { conversations, isSidebarOpen } = useApp();
  const [query, setQuery] = useState("");
  const chooser = useRef<HTMLInputElement>(null);
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = conversations.filter((conversation) => matches(conversation, words));
  return (
    <nav class={isSidebarOpen ? "sidebar open" : "sidebar"} aria-label="Conversations" id="conversations">
      <button type="button" class="new" title="New chat (n)" onClick={startConversation}>
        <Icon name="plus" /> New chat
      </button>
      <input
        type="search"
        placeholder="Search"
        aria-label="Search conversations"
        value={query}
        onInput={(event) => setQuery(event.currentTarget.value)}
      />
      <ul>
        {found.map((conversation) => (
          <Entry key={conversation.id} conversation={conversation} />
        ))}
      </ul>
      {found.length === 0 && (
        <p class="hint">{query === "" ? "Conversations stay in this browser." : "Nothing found."}</p>
      )}
      <button type="button" class="small import" onClick={() => chooser.current?.click()}>
        Import a conversation
      </button>
      <input
        ref={chooser}
        type="file"
        accept="application/json,.json"
        hidden
        tabIndex={-1}
        aria-hidden="true"
        onChange={(event) => {
          const file = event.currentTarget.files?.[0];
          if (file) void importConversation(file);
          event.currentTarget.value = "";
        }}
      />
    </nav>
  );
}

function matches(conversation: Conversation, words: string[]): boolean {
  if (words.length === 0) return true;
  const texts = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.text)];
  const all = texts.join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

function Entry({ conversation }: { conversation: Conversation }) {
  const { current } = useApp();
  const [isNaming, setNaming] = useState(false);
  /** Whether Delete was pressed once; the second press deletes. */
  const [isAsked, setAsked] = useState(false);
  const [title, setTitle] = useState(conversation.title);
  if (isNaming) {
    const keep = () => {
      rename(conversation, title);
      setNaming(false);
    };
    return (
      <li>
        <input
          type="text"
          class="name"
          aria-label="Name of the conversation"
          value={title}
          ref={(element) => element?.focus()}
          onInput={(event) => setTitle(event.currentTarget.value)}
          onBlur={keep}
          onKeyDown={(event) => event.key === "Enter" && keep()}
        />
      </li>
    );
  }
  const isCurrent = conversation === current;
  return (
    <li class={isCurrent ? "current" : ""}>
      <button
        type="button"
        class="entry"
        aria-current={isCurrent ? "page" : undefined}
        onClick={() => openConversation(conversation)}
      >
        <span class="title">{conversation.title}</span>
        <span class="date">{dateOf(conversation.updated)}</span>
      </button>
      {isCurrent && (
        <div class="entry-actions">
          <button
            type="button"
            class="small rename"
            onClick={() => {
              setTitle(conversation.title);
              setNaming(true);
            }}
          >
            Rename
          </button>
          <button type="button" class="small" onClick={() => exportConversation(conversation)}>
            Export
          </button>
          <button
            type="button"
            class="small danger delete"
            onBlur={() => setAsked(false)}
            onClick={() => (isAsked ? void removeConversation(conversation) : setAsked(true))}
          >
            {isAsked ? "Really delete" : "Delete"}
          </button>
        </div>
      )}
    </li>
  );
}
