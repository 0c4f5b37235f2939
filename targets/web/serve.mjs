// Serve this folder on this machine alone, with the headers that threads need: node serve.mjs [PORT]
//
// A server of your own needs the same two headers on the page, and the type of .wasm and .mjs files.

import fs from "node:fs/promises";
import http from "node:http";
import path from "node:path";
import { fileURLToPath } from "node:url";

const ROOT = path.dirname(fileURLToPath(import.meta.url));
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Content-Security-Policy": "frame-ancestors 'none'",
  "X-Content-Type-Options": "nosniff",
};
const TYPES = {
  ".css": "text/css; charset=utf-8",
  ".html": "text/html; charset=utf-8",
  ".json": "application/json",
  ".mjs": "text/javascript; charset=utf-8",
  ".wasm": "application/wasm",
};

const server = http.createServer(async (request, response) => {
  try {
    const name = decodeURIComponent(new URL(request.url, "http://localhost").pathname);
    const file = path.join(ROOT, name.endsWith("/") ? `${name}index.html` : name);
    if (!file.startsWith(ROOT + path.sep)) throw new Error("it leads out of the folder");
    if (!(await fs.stat(file)).isFile()) throw new Error("it is not a regular file");
    const content = await fs.readFile(file);
    const type = TYPES[path.extname(file)] ?? "application/octet-stream";
    response.writeHead(200, { ...HEADERS, "Content-Type": type }).end(content);
  } catch {
    response.writeHead(404, HEADERS).end();
  }
});

const port = Number(process.argv[2] ?? 8000);
server.listen(port, "127.0.0.1", () => console.log(`http://localhost:${server.address().port}/`));
