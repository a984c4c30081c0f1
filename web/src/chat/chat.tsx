// The conversation: its messages, the welcome of an empty one, and the field for the next message.

import { useEffect, useRef } from "preact/hooks";
import { canChat } from "../api/client";
import { inspect } from "../state/actions";
import { shownPath, siblings } from "../state/conversation";
import { say } from "../state/generate";
import { currentModel, set, state, useApp } from "../state/store";
import { STATIONS } from "../inspector/walk";
import { Composer } from "./composer";
import { Legend } from "./legend";
import { Message } from "./message";

export function Chat() {
  const { current, settings, inspected, running, versions, connection, models } = useApp();
  const path = shownPath(current);
  const scroller = useFollowing(path.at(-1)?.text.length ?? 0, current.id);
  return (
    <main class="chat" id="main" tabIndex={-1}>
      <Legend colors={settings.colors} />
      <div class="messages" ref={scroller} tabIndex={0} role="region" aria-label="Messages">
        <div class="column">
          {path.length > 0 && <h1 class="unseen">{current.title}</h1>}
          {path.length === 0 && connection.kind === "ready" && (models.length > 0 ? <Welcome /> : <NoModel />)}
          {path.map((node) => (
            <Message
              key={node.id}
              node={node}
              version={versions.get(node.id) ?? 0}
              colors={settings.colors}
              selected={inspected?.node === node.id ? inspected.token : null}
              isRunning={running !== null}
              numSiblings={siblings(current, node.parent).length}
            />
          ))}
        </div>
      </div>
      <Composer />
    </main>
  );
}

/** Keeps the end in view while a reply grows, unless the reader has scrolled away from it. */
function useFollowing(length: number, conversation: string) {
  const scroller = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  useEffect(() => {
    const element = scroller.current;
    const note = () => {
      if (element) isAtEnd.current = element.scrollHeight - element.scrollTop - element.clientHeight < 80;
    };
    element?.addEventListener("scroll", note, { passive: true });
    return () => element?.removeEventListener("scroll", note);
  }, []);
  useEffect(() => {
    const element = scroller.current;
    if (element && isAtEnd.current) element.scrollTop = element.scrollHeight;
  }, [length, conversation]);
  return scroller;
}

const QUESTIONS = [
  "Explain in two sentences why the sky is blue.",
  "Write a Python function that checks whether a word is a palindrome.",
  "List three facts about the Moon as a table.",
  "Tell me a story about a lighthouse in five sentences.",
];
/** For models without a chat template, which continue texts. */
const BEGINNINGS = [
  "Once upon a time, there was a little lighthouse",
  "One day, a bird found a shiny key. She",
  "Tom and his sister went to the sea. They",
];

function Welcome() {
  const isChat = canChat(currentModel());
  const [example, ...others] = isChat ? QUESTIONS : BEGINNINGS;
  const walk = async () => {
    await say(example!, null);
    const reply = shownPath(state.current).at(-1);
    if (reply?.role === "assistant" && reply.state !== "failed") {
      inspect(reply.id, 0);
      set({ walk: 0, tab: STATIONS[0]!.tab });
    }
  };
  return (
    <section class="welcome">
      <h1>Watch a prompt become tokens</h1>
      <p>
        Chat with <b>{currentModel()?.id}</b>, then click any word of a reply to see how it was chosen: the tokens, the
        probabilities, the cache and the time. Everything runs on this server; the page sends nothing elsewhere.
      </p>
      <button type="button" class="primary large" onClick={() => void walk()}>
        Run an example and walk through it
      </button>
      <p class="hint">
        {isChat ? "It asks" : "It begins"}: “{example}”
      </p>
      <ul class="examples">
        {others.map((text) => (
          <li key={text}>
            <button type="button" onClick={() => void say(text, null)}>
              {text}
            </button>
          </li>
        ))}
      </ul>
    </section>
  );
}

function NoModel() {
  return (
    <section class="welcome">
      <h1>No model that generates text</h1>
      <p>
        This server computes vectors. <a href="/overview">The overview</a> shows how to call it.
      </p>
    </section>
  );
}
