// Starts the page.

import { render } from "preact";
import { App } from "./app";
import { loadConversations } from "./state/actions";
import { connect } from "./state/connection";

const root = document.getElementById("app");
if (root) render(<App />, root);
void connect();
void loadConversations();
