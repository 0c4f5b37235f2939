import { PINNED, below, bench, close, load, runtimeFiles, verify } from "./edgeq.mjs";
import { infer, pixelsOf, whyNoPictures } from "./answer.mjs";
import { decode, toJson, whyNot } from "./decode.mjs";
import { draw, listOf, sentenceOf, tableOf } from "./draw.mjs";

// Run the page: ?provider=webgpu opens the model there; ?seconds=3 measures times, for 60 s at most; ?post=PATH sends the
// result as JSON to a path below the page's folder, without cookies.

const asked = new URLSearchParams(location.search);
const provider = asked.get("provider") ?? "wasm";
const seconds = Number(asked.get("seconds") ?? 0);
const base = new URL("./", location.href);
const threads = globalThis.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
const report = {
  provider,
  page: { isolated: Boolean(globalThis.crossOriginIsolated), secure: isSecureContext, cores: navigator.hardwareConcurrency },
  browser: navigator.userAgent,
};
const $ = (name) => document.getElementById(name);
const ms = (value) => (value === null ? "–" : value < 10 ? value.toFixed(3) : value.toFixed(1));

function say(place, text, kind = "") {
  if (place.textContent !== text) place.textContent = text; // a screen reader reads each change
  place.className = kind;
}

function showChecks() {
  $("tables").replaceChildren();
  const table = (...given) => $("tables").append(...tableOf(...given));
  const { model, files, selftest, figures, page } = report;
  if (selftest) table("Self-test", ["case", "output", "values", "equal", "result"], selftest.checks.map((one) => [one.case, one.output, one.values, one.equal, one.passed ? "passed" : one.reason]));
  if (figures) {
    table(
      "Milliseconds",
      ["threads", "open", "first run", "p50", "p90", "p99", "samples", "runs each", "warm-up", "clock step"],
      figures.map((one) => [one.threads, ms(one.open_ms), ms(one.first_run_ms), ms(one.p50_ms), ms(one.p90_ms), ms(one.p99_ms), one.samples, one.runs_per_sample, one.steady ? one.warm_up_runs : `${one.warm_up_runs}, not steady`, ms(one.clock_step_ms)]),
    );
  }
  if (files) table("Files", ["file", "bytes", "SHA-256"], files.map(({ path, bytes, sha256 }) => [path, bytes, `${sha256.slice(0, 16)}…`]));
  const alone = page.isolated ? "yes" : "no: one thread alone, and a coarse clock. Send the headers in headers.txt";
  table("Page", ["what", "value"], [["build", model?.build ?? "–"], ["isolated", alone], ["cores", String(page.cores)], ["runtime", model?.runtime ?? "–"], ["provider", provider], ["browser", report.browser]]);
}

async function measure(time) {
  report.figures = [];
  for (const count of report.page.isolated ? [1, 2, 4] : [1]) {
    say($("state"), `Measuring with ${count} thread${count > 1 ? "s" : ""}…`);
    const model = await load(base, { threads: count, provider });
    report.figures.push(await bench(model, { seconds: time }));
    await close(model);
    showChecks();
  }
}

/** Let people give pictures to the model, and show its answers. */
class Work {
  constructor(model) {
    this.model = model;
    this.head = model.manifest.head;
    this.mute = whyNot(this.head);
    this.last = null; // {picture, outputs, frame, answer, ...} of the picture in view
    this.stream = null;
    this.turn = Promise.resolve();
    this.thresholds = {};
  }

  start() {
    $("work").hidden = false;
    const why = whyNoPictures(this.model.manifest.preprocessing);
    if (why) {
      $("stage").hidden = true;
      say($("summary"), `The page cannot prepare pictures for this model: ${why}.`);
      $("checks").open = true;
      return;
    }
    const give = (file) => file && this.show(file).catch((error) => this.refuse(error));
    $("file").addEventListener("change", (event) => (give(event.target.files[0]), (event.target.value = "")));
    document.addEventListener("paste", (event) => give([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
    for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
      document.addEventListener(name, (event) => {
        event.preventDefault();
        $("frame").classList.toggle("over", name.startsWith("drage") || name === "dragover");
        if (name === "drop") give(event.dataTransfer.files[0]);
      });
    }
    $("camera").hidden = !navigator.mediaDevices?.getUserMedia;
    $("camera").addEventListener("click", () => (this.stream ? this.stop() : this.watch().catch((error) => this.refuse(error))));
    $("threshold").addEventListener("input", () => {
      this.thresholds = { confidence: Number($("threshold").value) };
      this.update();
    });
    $("json").addEventListener("click", () => copy($("json"), this.json()));
    addEventListener("resize", () => this.last && draw($("canvas"), this.last.picture, this.last.answer));
  }

  /** Answer a picture. Pictures wait for each other, because a session runs one at a time. */
  show(source, live = false) {
    if (!live) this.stop();
    this.turn = this.turn.catch(() => null).then(async () => {
      if (!live) say($("summary"), "Working…");
      const picture = await pixelsOf(source);
      this.last = { picture, ...(await infer(this.model, picture)) };
      this.update(live);
    });
    return this.turn;
  }

  update(live = false) {
    if (!this.last) return;
    const { outputs, frame, prepare_ms, run_ms } = this.last;
    const start = performance.now();
    this.last.answer = this.mute ? null : decode(outputs, this.head, frame, this.thresholds);
    const { answer, picture } = this.last;
    $("canvas").hidden = false;
    $("drop").hidden = true;
    draw($("canvas"), picture, answer);
    const after = performance.now() - start;
    const sentence = answer ? sentenceOf(answer) : `The page shows the outputs themselves, because ${this.mute}.`;
    // A camera must not make a screen reader talk without a pause.
    if (!live || performance.now() - (this.told ?? 0) > 2000) {
      say($("summary"), sentence);
      this.told = performance.now();
    }
    $("canvas").setAttribute("aria-label", sentence);
    say($("time"), `${run_ms.toFixed(0)} ms for the model, ${(prepare_ms + after).toFixed(0)} ms around it, ${picture.width} × ${picture.height} pixels`, "note");
    $("found").replaceChildren(...(answer ? [listOf(answer, (only) => draw($("canvas"), picture, answer, only))] : this.tables(outputs)));
    const objects = answer && !answer.top.length && answer.text === null && answer.task !== "classify";
    $("limit").hidden = !objects;
    if (objects) {
      const shown = this.thresholds.confidence ?? this.head.thresholds?.confidence ?? 0.25;
      $("threshold").value = shown;
      $("shown").value = Number($("threshold").value).toFixed(2);
    }
    $("json").disabled = false;
  }

  tables(outputs) {
    const rows = Object.entries(outputs).map(([name, { type, shape, data }]) => {
      const values = Array.from(data, Number);
      const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
      return [name, `${type} [${shape}]`, low.toPrecision(4), high.toPrecision(4)];
    });
    return tableOf("Outputs", ["name", "type", "least", "largest"], rows);
  }

  json() {
    const { answer, outputs } = this.last;
    return answer ? toJson(answer) : Object.fromEntries(Object.entries(outputs).map(([name, { type, shape, data }]) => [name, { type, shape, data: Array.from(data, Number) }]));
  }

  async watch() {
    this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" }, audio: false });
    const { stream } = this;
    say($("camera"), "Stop the camera");
    const video = Object.assign(document.createElement("video"), { srcObject: stream, muted: true, playsInline: true });
    await video.play();
    while (this.stream === stream) {
      await this.show(video, true);
      await new Promise((done) => requestAnimationFrame(done));
    }
  }

  stop() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    say($("camera"), "Use the camera");
  }

  refuse(error) {
    this.stop();
    const denied = { NotAllowedError: "The browser does not permit the camera.", NotFoundError: "There is no camera.", InvalidStateError: "This file is not a picture that the browser can read." };
    say($("summary"), denied[error?.name] ?? `Refused: ${String(error?.message ?? error)}`, "failed");
  }
}

async function copy(button, value) {
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  const done = await navigator.clipboard.writeText(JSON.stringify(value, null, 1)).then(() => "Copied", () => "Not permitted");
  say(button, done, button.className);
  setTimeout(() => say(button, label, button.className), 1500);
}

async function main() {
  let model = await load(base, { provider });
  const { manifest } = model;
  const title = String(manifest.name || manifest.title);
  $("title").textContent = title;
  document.title = title;
  report.model = { title, build: manifest.title, runtime: `${PINNED.package} ${PINNED.version}` };
  report.files = [...manifest.model, manifest.selftest, ...runtimeFiles(provider)].map(({ path, bytes, sha256 }) => ({ path, bytes, sha256 }));
  report.timings = model.timings;
  say($("state"), "Running the self-test…");
  report.selftest = await verify(model);
  if (threads > 1 && provider === "wasm") {
    await close(model);
    model = await load(base, { provider, threads });
  }
  showChecks();
  new Work(model).start();
  if (seconds > 0 && provider === "wasm") await measure(seconds);
  const { passed, reason } = report.selftest;
  const what = provider === "wasm" ? "every output equals the stored one" : "the outputs follow the stored ones. Nothing is timed there";
  say($("state"), passed ? `Passed: ${what}.` : `Failed: ${reason}.`, passed ? "passed" : "failed");
}

async function post() {
  const place = asked.get("post");
  if (!place) return;
  const headers = { "Content-Type": "application/json" };
  const only = { mode: "same-origin", credentials: "omit", redirect: "error" };
  await fetch(below(base, place), { method: "POST", headers, body: JSON.stringify(report), ...only });
}

$("served").hidden = true;
try {
  await main();
} catch (error) {
  report.error = String(error?.message ?? error);
  say($("state"), `Refused: ${report.error}`, "failed");
  $("checks").open = true;
  showChecks();
}
window.report = report;
await post();
$("again").disabled = Boolean(report.error) || provider !== "wasm";
$("copy").disabled = false;
$("again").addEventListener("click", async () => {
  $("again").disabled = true;
  await measure(seconds || 1);
  say($("state"), "Measured.", "passed");
  $("again").disabled = false;
});
$("copy").addEventListener("click", () => copy($("copy"), report));
