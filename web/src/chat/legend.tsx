// The meaning of the colors of the text.

import type { ColorMode } from "../state/settings";
import { setSettings } from "../state/store";

const LEGENDS: Record<Exclude<ColorMode, "off">, { text: string; swatches: [string, string][] }> = {
  cut: { text: "Each change of color begins a token.", swatches: [] },
  probability: {
    text: "Probability, at least",
    swatches: [
      ["heat-0", "90 %"],
      ["heat-1", "70 %"],
      ["heat-2", "50 %"],
      ["heat-3", "30 %"],
      ["heat-4", "10 %"],
      ["heat-5", "3 %"],
      ["heat-6", "less"],
    ],
  },
  gap: {
    text: "Time since the token before, relative to the median:",
    swatches: [
      ["slow-0", "usual"],
      ["slow-2", "1.5 ×"],
      ["slow-4", "3 ×"],
      ["slow-6", "8 ×"],
    ],
  },
  proposal: {
    text: "Drafts, for replies whose steps were recorded:",
    swatches: [
      ["accepted", "proposed and chosen"],
      ["rejected", "another was proposed"],
      ["plain", "not proposed"],
    ],
  },
};

export function Legend({ colors }: { colors: ColorMode }) {
  if (colors === "off") return null;
  const { text, swatches } = LEGENDS[colors];
  return (
    <aside class="color-legend" aria-label="Colors">
      <span>{text}</span>
      {swatches.map(([look, label]) => (
        <span key={look} class={`legend-entry ${look}`}>
          {label}
        </span>
      ))}
      <button type="button" class="small" onClick={() => setSettings({ colors: "off" })}>
        Plain text
      </button>
    </aside>
  );
}
