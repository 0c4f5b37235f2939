import { PINNED, below, bench, close, load, runtimeFiles, verify } from "./edgeq.mjs";

// Run the page: ?provider=webgpu opens the model there; ?seconds=3 measures longer, for 60 at most; ?post=PATH sends the
// result as JSON to a path below the page's folder, without cookies.

const asked = new URLSearchParams(location.search);
const provider = asked.get("provider") ?? "wasm";
const seconds = Number(asked.get("seconds") ?? 1);
const base = new URL("./", location.href);
const report = {
  provider,
  page: { isolated: Boolean(globalThis.crossOriginIsolated), secure: isSecureContext, cores: navigator.hardwareConcurrency },
  browser: navigator.userAgent,
};

const element = (name, text, kind = "") => Object.assign(document.createElement(name), { textContent: text, className: kind });
const ms = (value) => (value === null ? "–" : value < 10 ? value.toFixed(3) : value.toFixed(1));

function state(text, kind = "") {
  const place = document.querySelector("#state");
  place.textContent = text;
  place.className = kind;
}

function table(title, heads, rows) {
  const made = document.createElement("table");
  const head = made.createTHead().insertRow();
  for (const text of heads) head.append(element("th", text));
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) line.append(element("td", String(cell), typeof cell === "number" || /^(–|[\d]+\.[\d]+)$/.test(cell) ? "n" : ""));
  }
  document.querySelector("#tables").append(element("h2", title), made);
}

function show() {
  document.querySelector("#tables").replaceChildren();
  const { model, files, selftest, figures, page } = report;
  if (files) table("Files", ["file", "bytes", "SHA-256"], files.map(({ path, bytes, sha256 }) => [path, bytes, `${sha256.slice(0, 16)}…`]));
  if (selftest) {
    table("Self-test", ["case", "output", "values", "equal", "result"], selftest.checks.map((one) => [one.case, one.output, one.values, one.equal, one.passed ? "passed" : one.reason]));
  }
  if (figures) {
    table(
      "Milliseconds",
      ["threads", "open", "first run", "p50", "p90", "p99", "samples", "runs each", "warm-up", "clock step"],
      figures.map((one) => [one.threads, ms(one.open_ms), ms(one.first_run_ms), ms(one.p50_ms), ms(one.p90_ms), ms(one.p99_ms), one.samples, one.runs_per_sample, one.steady ? one.warm_up_runs : `${one.warm_up_runs}, not steady`, ms(one.clock_step_ms)]),
    );
  }
  const threads = page.isolated ? "yes" : "no: one thread alone, and a coarse clock. Send the headers in headers.txt";
  table("Page", ["what", "value"], [["isolated", threads], ["cores", String(page.cores)], ["runtime", model?.runtime ?? "–"], ["provider", provider], ["browser", report.browser]]);
}

async function measure() {
  const counts = report.page.isolated ? [1, 2, 4] : [1];
  report.figures = [];
  for (const threads of counts) {
    state(`Measuring with ${threads} thread${threads > 1 ? "s" : ""}…`);
    const model = await load(base, { threads, provider });
    report.figures.push(await bench(model, { seconds }));
    await close(model);
    show();
  }
}

async function main() {
  const model = await load(base, { provider });
  const { manifest } = model;
  document.querySelector("#title").textContent = manifest.title;
  document.title = `edgeq: ${manifest.title}`;
  report.model = { title: manifest.title, runtime: `${PINNED.package} ${PINNED.version}` };
  report.files = [...manifest.model, manifest.selftest, ...runtimeFiles(provider)].map(({ path, bytes, sha256 }) => ({ path, bytes, sha256 }));
  report.timings = model.timings;
  state("Running the self-test…");
  report.selftest = await verify(model);
  await close(model);
  show();
  if (seconds > 0 && provider === "wasm") await measure();
  const { passed, reason } = report.selftest;
  const what = provider === "wasm" ? "every output equals the stored one" : "the outputs follow the stored ones. Nothing is timed there";
  state(passed ? `Passed: ${what}.` : `Failed: ${reason}.`, passed ? "passed" : "failed");
}

async function post() {
  const place = asked.get("post");
  if (!place) return;
  const headers = { "Content-Type": "application/json" };
  const only = { mode: "same-origin", credentials: "omit", redirect: "error" };
  await fetch(below(base, place), { method: "POST", headers, body: JSON.stringify(report), ...only });
}

try {
  await main();
} catch (error) {
  report.error = String(error?.message ?? error);
  state(`Refused: ${report.error}`, "failed");
  show();
}
window.report = report;
await post();
for (const [name, does] of [["#again", () => measure().then(() => state("Measured again."))], ["#copy", () => navigator.clipboard.writeText(JSON.stringify(report, null, 1))]]) {
  const button = document.querySelector(name);
  button.disabled = (Boolean(report.error) || provider !== "wasm") && name === "#again";
  button.addEventListener("click", does);
}
