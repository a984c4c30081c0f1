// TeX as browsers can draw it: a tree of MathML elements. What is not known here is shown as it was written.

export type MathNode = { tag: string; attributes?: Record<string, string>; children: MathNode[] | string };

const node = (tag: string, children: MathNode[] | string, attributes?: Record<string, string>): MathNode =>
  attributes ? { tag, children, attributes } : { tag, children };

const GREEK: Record<string, string> = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ",
  vartheta: "ϑ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ",
  tau: "τ", upsilon: "υ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ",
  Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", infty: "∞", partial: "∂",
  nabla: "∇", hbar: "ℏ", ell: "ℓ", emptyset: "∅", Re: "ℜ", Im: "ℑ",
};
const OPERATORS: Record<string, string> = {
  cdot: "⋅", times: "×", div: "÷", pm: "±", mp: "∓", leq: "≤", le: "≤", geq: "≥", ge: "≥", neq: "≠", ne: "≠",
  approx: "≈", equiv: "≡", sim: "∼", propto: "∝", to: "→", rightarrow: "→", leftarrow: "←", Rightarrow: "⇒",
  implies: "⟹", iff: "⟺", leftrightarrow: "↔", mapsto: "↦", in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆",
  cup: "∪", cap: "∩", forall: "∀", exists: "∃", neg: "¬", land: "∧", lor: "∨", cdots: "⋯", ldots: "…", dots: "…",
  circ: "∘", ast: "∗", star: "⋆", oplus: "⊕", otimes: "⊗", ll: "≪", gg: "≫", mid: "∣", parallel: "∥", perp: "⊥",
  angle: "∠", langle: "⟨", rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", prime: "′", degree: "°",
  "{": "{", "}": "}", "|": "‖", "%": "%", "#": "#", "&": "&", $: "$", _: "_",
};
/** Operators whose limits stand above and below. */
const LARGE: Record<string, string> = { sum: "∑", prod: "∏", int: "∫", oint: "∮", bigcup: "⋃", bigcap: "⋂" };
const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp det dim ker gcd deg arg".split(" "),
);
const LIMITS = new Set(["lim", "max", "min", "sup", "inf", "argmax", "argmin"]);
const SPACES: Record<string, string> = { ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.25em", quad: "1em", qquad: "2em", "!": "0" };
const ACCENTS: Record<string, string> = { hat: "^", bar: "¯", overline: "¯", vec: "→", tilde: "~", dot: "˙", ddot: "¨" };
const VARIANTS: Record<string, string> = {
  mathrm: "normal", mathbf: "bold", mathbb: "double-struck", mathcal: "script", mathit: "italic", operatorname: "normal",
  boldsymbol: "bold", mathsf: "sans-serif", mathtt: "monospace",
};
const TABLES: Record<string, [string, string]> = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], cases: ["{", ""], aligned: ["", ""],
  align: ["", ""], "align*": ["", ""], gathered: ["", ""],
};
const MAX_LENGTH = 4000;
const MAX_DEPTH = 30;

/** Returns the elements of a formula; null if it has something that is not known here. */
export function parseMath(tex: string): MathNode[] | null {
  if (tex.length > MAX_LENGTH) return null;
  try {
    const parser = new Parser(tex);
    const nodes = parser.row(() => false, 0);
    return parser.isAtEnd ? nodes : null;
  } catch {
    return null;
  }
}

class Parser {
  private readonly tokens: string[];
  private at = 0;

  constructor(tex: string) {
    this.tokens = tex.match(/\\(?:[A-Za-z]+\*?|[\s\S])|\d+(?:\.\d+)?|\s+|[\s\S]/gu) ?? [];
  }

  get isAtEnd(): boolean {
    return this.at >= this.tokens.length;
  }

  private peek(): string {
    while (/^\s+$/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at] ?? "";
  }

  private take(expected?: string): string {
    const token = this.peek();
    if (token === "" || (expected !== undefined && token !== expected)) throw new Error(`expected ${expected}`);
    this.at++;
    return token;
  }

  row(ends: (token: string) => boolean, depth: number): MathNode[] {
    if (depth > MAX_DEPTH) throw new Error("too deep");
    const nodes: MathNode[] = [];
    while (this.peek() !== "" && !ends(this.peek())) nodes.push(this.scripted(depth));
    return nodes;
  }

  /** An atom with its subscript and superscript. */
  private scripted(depth: number): MathNode {
    const name = this.peek().slice(1);
    const base = this.atom(depth);
    let below: MathNode | null = null;
    let above: MathNode | null = null;
    for (;;) {
      if (this.peek() === "_" && !below) below = (this.take(), this.argument(depth));
      else if (this.peek() === "^" && !above) above = (this.take(), this.argument(depth));
      else if (this.peek() === "'" && !above) above = (this.take(), node("mo", "′"));
      else break;
    }
    if (!below && !above) return base;
    const isStacked = name in LARGE && !name.endsWith("int") ? true : LIMITS.has(name);
    const parts = [base, ...(below ? [below] : []), ...(above ? [above] : [])];
    const both = isStacked ? "munderover" : "msubsup";
    return node(below && above ? both : below ? (isStacked ? "munder" : "msub") : isStacked ? "mover" : "msup", parts);
  }

  private argument(depth: number): MathNode {
    if (this.peek() !== "{") return this.atom(depth + 1);
    return this.group(depth);
  }

  private group(depth: number): MathNode {
    this.take("{");
    const nodes = this.row((token) => token === "}", depth + 1);
    this.take("}");
    return nodes.length === 1 ? nodes[0]! : node("mrow", nodes);
  }

  /** The characters of a group, as text. */
  private rawGroup(): string {
    this.take("{");
    let text = "";
    for (let token = this.tokens[this.at]; token !== undefined && token !== "}"; token = this.tokens[this.at]) {
      text += token;
      this.at++;
    }
    this.take("}");
    return text;
  }

  private atom(depth: number): MathNode {
    if (depth > MAX_DEPTH) throw new Error("too deep");
    const token = this.peek();
    if (token === "{") return this.group(depth);
    if (["}", "&", "^", "_", "", "\\\\"].includes(token)) throw new Error(`unexpected ${token}`);
    this.take();
    if (token.startsWith("\\")) return this.command(token.slice(1), depth);
    if (/^\d/.test(token)) return node("mn", token);
    return /\p{L}/u.test(token) ? node("mi", token) : node("mo", token === "-" ? "−" : token);
  }

  private command(name: string, depth: number): MathNode {
    if (name in GREEK) return node("mi", GREEK[name]!);
    if (name in OPERATORS) return node("mo", OPERATORS[name]!);
    if (name in LARGE) return node("mo", LARGE[name]!, { largeop: "true" });
    if (FUNCTIONS.has(name) || LIMITS.has(name)) return node("mi", name);
    if (name in SPACES) return node("mspace", [], { width: SPACES[name]! });
    if (name in ACCENTS) return node("mover", [this.argument(depth), node("mo", ACCENTS[name]!)], { accent: "true" });
    if (name in VARIANTS) return this.variant(name);
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
        return node("mfrac", [this.argument(depth), this.argument(depth)]);
      case "binom": {
        const [top, bottom] = [this.argument(depth), this.argument(depth)];
        return node("mrow", [node("mo", "("), node("mfrac", [top, bottom], { linethickness: "0" }), node("mo", ")")]);
      }
      case "sqrt":
        return this.root(depth);
      case "text":
      case "textbf":
      case "textit":
        return node("mtext", this.rawGroup().replace(/^ | $/g, "\u00a0"));
      case "left":
        return this.fenced(depth);
      case "begin":
        return this.table(this.rawGroup(), depth);
      case "displaystyle":
      case "limits":
        return node("mrow", []);
    }
    throw new Error(`unknown command ${name}`);
  }

  private variant(name: string): MathNode {
    const text = this.peek() === "{" ? this.rawGroup() : this.take();
    if (/[\\^_]/.test(text)) throw new Error("commands in a variant");
    return node("mi", text, { class: `math-${VARIANTS[name]}` });
  }

  private root(depth: number): MathNode {
    if (this.peek() !== "[") return node("msqrt", [this.argument(depth)]);
    this.take();
    const degree = this.row((token) => token === "]", depth + 1);
    this.take("]");
    return node("mroot", [this.argument(depth), node("mrow", degree)]);
  }

  private fenced(depth: number): MathNode {
    const open = this.fence();
    const inside = this.row((token) => token === "\\right", depth + 1);
    this.take("\\right");
    const close = this.fence();
    return node("mrow", [open, ...inside, close]);
  }

  private fence(): MathNode {
    const token = this.take();
    const shown = token.startsWith("\\") ? OPERATORS[token.slice(1)] : token;
    if (shown === undefined) throw new Error(`unknown fence ${token}`);
    return node("mo", shown === "." ? "" : shown, { stretchy: "true" });
  }

  private table(name: string, depth: number): MathNode {
    const fences = TABLES[name];
    if (!fences) throw new Error(`unknown environment ${name}`);
    const rows: MathNode[] = [];
    let cells: MathNode[] = [];
    for (;;) {
      cells.push(node("mtd", this.row((token) => ["&", "\\\\", "\\end"].includes(token), depth + 1)));
      const end = this.take();
      if (end === "&") continue;
      rows.push(node("mtr", cells));
      cells = [];
      if (end === "\\end") break;
      if (this.peek() === "\\end") {
        this.take();
        break;
      }
    }
    if (this.rawGroup() !== name) throw new Error("environments overlap");
    const table = node("mtable", rows, name === "cases" || name.startsWith("align") ? { columnalign: "left" } : {});
    const [open, close] = fences.map((fence) => node("mo", fence, { stretchy: "true" }));
    return node("mrow", [open!, table, close!]);
  }
}
