// Requests that are being generated, the oldest first, with a way to cancel one. The server tells no text of them.

import { useState } from "preact/hooks";
import { ApiError, send } from "../api/client";
import type { RunningRequest, RunningRequests } from "../api/types";
import { grouped, milliseconds } from "../parts/format";
import { notify } from "../state/store";

/** Rows that are shown. */
const MAX_SHOWN = 50;
/** A request without progress for this time is marked. */
const STUCK_MS = 10_000;

export function Requests({ list, onChange }: { list: RunningRequests; onChange: () => void }) {
  /** The request whose button was pressed once; the second press cancels it. */
  const [asked, setAsked] = useState<string | null>(null);
  const cancel = async ({ id, tenant }: RunningRequest) => {
    if (asked !== id) return setAsked(id);
    setAsked(null);
    try {
      await send(`/requests/${encodeURIComponent(id)}`, { method: "DELETE" });
      notify(`Cancelled a request of ${tenant}.`);
    } catch (error) {
      notify((error as ApiError).message);
    }
    onChange();
  };
  const shown = list.data.slice(0, MAX_SHOWN);
  return (
    <section class="card running">
      <h2>Requests now</h2>
      {shown.length === 0 && <p class="hint">No request is being generated.</p>}
      {shown.length > 0 && (
        <div class="table" tabIndex={0} role="region" aria-label="Requests now">
          <table>
            <thead>
              <tr>
                {list.may_cancel && <th scope="col">cancel</th>}
                <th scope="col">tenant</th>
                <th scope="col">state</th>
                <th scope="col">age</th>
                <th scope="col">last token</th>
                <th scope="col">tokens</th>
                <th scope="col">prompt tokens</th>
                <th scope="col">model</th>
              </tr>
            </thead>
            <tbody>
              {shown.map((request) => (
                <tr key={request.id} data-request={request.id} class={isStuck(request) ? "stuck" : ""}>
                  {list.may_cancel && (
                    <td>
                      <button
                        type="button"
                        class={asked === request.id ? "small danger" : "small"}
                        disabled={request.state === "cancelled"}
                        onBlur={() => setAsked(null)}
                        onClick={() => void cancel(request)}
                      >
                        {asked === request.id ? "Really cancel" : "Cancel"}
                      </button>
                    </td>
                  )}
                  <th scope="row">{request.tenant}</th>
                  <td>{stateOf(request)}</td>
                  <td>{milliseconds(request.age_ms)}</td>
                  <td>
                    {request.since_last_token_ms === null ? "–" : `${milliseconds(request.since_last_token_ms)} ago`}
                  </td>
                  <td>{grouped(request.tokens)}</td>
                  <td>{grouped(request.prompt_tokens)}</td>
                  <td>{request.model}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {list.total > shown.length && <p class="hint">and {grouped(list.total - shown.length)} newer ones</p>}
      {!list.may_cancel && shown.length > 0 && (
        <p class="hint">To cancel requests, a key needs the right manage_requests = true.</p>
      )}
    </section>
  );
}

/** Whether a request has made no progress for long. */
function isStuck(request: RunningRequest): boolean {
  return (request.since_last_token_ms ?? request.age_ms) > STUCK_MS;
}

function stateOf(request: RunningRequest): string {
  const reason = request.waits_for_client ? ", its client reads slowly" : "";
  return `${request.state}${isStuck(request) ? ", stuck" : ""}${reason}`;
}
