// Draws a formula with the browser's own MathML, or as text if it cannot be parsed.

import { type ComponentChildren, createElement } from "preact";
import { useMemo } from "preact/hooks";
import { type MathNode, parseMath } from "./math";

interface Props {
  tex: string;
  isDisplay: boolean;
  children: ComponentChildren;
}

export function Formula({ tex, isDisplay, children }: Props) {
  const nodes = useMemo(() => parseMath(tex), [tex]);
  const name = isDisplay ? "math-box display" : "math-box";
  if (nodes === null) return <span class={`${name} source`}>{children}</span>;
  const formula = createElement("math", { display: isDisplay ? "block" : "inline" }, nodes.map(elementOf));
  // The source is the accessible text of browsers that read no MathML.
  return (
    <span class={name} title={tex.trim()}>
      {formula}
    </span>
  );
}

function elementOf({ tag, attributes, children }: MathNode, key: number): ComponentChildren {
  return createElement(tag, { ...attributes, key }, typeof children === "string" ? children : children.map(elementOf));
}
