// The guided walk: stations from prompt to token.

import { set, type Tab } from "../state/store";

interface Station {
  tab: Tab;
  title: string;
  text: string;
}

export const STATIONS: Station[] = [
  {
    tab: "request",
    title: "A request",
    text: "Your message travels to the server as JSON with a seed. Everything that follows depends on this request alone, so it can be repeated to the byte.",
  },
  {
    tab: "tokens",
    title: "Text becomes tokens",
    text: "The model's template writes control tokens around your message, and the tokenizer cuts the text into pieces that each have a number.",
  },
  {
    tab: "cache",
    title: "The prompt is read once",
    text: "Prefill passes all tokens of the prompt through the model together and keeps their keys and values. Blocks that are already known are not computed again.",
  },
  {
    tab: "inside",
    title: "Layer by layer",
    text: "Every layer adds to what the model knows at a position, and its attention fetches from earlier tokens. The guess of the next token often settles only in the last layers.",
  },
  {
    tab: "odds",
    title: "A probability for every token",
    text: "At each position the model gives a probability to every token it knows. Tall bars are tokens it was sure of; click a short one.",
  },
  {
    tab: "choice",
    title: "The sampler chooses",
    text: "Steps change these probabilities and cut unlikely candidates, then a draw picks one. Move a slider to see what other settings would have allowed.",
  },
  {
    tab: "time",
    title: "One step, one token",
    text: "The chosen token is appended and the model runs again. Each gap in the chart is one such step.",
  },
  {
    tab: "drafts",
    title: "Guessing ahead",
    text: "If the server has a drafter, several guessed tokens are checked in one step. Wrong guesses are thrown away, so the text stays the same.",
  },
  {
    tab: "beams",
    title: "Other paths",
    text: "Beam search follows several continuations at once. Press Search to see where the most probable texts part.",
  },
];

/** Goes to a station; the walk ends after the last one. */
export function walkTo(station: number): void {
  if (station >= STATIONS.length) set({ walk: null });
  else set({ walk: Math.max(0, station), tab: STATIONS[Math.max(0, station)]!.tab });
}

export function Walk({ station }: { station: number }) {
  const current = STATIONS[station]!;
  return (
    <section class="walk" aria-label="Guided walk">
      <p class="progress">
        Station {station + 1} of {STATIONS.length}
      </p>
      <h3>{current.title}</h3>
      <p aria-live="polite">{current.text}</p>
      <div class="actions shown">
        <button type="button" class="small" disabled={station === 0} onClick={() => walkTo(station - 1)}>
          Back
        </button>
        <button type="button" class="small primary" onClick={() => walkTo(station + 1)}>
          {station === STATIONS.length - 1 ? "Finish" : "Next"}
        </button>
        <button type="button" class="small" onClick={() => set({ walk: null })}>
          End the walk
        </button>
      </div>
    </section>
  );
}
