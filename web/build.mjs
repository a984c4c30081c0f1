// Builds the page: `node build.mjs FOLDER` writes index.html, app.js and app.css.
// The output depends on the sources and the pinned versions alone, so that a check can rebuild and compare it.
import { build } from "esbuild";
import { copyFile, mkdir } from "node:fs/promises";
import { join } from "node:path";

const folder = process.argv[2];
if (folder === undefined) {
  console.error("usage: node build.mjs FOLDER");
  process.exit(2);
}
await mkdir(folder, { recursive: true });
const common = { bundle: true, minify: true, legalComments: "none", charset: "utf8", logLevel: "warning" };
await build({
  ...common,
  entryPoints: ["src/main.tsx"],
  outfile: join(folder, "app.js"),
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
});
await build({ ...common, entryPoints: ["style/app.css"], outfile: join(folder, "app.css"), target: "es2022" });
await copyFile("src/index.html", join(folder, "index.html"));
