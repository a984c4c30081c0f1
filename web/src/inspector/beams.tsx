// Beams: the most probable continuations of the prompt, as a tree of tokens.

import { useState } from "preact/hooks";
import { json, tokenize } from "../api/client";
import type { ChatReply, CompletionReply } from "../api/types";
import { visible } from "../parts/format";
import type { Recording } from "../state/conversation";
import type { PanelProps } from "./inspector";

interface Branch {
  text: string;
  children: Branch[];
  /** Rank of the beam that ends here. */
  rank: number | null;
}

export function BeamsPanel({ recording }: PanelProps) {
  const [width, setWidth] = useState(4);
  const [length, setLength] = useState(12);
  const [tree, setTree] = useState<Branch | null>(null);
  const [state, setState] = useState("");
  const run = async () => {
    setState("Searching…");
    try {
      setTree(await search(recording, width, length));
      setState("");
    } catch (error) {
      setState((error as Error).message);
    }
  };
  return (
    <>
      <p class="hint">
        A new request: the prompt of this reply, searched for its {width} most probable continuations of {length}{" "}
        tokens.
      </p>
      <div class="slider">
        <label for="beam-width">
          <code>beam_width</code>
        </label>
        <input
          id="beam-width"
          type="range"
          min={2}
          max={8}
          value={width}
          onInput={(event) => setWidth(Number(event.currentTarget.value))}
        />
        <output>{width}</output>
      </div>
      <div class="slider">
        <label for="beam-length">
          <code>max_tokens</code>
        </label>
        <input
          id="beam-length"
          type="range"
          min={4}
          max={32}
          value={length}
          onInput={(event) => setLength(Number(event.currentTarget.value))}
        />
        <output>{length}</output>
      </div>
      <button type="button" class="primary search-beams" onClick={() => void run()}>
        Search
      </button>
      <p role="status" class="hint">
        {state}
      </p>
      {tree && (
        <div class="beams" tabIndex={0} role="region" aria-label="Beams">
          <Branches branches={tree.children} />
        </div>
      )}
    </>
  );
}

async function search(recording: Recording, width: number, length: number): Promise<Branch> {
  const { model, messages, prompt } = recording.request;
  const body = { model, messages, prompt, beam_width: width, n: width, max_tokens: length };
  const reply = await json<{ choices: Partial<ChatReply["choices"][number] & CompletionReply["choices"][number]>[] }>(
    recording.path,
    { body },
  );
  const root: Branch = { text: "", children: [], rank: null };
  for (const [rank, choice] of reply.choices.entries()) {
    const text = choice.message?.content ?? choice.text ?? "";
    if (text === "") continue;
    const { token_strs: pieces } = await tokenize({ model, prompt: text, add_special_tokens: false });
    let at = root;
    for (const piece of pieces ?? []) {
      let next = at.children.find((child) => child.text === piece);
      if (!next) at.children.push((next = { text: piece, children: [], rank: null }));
      at = next;
    }
    at.rank ??= rank + 1;
  }
  return root;
}

/** A run of tokens without a fork is one line. */
function Branches({ branches }: { branches: Branch[] }) {
  return (
    <ul>
      {branches.map((branch, i) => {
        const run = [branch];
        while (run.at(-1)!.children.length === 1 && run.at(-1)!.rank === null) run.push(run.at(-1)!.children[0]!);
        const last = run.at(-1)!;
        return (
          <li key={i}>
            <span class="run">
              {run.map((one, j) => (
                <span key={j} class="piece">
                  {visible(one.text)}
                </span>
              ))}
            </span>
            {last.rank !== null && <small class="rank">beam {last.rank}</small>}
            {last.children.length > 0 && <Branches branches={last.children} />}
          </li>
        );
      })}
    </ul>
  );
}
