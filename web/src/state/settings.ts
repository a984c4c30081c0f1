// Settings of the page, kept in localStorage.

export type ColorMode = "off" | "probability" | "gap" | "proposal" | "cut";

/** Numeric sampling options that the panel offers; descriptions and ranges come from `/openapi.json`. */
export const PARAMETERS = [
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "typical_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "dry_multiplier",
  "xtc_probability",
] as const;
export type Parameter = (typeof PARAMETERS)[number];

export const PRESETS = ["", "code", "factual", "chat", "creative", "brainstorm"] as const;

export interface Settings {
  theme: "auto" | "light" | "dark";
  model: string;
  /** Name of a preset, "" for none; null picks one for the model. */
  preset: string | null;
  /** Values that the user gives; all others are the server's. */
  parameters: Partial<Record<Parameter, number>>;
  maxTokens: number | null;
  /** Null picks a random seed for each reply. */
  seed: number | null;
  stop: string[];
  /** JSON schema of replies; empty for text. */
  schema: string;
  /** Request log probabilities with each reply. */
  recordsProbabilities: boolean;
  /** Request the trace of every sampler step with each reply. */
  recordsTraces: boolean;
  colors: ColorMode;
}

const NAME = "pellucid.settings";

const DEFAULTS: Settings = {
  theme: "auto",
  model: "",
  preset: null,
  parameters: {},
  maxTokens: 1024,
  seed: null,
  stop: [],
  schema: "",
  recordsProbabilities: true,
  recordsTraces: false,
  colors: "off",
};

export function loadSettings(): Settings {
  try {
    return { ...DEFAULTS, ...(JSON.parse(localStorage.getItem(NAME) ?? "{}") as Partial<Settings>) };
  } catch {
    return { ...DEFAULTS };
  }
}

export function saveSettings(settings: Settings): void {
  localStorage.setItem(NAME, JSON.stringify(settings));
}
