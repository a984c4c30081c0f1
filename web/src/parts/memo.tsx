// A component that is drawn again only if one of its properties has changed.

import { Component, type FunctionComponent } from "preact";

export function memo<P extends object>(draw: FunctionComponent<P>): FunctionComponent<P> {
  class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      const before = this.props as Record<string, unknown>;
      const after = next as Record<string, unknown>;
      const names = new Set([...Object.keys(before), ...Object.keys(after)]);
      return [...names].some((name) => name !== "children" && before[name] !== after[name]);
    }

    override render(props: P) {
      const Draw = draw as FunctionComponent<object>;
      return <Draw {...props} />;
    }
  }
  return Memo as unknown as FunctionComponent<P>;
}
