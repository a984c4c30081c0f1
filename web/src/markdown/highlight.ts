// Colors for code: comments, strings, numbers and keywords, by rules that hold for most languages.

export type CodeKind = "comment" | "string" | "number" | "keyword" | "name" | "plain";
export interface CodePiece {
  kind: CodeKind;
  text: string;
}

const KEYWORDS = new Set(
  (
    "abstract and as async await begin bool boolean break case catch char class const constexpr continue crate def " +
    "default defer del delete do done double dyn echo elif else elseif end enum esac except export extends false " +
    "False fi final finally float fn for foreach from func function global go goto if impl implements import in " +
    "inline instanceof int interface is lambda let long loop match mod module mut namespace new nil None nonlocal " +
    "not null nullptr of operator or override package pass private protected pub public raise readonly ref return " +
    "select self Self short signed sizeof static string struct super switch template then this throw throws trait " +
    "true True try type typedef typename typeof undefined union unless unsafe unsigned until use using var virtual " +
    "void volatile when where while with yield " +
    "SELECT FROM WHERE AND OR NOT INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT INNER ON GROUP BY " +
    "ORDER LIMIT AS NULL PRIMARY KEY"
  ).split(" "),
);

/** Languages whose comments begin with `#`. */
const HASH = /^(py|python|sh|bash|zsh|shell|console|yaml|yml|toml|ruby|rb|perl|r|make|makefile|dockerfile|ini|conf)$/i;
/** Languages whose comments begin with `--`. */
const DASHES = /^(sql|lua|haskell|hs|elm)$/i;

const COMMON = [
  /(?<string>"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\[\s\S])*`)/,
  /(?<number>\b0[xX][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b)/,
  /(?<word>[A-Za-z_]\w*)/,
];
const COMMENTS = {
  hash: /(?<comment>#[^\n]*)/,
  dashes: /(?<comment>--[^\n]*)/,
  slashes: /(?<comment>\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)|<!--[\s\S]*?(?:-->|$))/,
};

export function highlight(code: string, language: string): CodePiece[] {
  if (/^(text|txt|plain|output|)$/i.test(language) || code.length > 50_000) return [{ kind: "plain", text: code }];
  const comment = HASH.test(language) ? COMMENTS.hash : DASHES.test(language) ? COMMENTS.dashes : COMMENTS.slashes;
  const pattern = new RegExp([comment, ...COMMON].map(({ source }) => source).join("|"), "g");
  const pieces: CodePiece[] = [];
  let last = 0;
  for (const match of code.matchAll(pattern)) {
    if (match.index > last) pieces.push({ kind: "plain", text: code.slice(last, match.index) });
    last = match.index + match[0].length;
    pieces.push({ kind: kindOf(match, code[last]), text: match[0] });
  }
  if (last < code.length) pieces.push({ kind: "plain", text: code.slice(last) });
  return pieces;
}

function kindOf(match: RegExpExecArray, next: string | undefined): CodeKind {
  const groups = match.groups ?? {};
  if (groups["comment"] !== undefined) return "comment";
  if (groups["string"] !== undefined) return "string";
  if (groups["number"] !== undefined) return "number";
  if (KEYWORDS.has(match[0])) return "keyword";
  return next === "(" ? "name" : "plain";
}
