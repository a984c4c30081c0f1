// Prometheus' text format, and quantiles of its histograms.

export interface Sample {
  labels: Record<string, string>;
  value: number;
}

export type Metrics = Map<string, Sample[]>;

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parseMetrics(text: string): Metrics {
  const metrics: Metrics = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : line.match(LINE);
    if (!match) continue;
    const labels: Record<string, string> = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels[name!] = value!.replace(/\\(.)/g, (_, c: string) => (c === "n" ? "\n" : c));
    }
    const samples = metrics.get(match[1]!) ?? [];
    samples.push({ labels, value: Number(match[3]!.replace("+Inf", "Infinity")) });
    metrics.set(match[1]!, samples);
  }
  return metrics;
}

/** Sum over all labels; 0 if the metric is absent. */
export function total(metrics: Metrics, name: string): number {
  return (metrics.get(name) ?? []).reduce((sum, sample) => sum + sample.value, 0);
}

/**
 * Quantile of the values that a histogram gained between two readings; null if it gained none. Linear within a bucket,
 * as Prometheus' histogram_quantile.
 */
export function quantile(before: Metrics, now: Metrics, name: string, q: number): number | null {
  const bounds = (now.get(`${name}_bucket`) ?? []).map(({ labels, value }) => {
    const earlier = before.get(`${name}_bucket`)?.find((sample) => sample.labels["le"] === labels["le"]);
    return { le: Number(labels["le"]?.replace("+Inf", "Infinity")), count: value - (earlier?.value ?? 0) };
  });
  bounds.sort((a, b) => a.le - b.le);
  const count = bounds.at(-1)?.count ?? 0;
  if (count <= 0) return null;
  const rank = q * count;
  const index = bounds.findIndex((bound) => bound.count >= rank);
  const [lower, upper] = [bounds[index - 1] ?? { le: 0, count: 0 }, bounds[index]!];
  if (upper.le === Infinity) return lower.le;
  const share = (rank - lower.count) / Math.max(1e-9, upper.count - lower.count);
  return lower.le + (upper.le - lower.le) * share;
}
