// The operator's view: load, memory, speed and latency from `/metrics`, which Prometheus reads too, and the requests
// that run.

import { useEffect, useState } from "preact/hooks";
import { ApiError, json, text } from "../api/client";
import { type Metrics, parseMetrics, quantile, total } from "../api/metrics";
import type { RunningRequests } from "../api/types";
import { bytesText, grouped, milliseconds } from "../parts/format";
import { set, useApp } from "../state/store";
import { LineChart } from "./chart";
import { Requests } from "./requests";

const PERIOD_MS = 2000;
/** Readings that are kept: five minutes. */
const NUM_READINGS = 150;

interface Reading {
  at: number;
  metrics: Metrics;
}

/** Readings so far; they are kept while another view is shown. */
let kept: Reading[] = [];

export function Operations() {
  const [readings, setReadings] = useState<Reading[]>(kept);
  const [failure, setFailure] = useState<ApiError | null>(null);
  const [requests, setRequests] = useState<RunningRequests | null>(null);
  const read = async () => {
    try {
      const [list, metrics] = await Promise.all([
        json<RunningRequests>("/requests"),
        text("/metrics", { accept: "text/plain" }),
      ]);
      kept = [...kept.slice(1 - NUM_READINGS), { at: performance.now(), metrics: parseMetrics(metrics) }];
      setRequests(list);
      setReadings(kept);
      setFailure(null);
    } catch (error) {
      setFailure(error as ApiError);
    }
  };
  useEffect(() => {
    void read();
    const timer = setInterval(() => void read(), PERIOD_MS);
    return () => clearInterval(timer);
  }, []);
  const last = readings.at(-1);
  return (
    <main class="operations" id="main" tabIndex={-1}>
      <h1>Operations</h1>
      {failure && <Failure failure={failure} />}
      {last && <Charts readings={readings} />}
      {last && requests && <Requests list={requests} onChange={() => void read()} />}
      {last && <Tables metrics={last.metrics} />}
      {!last && !failure && (
        <p class="hint" role="status">
          Reading the metrics…
        </p>
      )}
    </main>
  );
}

function Failure({ failure }: { failure: ApiError }) {
  return (
    <p class="failure" role="alert">
      {failure.code === "metrics_not_allowed"
        ? "This key may not read the metrics of all tenants: it needs the right metrics = true."
        : failure.message}{" "}
      {failure.needsKey && (
        <button type="button" class="small" onClick={() => set({ panel: "key" })}>
          Enter a key
        </button>
      )}
    </p>
  );
}

function Charts({ readings }: { readings: Reading[] }) {
  const gauge = (name: string) => readings.map(({ metrics }) => total(metrics, name));
  const rate = (name: string) =>
    readings.slice(1).map((reading, i) => {
      const before = readings[i]!;
      const gained = total(reading.metrics, name) - total(before.metrics, name);
      // A counter that fell belongs to a server that was started again.
      return gained < 0 ? null : gained / ((reading.at - before.at) / 1000);
    });
  /** Quantile over the last five readings, so that single requests show. */
  const times = (name: string, q: number) =>
    readings.map(({ metrics }, i) => quantile(readings[Math.max(0, i - 5)]!.metrics, metrics, name, q));
  const whole = (value: number) => grouped(value);
  const speed = (value: number) => value.toFixed(1);
  const time = (value: number) => milliseconds(value * 1000);
  return (
    <div class="cards">
      <LineChart
        title="Requests"
        format={whole}
        series={[
          { name: "running", values: gauge("pellucid_sequences_running") },
          { name: "waiting", values: gauge("pellucid_requests_waiting") },
        ]}
      />
      <LineChart
        title="Tokens per second"
        format={speed}
        series={[
          { name: "generated", values: rate("pellucid_computed_output_tokens_total") },
          { name: "prefill", values: rate("pellucid_computed_prompt_tokens_total") },
        ]}
      />
      <LineChart
        title="Time to first token"
        format={time}
        series={[
          { name: "median", values: times("pellucid_time_to_first_token_seconds", 0.5) },
          { name: "95 %", values: times("pellucid_time_to_first_token_seconds", 0.95) },
        ]}
      />
      <LineChart
        title="Gap between tokens"
        format={time}
        series={[
          { name: "median", values: times("pellucid_inter_token_seconds", 0.5) },
          { name: "95 %", values: times("pellucid_inter_token_seconds", 0.95) },
        ]}
      />
      <LineChart
        title="KV blocks"
        format={whole}
        series={[
          { name: "in use", values: gauge("pellucid_kv_blocks_in_use") },
          { name: "reserved", values: gauge("pellucid_kv_blocks_reserved") },
          { name: "idle in the prefix cache", values: gauge("pellucid_kv_blocks_idle") },
        ]}
      />
      <LineChart
        title="Connections"
        format={whole}
        series={[
          { name: "open", values: gauge("pellucid_connections") },
          { name: "WebSockets", values: gauge("pellucid_websockets") },
        ]}
      />
    </div>
  );
}

function Tables({ metrics }: { metrics: Metrics }) {
  const { models } = useApp();
  const outcomes = metrics.get("pellucid_requests_total") ?? [];
  const tenants = [...new Set(outcomes.map((sample) => sample.labels["tenant"] ?? ""))];
  const names = ["completed", "cancelled", "cancelled_by_operator", "timed_out", "limited", "failed"];
  const count = (tenant: string, outcome: string) =>
    outcomes.find(({ labels }) => labels["tenant"] === tenant && labels["outcome"] === outcome)?.value ?? 0;
  const prompts = total(metrics, "pellucid_prompt_tokens_total");
  const hits = total(metrics, "pellucid_prefix_hit_tokens_total");
  return (
    <>
      <section class="card">
        <h2>Requests by tenant</h2>
        <div class="table" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th scope="col">tenant</th>
                {names.map((name) => (
                  <th key={name} scope="col">
                    {name.replaceAll("_", " ")}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {tenants.map((tenant) => (
                <tr key={tenant}>
                  <th scope="row">{tenant}</th>
                  {names.map((name) => (
                    <td key={name}>{grouped(count(tenant, name))}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        {tenants.length === 0 && <p class="hint">No requests yet.</p>}
      </section>
      <TenantMemory metrics={metrics} />
      <section class="card">
        <h2>Since the start</h2>
        <dl class="pairs">
          <div>
            <dt>tokens generated</dt>
            <dd>{grouped(total(metrics, "pellucid_generated_tokens_total"))}</dd>
          </div>
          <div>
            <dt>prompt tokens</dt>
            <dd>
              {grouped(prompts)}, {prompts > 0 ? Math.round((100 * hits) / prompts) : 0} % from the prefix cache
            </dd>
          </div>
          <div>
            <dt>steps</dt>
            <dd>
              {grouped(total(metrics, "pellucid_steps_total"))},{" "}
              {milliseconds(total(metrics, "pellucid_step_seconds_mean") * 1000)} each on average
            </dd>
          </div>
          <div>
            <dt>preemptions</dt>
            <dd>{grouped(total(metrics, "pellucid_preemptions_total"))}</dd>
          </div>
          <div>
            <dt>KV memory</dt>
            <dd>{grouped(total(metrics, "pellucid_kv_blocks"))} blocks of 32 tokens</dd>
          </div>
        </dl>
      </section>
      <section class="card">
        <h2>Models</h2>
        <ul>
          {models.map((model) => (
            <li key={model.id}>
              <b>{model.id}</b>, {bytesText(memoryOf(metrics, model.id))}, context of {grouped(model.max_model_len)}{" "}
              tokens, <code>{model.system_fingerprint}</code>
            </li>
          ))}
        </ul>
      </section>
    </>
  );
}

function memoryOf(metrics: Metrics, model: string): number {
  const samples = metrics.get("pellucid_model_memory_bytes") ?? [];
  return samples.find(({ labels }) => labels["model"] === model)?.value ?? 0;
}

/** KV memory that each tenant holds in all models. */
function TenantMemory({ metrics }: { metrics: Metrics }) {
  const samples = metrics.get("pellucid_tenant_kv_bytes") ?? [];
  const tenants = [...new Set(samples.map(({ labels }) => labels["tenant"] ?? ""))];
  const states = ["in_use", "reserved", "idle"];
  const bytes = (tenant: string, state: string) =>
    samples
      .filter(({ labels }) => labels["tenant"] === tenant && labels["state"] === state)
      .reduce((sum, sample) => sum + sample.value, 0);
  return (
    <section class="card tenant-memory">
      <h2>KV memory by tenant</h2>
      <div class="table" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th scope="col">tenant</th>
              <th scope="col">in use</th>
              <th scope="col">reserved</th>
              <th scope="col">idle in the prefix cache</th>
            </tr>
          </thead>
          <tbody>
            {tenants.map((tenant) => (
              <tr key={tenant}>
                <th scope="row">{tenant}</th>
                {states.map((state) => (
                  <td key={state}>{bytesText(bytes(tenant, state))}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {tenants.length === 0 && <p class="hint">No tenant has used the cache yet.</p>}
    </section>
  );
}
