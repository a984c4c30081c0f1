// A line chart of the last minutes.

export interface Series {
  name: string;
  /** Null where nothing was measured. */
  values: (number | null)[];
}

const WIDTH = 320;
const HEIGHT = 96;

export function LineChart({
  title,
  series,
  format,
}: {
  title: string;
  series: Series[];
  format: (value: number) => string;
}) {
  const all = series.flatMap((one) => one.values).filter((value): value is number => value !== null);
  const top = Math.max(1e-9, ...all);
  const count = Math.max(2, ...series.map((one) => one.values.length));
  const x = (i: number, length: number) => ((i + count - length) * WIDTH) / (count - 1);
  const y = (value: number) => HEIGHT - 4 - ((HEIGHT - 10) * value) / top;
  const last = (one: Series) => one.values.findLast((value) => value !== null) ?? null;
  const label = `${title}: ${series.map((one) => `${one.name} ${shown(last(one), format)}`).join(", ")}`;
  return (
    <figure class="card">
      <figcaption>{title}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} class="wide" role="img" aria-label={label} preserveAspectRatio="none">
        <line class="axis" x1={0} x2={WIDTH} y1={HEIGHT - 4} y2={HEIGHT - 4} />
        {series.map((one, i) => (
          <path key={one.name} class={`line line-${i}`} d={pathOf(one.values, (j) => x(j, one.values.length), y)} />
        ))}
      </svg>
      <ul class="series">
        {series.map((one, i) => (
          <li key={one.name}>
            <span class={`swatch line-${i}`} /> {one.name} <b>{shown(last(one), format)}</b>
          </li>
        ))}
      </ul>
      <p class="hint">highest {all.length > 0 ? format(top) : "–"}</p>
    </figure>
  );
}

const shown = (value: number | null, format: (value: number) => string) => (value === null ? "–" : format(value));

function pathOf(values: (number | null)[], x: (i: number) => number, y: (value: number) => number): string {
  let isDown = false;
  return values
    .map((value, i) => {
      if (value === null) {
        isDown = false;
        return "";
      }
      const command = isDown ? "L" : "M";
      isDown = true;
      return `${command}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    })
    .join("");
}
