// The field for messages: text, attached text files, send and stop.

import { useRef, useState } from "preact/hooks";
import { Icon } from "../parts/icons";
import { shownPath } from "../state/conversation";
import { say, stop } from "../state/generate";
import { currentModel, currentPreset, notify, set, useApp } from "../state/store";

/** Size of an attached file up to which its text is sent. */
const MAX_FILE_BYTES = 256 << 10;

interface Attachment {
  name: string;
  text: string;
}

export function Composer() {
  const { running, current, connection, settings } = useApp();
  const [text, setText] = useState("");
  const [files, setFiles] = useState<Attachment[]>([]);
  const chooser = useRef<HTMLInputElement>(null);
  const canSend =
    (text.trim() !== "" || files.length > 0) && !running && connection.kind === "ready" && currentModel() !== undefined;
  const send = () => {
    if (!canSend) return;
    const attached = files.map((file) => `\n\n${file.name}:\n\`\`\`\n${file.text}\n\`\`\``).join("");
    setText("");
    setFiles([]);
    void say((text.trim() + attached).trim(), shownPath(current).at(-1)?.id ?? null);
  };
  const attach = async (chosen: FileList | null) => {
    for (const file of chosen ?? []) {
      const content = file.size <= MAX_FILE_BYTES ? await file.text() : null;
      if (content === null) notify(`${file.name} is larger than ${MAX_FILE_BYTES >> 10} KiB.`);
      else if (content.includes("\0")) notify(`${file.name} is not a text.`);
      else setFiles((before) => [...before, { name: file.name, text: content }]);
    }
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {files.length > 0 && (
        <ul class="attachments" aria-label="Attached files">
          {files.map((file, i) => (
            <li key={i}>
              {file.name}
              <button
                type="button"
                class="small"
                aria-label={`Remove ${file.name}`}
                onClick={() => setFiles(files.filter((f) => f !== file))}
              >
                <Icon name="close" />
              </button>
            </li>
          ))}
        </ul>
      )}
      <div class="field">
        <button
          type="button"
          class="icon-button attach"
          aria-label="Attach a text file"
          title="Attach a text file (a)"
          onClick={() => chooser.current?.click()}
        >
          <Icon name="clip" />
        </button>
        <input
          ref={chooser}
          type="file"
          multiple
          hidden
          tabIndex={-1}
          aria-hidden="true"
          onChange={(event) => void attach(event.currentTarget.files)}
        />
        <textarea
          id="prompt"
          rows={1}
          placeholder="Write a message"
          aria-label="Message"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              send();
            }
          }}
        />
        {running ? (
          <button type="button" class="round" aria-label="Stop the reply" title="Stop (Esc)" onClick={stop}>
            <Icon name="stop" />
          </button>
        ) : (
          <button type="submit" class="round" aria-label="Send" title="Send (Enter)" disabled={!canSend}>
            <Icon name="send" />
          </button>
        )}
      </div>
      <p class="composer-facts">
        <button type="button" class="link" onClick={() => set({ panel: "parameters" })}>
          {currentPreset() === "" ? "Default sampling" : `Preset “${currentPreset()}”`}
          {Object.entries(settings.parameters).map(([name, value]) => `, ${name} ${value}`)}
          {settings.schema.trim() !== "" && ", JSON by schema"}
        </button>
        <span>Models make mistakes. Check what matters.</span>
      </p>
    </form>
  );
}
