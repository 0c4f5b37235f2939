// Check, open, run and time a model in ONNX Runtime Web: in a browser and in node, without other packages.
//
//   const model = await load(new URL("./", import.meta.url));   checks every file against its SHA-256 first
//   const report = await verify(model);                         the self-test: outputs equal to the stored ones
//   const feeds = prepare(model, { type: "uint8", shape: [32, 32, 3], data });   the recipe's steps, as in Python
//   const outputs = await run(model, feeds);                    as {name: {type, shape, data}}, like its inputs
//   const figures = await bench(model);                         milliseconds: first run, p50, p90, p99
//
// The checked bytes are loaded: nothing is fetched a second time. The check protects files in transit and in caches.
// It trusts the origin, because anyone who can change this file can change the check. Only files that are pinned in
// this file become code; edgeq-web.json lists data.

/** The pinned package: {package, version, runtimes: {provider: [{path, sha256, bytes}]}}. edgeq writes it here. */
export const PINNED = null;
const MANIFEST = "edgeq-web.json";
const MOST_MANIFEST = 2 ** 24;
const MOST_BYTES = 2 ** 31;
const MOST_SECONDS = 60;
const WARM_RUNS = 20;
const WINDOW = 10;
const STEADY = 0.05;
const LEAST_DB = 20;

/** Map ONNX Runtime Web's names of element types to the classes of arrays. */
export const TYPES = {
  float32: Float32Array,
  float64: Float64Array,
  float16: Uint16Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  bool: Uint8Array,
};

const inNode = typeof process === "object" && Boolean(process.versions?.node);

/** Refuse bytes whose SHA-256 is not the given one. Without crypto.subtle, refuse everything. */
export async function check(name, bytes, sha256) {
  const subtle = globalThis.crypto?.subtle;
  if (!subtle) {
    throw new Error(`${name} cannot be checked: there is no crypto.subtle here. Serve the page over https or from localhost`);
  }
  const digest = new Uint8Array(await subtle.digest("SHA-256", bytes));
  const found = [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  if (found !== sha256) {
    throw new Error(`${name} has the SHA-256 ${found.slice(0, 16)}…, not ${sha256.slice(0, 16)}…. Get it again`);
  }
}

/**
 * Return the URL of a file below the folder `base`. `path` is the file's name, with / between folders, and is not
 * decoded.
 */
export function below(base, path) {
  const names = String(path).split("/");
  if (names.some((name) => /^\.{0,2}$|[\\\0-\x1f]/.test(name))) throw new Error(`${path} leads out of the folder. Build the bundle again`);
  return new URL(names.map(encodeURIComponent).join("/"), new URL("./", base));
}

/** Return the bytes of a file below `base`. Refuse a file of more than `most` bytes, or without an end. */
async function read(base, path, most) {
  const url = below(base, path);
  const tooLong = () => new Error(`${path} has more than ${most} bytes. Build the bundle again`);
  if (url.protocol === "file:") {
    const fs = await import("node:fs/promises");
    const found = await fs.stat(url);
    if (!found.isFile()) throw new Error(`${path} is not a regular file`);
    if (found.size > most) throw tooLong();
    return new Uint8Array(await fs.readFile(url)); // a copy: small files share one buffer
  }
  const response = await fetch(url, { cache: "no-store" });
  if (!response.ok) throw new Error(`${path} cannot be read (HTTP ${response.status})`);
  const parts = [];
  let size = 0;
  const reader = response.body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    parts.push(part.value);
    size += part.value.length;
    if (size > most) {
      await reader.cancel();
      throw tooLong();
    }
  }
  const content = new Uint8Array(size);
  parts.reduce((place, part) => (content.set(part, place), place + part.length), 0);
  return content;
}

/** Read and check every listed file. Nothing runs before all of them are known to be correct. */
export async function readChecked(base, files) {
  const found = await Promise.all(
    files.map(async ({ path, sha256, bytes }) => {
      if (!(bytes >= 0 && bytes < MOST_BYTES)) throw new Error(`${path} has the size ${bytes} in the list of files. Build the bundle again`);
      const content = await read(base, path, bytes);
      await check(path, content, sha256);
      return content;
    }),
  );
  return found;
}

/** Return a URL from which checked code can be imported. In node, the URL leads to a file: node imports nothing else. */
async function codeUrl(bytes, name) {
  if (!inNode) return URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
  const [fs, os, path, { pathToFileURL }] = await Promise.all(
    ["node:fs", "node:os", "node:path", "node:url"].map((module) => import(module)),
  );
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "edgeq-web-"));
  process.on("exit", () => fs.rmSync(folder, { recursive: true, force: true }));
  fs.writeFileSync(path.join(folder, name), bytes, { flag: "wx" });
  return pathToFileURL(path.join(folder, name)).href;
}

/** Start ONNX Runtime Web from checked bytes, independently of any instance that already runs. */
export async function startRuntime([script, loader, wasm], threads = 1) {
  const ort = await import(await codeUrl(script, "ort.mjs"));
  ort.env.wasm.wasmBinary = wasm;
  ort.env.wasm.wasmPaths = { mjs: await codeUrl(loader, "loader.mjs") };
  ort.env.wasm.numThreads = threads;
  ort.env.logLevel = "error";
  return ort;
}

/** Return the options of a session. Each session needs its own, because ONNX Runtime Web adds to them. */
export function sessionOptions({ provider = "wasm", optimization = "all", config = {}, externalData, profiled = false } = {}) {
  const extra = Object.create(null); // here, __proto__ is a name like any other
  for (const [key, value] of Object.entries(config)) {
    const names = key.split(".");
    let table = extra;
    for (const name of names.slice(0, -1)) table = table[name] ??= Object.create(null);
    table[names.at(-1)] = value;
  }
  return {
    executionProviders: [provider],
    graphOptimizationLevel: { none: "disabled" }[optimization] ?? optimization,
    enableProfiling: profiled,
    ...(Object.keys(extra).length ? { extra } : {}),
    ...(externalData?.length ? { externalData } : {}),
  };
}

/** Turn {name: {type, shape, data}} into tensors. */
export function tensors(ort, feeds) {
  return Object.fromEntries(
    Object.entries(feeds).map(([name, { type, shape, data }]) => [name, new ort.Tensor(type, data, shape)]),
  );
}

/**
 * Check all files of a bundle's folder, then start the runtime and open the model.
 *
 * Options: threads (default 1), and provider, which is "wasm" or "webgpu". The two give close, but not identical answers.
 */
export async function load(base, { threads = 1, provider = "wasm" } = {}) {
  if (!globalThis.crypto?.subtle) await check(MANIFEST, new Uint8Array(), "");
  const manifest = JSON.parse(new TextDecoder().decode(await read(base, MANIFEST, MOST_MANIFEST)));
  const start = performance.now();
  const runtime = runtimeFiles(provider);
  const files = [manifest.selftest, ...manifest.model, ...runtime];
  const [selftest, ...rest] = await readChecked(base, files);
  const model = rest.slice(0, manifest.model.length);
  const checked = performance.now();
  const ort = await startRuntime(rest.slice(manifest.model.length), threads);
  const externalData = manifest.model.slice(1).map(({ path }, i) => ({ path, data: model[i + 1] }));
  const options = sessionOptions({ provider, externalData, ...manifest.session });
  const session = await ort.InferenceSession.create(model[0], options);
  const timings = { check_ms: checked - start, open_ms: performance.now() - checked, first_run_ms: null };
  return { manifest, provider, ort, session, timings, cases: casesOf(manifest.selftest.cases, selftest) };
}

/** Return the files of the pinned package that run `provider`, as they are below the page's folder. */
export function runtimeFiles(provider) {
  if (!PINNED) throw new Error("this edgeq.mjs does not pin a runtime. Use the one in a bundle");
  const { package: folder, runtimes } = PINNED;
  if (!Object.hasOwn(runtimes, provider)) throw new Error(`there is no runtime for ${provider}. Choose from ${Object.keys(runtimes)}`);
  return runtimes[provider].map((file) => ({ ...file, path: `node_modules/${folder}/${file.path}` }));
}

function casesOf(cases, bytes) {
  const tensor = ({ type, shape, offset }) => {
    const Array = known(TYPES, type);
    const length = shape.reduce((a, b) => a * b, 1);
    return { type, shape, data: new Array(bytes.slice(offset, offset + length * Array.BYTES_PER_ELEMENT).buffer) };
  };
  const all = (table) => Object.fromEntries(Object.entries(table).map(([name, entry]) => [name, tensor(entry)]));
  return cases.map(({ inputs, outputs }) => ({ inputs: all(inputs), outputs: all(outputs) }));
}

/** Run the model on {name: {type, shape, data}}. Return its outputs in the same form. */
export async function run(model, feeds) {
  const start = performance.now();
  const results = await model.session.run(tensors(model.ort, feeds));
  model.timings.first_run_ms ??= performance.now() - start;
  return Object.fromEntries(
    Object.entries(results).map(([name, { type, dims, data }]) => [name, { type, shape: [...dims], data }]),
  );
}

/**
 * Run the self-test: compare each output with the stored one, value by value.
 *
 * In wasm every value is the same on every machine. Elsewhere (exact: false) the SQNR of an output against the stored
 * one must be at least 20 dB.
 */
export async function verify(model, { exact = model.provider === "wasm" } = {}) {
  const checks = [];
  for (const [place, { inputs, outputs }] of model.cases.entries()) {
    const found = await run(model, inputs);
    for (const [name, want] of Object.entries(outputs)) checks.push({ case: place, output: name, ...compare(found[name], want, exact) });
  }
  const wrong = checks.find((one) => !one.passed);
  return { passed: checks.length > 0 && !wrong, reason: wrong ? `${wrong.output}: ${wrong.reason}` : "", checks };
}

function compare(found, want, exact) {
  const values = want.data.length;
  const failed = { passed: false, values, equal: 0, largest: null, sqnr_db: null };
  if (!found) return { ...failed, reason: "it is missing" };
  const alike = found.type === want.type && String(found.shape) === String(want.shape);
  if (!alike) return { ...failed, reason: `it is ${found.type} [${found.shape}], not ${want.type} [${want.shape}]` };
  let [equal, largest, signal, noise] = [0, 0, 0, 0];
  for (let i = 0; i < values; i++) {
    const right = Number(want.data[i]);
    const difference = Object.is(found.data[i], want.data[i]) ? 0 : Number(found.data[i]) - right;
    equal += Object.is(found.data[i], want.data[i]);
    largest = Math.max(largest, Math.abs(difference));
    signal += right * right;
    noise += difference * difference;
  }
  const sqnr_db = noise === 0 ? null : 10 * Math.log10(signal / noise);
  const passed = equal === values || (!exact && sqnr_db !== null && sqnr_db >= LEAST_DB);
  const reason = passed ? "" : `${values - equal} of ${values} values differ, by up to ${largest}`;
  return { passed, reason, values, equal, largest, sqnr_db };
}

/**
 * Turn one item (an image as rows of red, green and blue, or another array) into the model's input.
 *
 * The result has the same bytes as edgeq's result for the item. The caller decodes and resizes images, because browsers
 * do both differently. model.manifest.preprocessing.caller lists the steps that the caller must have done.
 */
export function prepare(model, item) {
  const { input, type, axes, steps } = model.manifest.preprocessing ?? {};
  if (!input) throw new Error("this preprocessing cannot be repeated here: see preprocessing.caller in edgeq-web.json");
  let state = { type: item.type, shape: [...item.shape], data: item.data, axes: item.axes ?? axes ?? "", channels: item.channels ?? "RGB" };
  if (state.axes.length !== state.shape.length) state.axes = { 2: "HW", 3: "HWC" }[state.shape.length] ?? "";
  for (const { op, ...options } of steps) state = known(STEPS, op)(state, options);
  const { shape, data } = asType(state, type);
  return { [input]: { type, shape, data } };
}

const count = (shape) => shape.reduce((a, b) => a * b, 1);
const FLOATS = ["float32", "float64"];

/** Return the entry of a table. A name such as "constructor" is in every object, but not in the table. */
function known(table, name) {
  if (!Object.hasOwn(table, name)) throw new Error(`${name} is unknown. Choose from ${Object.keys(table)}`);
  return table[name];
}

function asType(state, type) {
  return state.type === type ? state : { ...state, type, data: known(TYPES, type).from(state.data) };
}

/** Apply an operation with one constant, or one for each channel, in the array's float type. Integers become float32. */
function arithmetic(compute) {
  return (state, { value }) => {
    const { type, shape, data, axes, ...rest } = FLOATS.includes(state.type) ? state : asType(state, "float32");
    const constants = TYPES[type].from([value].flat());
    const axis = axes.includes("C") ? axes.indexOf("C") : shape.length - 1;
    const inner = constants.length > 1 ? count(shape.slice(axis + 1)) : data.length;
    if (constants.length > 1 && constants.length !== shape[axis]) throw new Error(`${constants.length} constants do not fit [${shape}]`);
    const result = new TYPES[type](data.length); // the array rounds each value once
    for (let i = 0; i < data.length; i++) result[i] = compute(data[i], constants[Math.floor(i / inner) % constants.length]);
    return { type, shape, data: result, axes, ...rest };
  };
}

/** Return an array of `shape`. Its value at each place is the old array's value at offset(place). */
function gathered(state, shape, offset, changes) {
  const data = new TYPES[state.type](count(shape));
  const place = shape.map(() => 0);
  for (let i = 0; i < data.length; i++) {
    data[i] = state.data[offset(place)];
    for (let axis = shape.length - 1; axis >= 0 && ++place[axis] === shape[axis]; axis--) place[axis] = 0;
  }
  return { ...state, shape, data, ...changes };
}

const stridesOf = (shape) => shape.map((_, axis) => count(shape.slice(axis + 1)));
const half = (value, rule) => {
  const [down, up] = [Math.floor(value), Math.ceil(value)];
  return { floor: down, ceil: up, round: down % 2 === 0 ? down : up }[rule];
};

const STEPS = {
  add: arithmetic((x, y) => x + y),
  subtract: arithmetic((x, y) => x - y),
  multiply: arithmetic((x, y) => x * y),
  divide: arithmetic((x, y) => x / y),
  dtype: (state, { dtype }) => asType(state, dtype),
  channels: (state, { order }) => {
    if (state.channels === order) return state;
    const [axis, strides] = [state.axes.indexOf("C"), stridesOf(state.shape)];
    const flipped = (place) => place.reduce((sum, at, i) => sum + strides[i] * (i === axis ? state.shape[i] - 1 - at : at), 0);
    return gathered(state, state.shape, flipped, { channels: order });
  },
  crop: (state, { size, rounding }) => {
    const [strides, shape, first] = [stridesOf(state.shape), [...state.shape], state.shape.map(() => 0)];
    for (const [letter, wanted] of [["W", size[0]], ["H", size[1]]]) {
      const axis = state.axes.indexOf(letter);
      if (axis < 0 || shape[axis] < wanted) throw new Error(`an item of [${state.shape}] is smaller than the crop of ${size[0]}x${size[1]}`);
      first[axis] = half((shape[axis] - wanted) / 2, rounding);
      shape[axis] = wanted;
    }
    return gathered(state, shape, (place) => place.reduce((sum, at, i) => sum + strides[i] * (at + first[i]), 0), {});
  },
  layout: (state, { axes }) => {
    const strides = stridesOf(state.shape);
    const old = [...axes].map((letter) => state.axes.indexOf(letter));
    const shape = old.map((axis) => (axis < 0 ? 1 : state.shape[axis]));
    return gathered(state, shape, (place) => place.reduce((sum, at, i) => sum + (old[i] < 0 ? 0 : strides[old[i]] * at), 0), { axes });
  },
  expand: (state, { axis }) => {
    const shape = [...state.shape];
    shape.splice(axis < 0 ? shape.length + 1 + axis : axis, 0, 1);
    return { ...state, shape, axes: "" };
  },
  reshape: (state, { shape }) => {
    const known = -count(shape);
    return { ...state, shape: shape.map((size) => (size === -1 ? state.data.length / known : size)), axes: "" };
  },
  window: (state, { frames, step }) => {
    const row = count(state.shape.slice(1));
    const rows = Math.floor((state.shape[0] - frames) / step) + 1;
    if (rows < 1) throw new Error(`a window of ${frames} frames does not fit into [${state.shape}]`);
    const data = new TYPES[state.type](rows * frames * row);
    for (let i = 0; i < rows; i++) data.set(state.data.subarray(i * step * row, (i * step + frames) * row), i * frames * row);
    return { ...state, shape: [rows, frames * row], data, axes: "NF" };
  },
};

/** Return the smallest step of the clock, in milliseconds. Pages that are not isolated have a coarse clock. */
export function clockStep() {
  let step = Infinity;
  for (let i = 0; i < 20; i++) {
    const start = performance.now();
    let now = start;
    while (now === start) now = performance.now();
    step = Math.min(step, now - start);
  }
  return step;
}

/** Return the observed value at position floor(share x count) of the sorted values. */
export function percentile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length + 1e-9))];
}

const median = (values) => percentile([...values].sort((a, b) => a - b), 0.5);

/**
 * Time the model on the first case of its self-test. The warm-up before that takes at least 20 runs, and goes on until
 * their times are steady.
 *
 * Each sample times several runs together, enough to take at least 100 steps of the clock. `seconds` is at most 60.
 */
export async function bench(model, { seconds: given = 1, samples = 30, warmSeconds = 5 } = {}) {
  const seconds = Math.min(Number(given) || 0, MOST_SECONDS);
  const feeds = tensors(model.ort, model.cases[0].inputs);
  const once = async (runs) => {
    const start = performance.now();
    for (let i = 0; i < runs; i++) await model.session.run(feeds);
    return (performance.now() - start) / runs;
  };
  const first = await once(1);
  model.timings.first_run_ms ??= first;
  const warm = [];
  const begin = performance.now();
  let steady = false;
  while (!steady && performance.now() - begin < 1e3 * warmSeconds) {
    for (let i = 0; i < WINDOW; i++) warm.push(await once(1));
    const last = median(warm.slice(-WINDOW));
    const before = median(warm.slice(-2 * WINDOW, -WINDOW));
    steady = warm.length >= WARM_RUNS && Math.abs(last - before) <= STEADY * before;
  }
  const step = clockStep();
  const runs = Math.max(1, Math.ceil((100 * step) / Math.max(median(warm.slice(-WINDOW)), step)));
  const taken = [];
  const end = performance.now() + 1e3 * seconds;
  while (taken.length < samples || performance.now() < end) taken.push(await once(runs));
  taken.sort((a, b) => a - b);
  return {
    threads: model.ort.env.wasm.numThreads,
    first_run_ms: model.timings.first_run_ms,
    open_ms: model.timings.open_ms,
    warm_up_runs: warm.length,
    steady,
    samples: taken.length,
    runs_per_sample: runs,
    clock_step_ms: step,
    p50_ms: percentile(taken, 0.5),
    p90_ms: percentile(taken, 0.9),
    p99_ms: percentile(taken, 0.99),
  };
}

/** Free the memory of the model. */
export async function close(model) {
  await model.session.release();
}
