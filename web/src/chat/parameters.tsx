// Settings of a request. Descriptions, ranges and defaults are those that the server documents itself.

import { useState } from "preact/hooks";
import { Dialog } from "../parts/dialog";
import { saveCurrent } from "../state/actions";
import { PARAMETERS, PRESETS, type Parameter } from "../state/settings";
import { currentModel, currentPreset, set, setSettings, useApp } from "../state/store";

const PRESET_MEANINGS: Record<string, string> = {
  "": "The defaults of the server and the model.",
  code: "Close to the most probable token, with the tail cut: temperature 0.2, top_p 0.95.",
  factual: "Always the most probable token: temperature 0.",
  chat: "Moderate variety, with the tail cut: temperature 0.7, top_k 40, top_p 0.9.",
  creative:
    "The model's own spread, with the tail cut in proportion to how sure it is: temperature 1, min_p 0.05, presence_penalty 0.3.",
  brainstorm:
    "Hot, and half of the time without the obvious continuations: temperature 1.3, min_p 0.05, xtc_probability 0.5, presence_penalty 0.6.",
};

/** Largest value that a slider offers where the allowed range is wider than what is useful. */
const SLIDER_MAXIMUM: Partial<Record<Parameter, number>> = {
  temperature: 2,
  top_k: 200,
  repetition_penalty: 2,
  dry_multiplier: 2,
};

export function Parameters() {
  const { settings, current } = useApp();
  const reset = () => setSettings({ parameters: {}, preset: null, seed: null, stop: [], schema: "", maxTokens: 1024 });
  return (
    <Dialog title="Settings of a reply" class="panel" onClose={() => set({ panel: null })}>
      <label class="block">
        <span>System prompt of this conversation</span>
        <textarea
          rows={3}
          value={current.system}
          onInput={(event) => {
            current.system = event.currentTarget.value;
            saveCurrent();
          }}
        />
      </label>
      <fieldset>
        <legend>Preset</legend>
        <div class="presets">
          {PRESETS.map((preset) => (
            <label key={preset} class={currentPreset() === preset ? "chip chosen" : "chip"}>
              <input
                type="radio"
                name="preset"
                checked={currentPreset() === preset}
                onChange={() => setSettings({ preset })}
              />
              {preset === "" ? "default" : preset}
            </label>
          ))}
        </div>
        <p class="hint">{PRESET_MEANINGS[currentPreset()]}</p>
      </fieldset>
      {PARAMETERS.map((name) => (
        <ParameterRow key={name} name={name} />
      ))}
      <NumberRow
        name="max_completion_tokens"
        value={settings.maxTokens}
        placeholder="to the end of the context"
        onChange={(maxTokens) => setSettings({ maxTokens })}
      />
      <NumberRow
        name="seed"
        value={settings.seed}
        placeholder="a random one for each reply"
        onChange={(seed) => setSettings({ seed })}
      />
      <StopTexts />
      <SchemaEditor />
      <fieldset>
        <legend>What is recorded with each reply</legend>
        <Check
          label="Probabilities of every token and ten alternatives"
          isOn={settings.recordsProbabilities}
          onChange={(recordsProbabilities) => setSettings({ recordsProbabilities })}
        />
        <Check
          label="Every step of the sampler, for every token (about 5 KB each; otherwise replayed on demand)"
          isOn={settings.recordsTraces}
          onChange={(recordsTraces) => setSettings({ recordsTraces })}
        />
      </fieldset>
      <button type="button" onClick={reset}>
        Reset to the defaults
      </button>
    </Dialog>
  );
}

/** Texts that end a reply. Empty lines are kept while they are written, and not sent. */
function StopTexts() {
  const { settings } = useApp();
  const [text, setText] = useState(settings.stop.join("\n"));
  const lines = text.split("\n").filter((line) => line !== "");
  // Settings that were reset elsewhere are shown.
  const value = lines.join("\n") === settings.stop.join("\n") ? text : settings.stop.join("\n");
  const change = (written: string) => {
    setText(written);
    setSettings({ stop: written.split("\n").filter((line) => line !== "") });
  };
  return (
    <label class="block">
      <span>Stop texts, one a line</span>
      <textarea rows={2} value={value} onInput={(event) => change(event.currentTarget.value)} />
    </label>
  );
}

function Check({ label, isOn, onChange }: { label: string; isOn: boolean; onChange: (isOn: boolean) => void }) {
  return (
    <label class="check">
      <input type="checkbox" checked={isOn} onChange={(event) => onChange(event.currentTarget.checked)} /> {label}
    </label>
  );
}

/** One option: its name, its meaning, a slider and a number. */
function ParameterRow({ name }: { name: Parameter }) {
  const { fields, settings } = useApp();
  const field = fields[name];
  const given = settings.parameters[name];
  const preset = currentModel()?.sampling_defaults?.[name];
  const neutral = Number(preset?.value ?? field?.default ?? 0);
  const minimum = field?.minimum ?? 0;
  const maximum = SLIDER_MAXIMUM[name] ?? field?.maximum ?? 1;
  const change = (value: number | undefined) => {
    const { [name]: _, ...rest } = settings.parameters;
    setSettings({ parameters: value === undefined ? rest : { ...rest, [name]: value } });
  };
  const id = `parameter-${name}`;
  return (
    <div class={given === undefined ? "parameter" : "parameter given"}>
      <label for={id}>
        <code>{name}</code>
      </label>
      <input
        id={id}
        type="range"
        min={minimum}
        max={maximum}
        step={name === "top_k" ? 1 : 0.01}
        value={given ?? neutral}
        aria-describedby={`${id}-meaning`}
        onInput={(event) => change(Number(event.currentTarget.value))}
      />
      <output for={id}>{given ?? (currentPreset() === "" ? neutral : "preset")}</output>
      <button
        type="button"
        class="small"
        disabled={given === undefined}
        aria-label={`Reset ${name}`}
        onClick={() => change(undefined)}
      >
        Reset
      </button>
      <p class="hint" id={`${id}-meaning`}>
        {(field?.description ?? "").replaceAll("`", "")}
        {preset &&
          given === undefined &&
          currentPreset() === "" &&
          ` The default is the ${preset.source === "openai" ? "API" : preset.source}'s.`}
      </p>
    </div>
  );
}

interface NumberProps {
  name: string;
  value: number | null;
  placeholder: string;
  onChange: (value: number | null) => void;
}

function NumberRow({ name, value, placeholder, onChange }: NumberProps) {
  const { fields } = useApp();
  const change = (text: string) => {
    const number = Number.parseInt(text, 10);
    onChange(Number.isSafeInteger(number) && number >= (fields[name]?.minimum ?? 0) ? number : null);
  };
  return (
    <div class="parameter">
      <label for={`number-${name}`}>
        <code>{name}</code>
      </label>
      <input
        id={`number-${name}`}
        type="text"
        inputMode="numeric"
        value={value ?? ""}
        placeholder={placeholder}
        onChange={(event) => change(event.currentTarget.value)}
      />
      <p class="hint">{(fields[name]?.description ?? "").replaceAll("`", "")}</p>
    </div>
  );
}

const EXAMPLE_SCHEMA = `{
  "type": "object",
  "properties": {
    "answer": { "type": "string" },
    "confidence": { "enum": ["low", "medium", "high"] }
  },
  "required": ["answer", "confidence"],
  "additionalProperties": false
}`;

/** A JSON schema that replies satisfy. One that is no JSON is not kept. */
function SchemaEditor() {
  const { settings } = useApp();
  const [text, setText] = useState(settings.schema);
  const problem = problemOf(text);
  const change = (value: string) => {
    setText(value);
    if (problemOf(value) === null) setSettings({ schema: value });
  };
  return (
    <div class="block">
      <label for="schema">JSON schema that every reply satisfies</label>
      <textarea
        id="schema"
        class="mono"
        rows={text === "" ? 2 : 9}
        spellcheck={false}
        value={text}
        aria-invalid={problem !== null}
        onInput={(event) => change(event.currentTarget.value)}
      />
      {problem !== null && (
        <p class="failure" role="alert">
          {problem}
        </p>
      )}
      {text === "" && (
        <button type="button" class="small" onClick={() => change(EXAMPLE_SCHEMA)}>
          Insert an example
        </button>
      )}
      {text !== "" && (
        <button type="button" class="small" onClick={() => change("")}>
          Reply with text instead
        </button>
      )}
    </div>
  );
}

function problemOf(text: string): string | null {
  if (text.trim() === "") return null;
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return `This is not JSON yet: ${(error as Error).message}`;
  }
}
