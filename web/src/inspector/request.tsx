// The request and the settings that were in effect.

import { CopyButton } from "../markdown/markdown";
import type { PanelProps } from "./inspector";

export function RequestPanel({ recording }: PanelProps) {
  const { pellucid } = recording;
  const body = JSON.stringify(recording.request, null, 2);
  const shell = `curl ${location.origin}${recording.path} -H 'Content-Type: application/json' -d '${JSON.stringify({ ...recording.request, stream: true }).replaceAll("'", "'\\''")}'`;
  const inEffect = Object.entries(pellucid?.parameters ?? {}).filter(([, value]) => !isEmpty(value));
  return (
    <>
      <dl class="pairs">
        <div>
          <dt>route</dt>
          <dd>
            <code>POST {recording.path}</code>
          </dd>
        </div>
        <div>
          <dt>seed</dt>
          <dd>
            <code>{String(pellucid?.seed ?? recording.request["seed"])}</code>
          </dd>
        </div>
        <div>
          <dt>fingerprint</dt>
          <dd>
            <code>{recording.fingerprint || "–"}</code>
          </dd>
        </div>
        {pellucid?.endings.map((ending) => (
          <div key={ending.index}>
            <dt>ended by</dt>
            <dd>
              {ending.reason.replaceAll("_", " ")}
              {ending.token_id !== undefined && `, token ${ending.token_id}`}
            </dd>
          </div>
        ))}
      </dl>
      <p class="hint">The same request to the same fingerprint gives the same bytes, alone or among other requests.</p>
      <p>
        <CopyButton text={shell} label="Copy as a curl command" /> as a curl command
      </p>
      <pre class="json" tabIndex={0}>
        {body}
      </pre>
      {inEffect.length > 0 && (
        <>
          <h3>In effect</h3>
          <dl class="pairs">
            {inEffect.map(([name, value]) => (
              <div key={name}>
                <dt>
                  <code>{name}</code>
                </dt>
                <dd>{JSON.stringify(value)}</dd>
              </div>
            ))}
          </dl>
        </>
      )}
    </>
  );
}

function isEmpty(value: unknown): boolean {
  return value === null || (typeof value === "object" && Object.keys(value as object).length === 0);
}
