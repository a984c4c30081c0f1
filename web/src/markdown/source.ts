// Text of a reply that remembers where it came from, so that every rendered character leads to its token.

/** Characters with the offset of each in the reply. */
export class Source {
  constructor(
    readonly text: string,
    readonly offsets: readonly number[],
  ) {}

  static of(text: string, at: number): Source {
    return new Source(
      text,
      Array.from({ length: text.length }, (_, i) => at + i),
    );
  }

  slice(start: number, end = this.text.length): Source {
    return new Source(this.text.slice(start, end), this.offsets.slice(start, end));
  }

  /** Joins lines with line ends between them. */
  static join(lines: readonly Source[]): Source {
    const offsets: number[] = [];
    lines.forEach((line, i) => {
      if (i > 0) offsets.push((offsets.at(-1) ?? 0) + 1);
      for (const offset of line.offsets) offsets.push(offset);
    });
    return new Source(lines.map((line) => line.text).join("\n"), offsets);
  }

  /** Cuts the text where its offsets are not consecutive. */
  runs(): Leaf[] {
    const leaves: Leaf[] = [];
    let start = 0;
    for (let i = 1; i <= this.text.length; i++) {
      if (i < this.text.length && this.offsets[i] === (this.offsets[i - 1] ?? 0) + 1) continue;
      leaves.push({ text: this.text.slice(start, i), at: this.offsets[start] ?? 0 });
      start = i;
    }
    return leaves;
  }
}

/** Consecutive characters of the reply. */
export interface Leaf {
  text: string;
  at: number;
}
