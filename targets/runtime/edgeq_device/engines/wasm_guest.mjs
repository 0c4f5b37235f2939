// Answer edgeq's requests on standard input with sessions of ONNX Runtime Web, in the frames of arrays.py.
//
// Usage: node wasm_guest.mjs FOLDER FILES. FILES is JSON, [{path, sha256, bytes}], for the script, its loader
// and the wasm file.

import fs from "node:fs";
import { pathToFileURL } from "node:url";
import { TYPES, readChecked, sessionOptions, startRuntime, tensors } from "./edgeq.mjs";

const DTYPES = {
  "<f4": "float32", "<f8": "float64", "<f2": "float16", "|b1": "bool",
  "|i1": "int8", "|u1": "uint8", "<i2": "int16", "<u2": "uint16",
  "<i4": "int32", "<u4": "uint32", "<i8": "int64", "<u8": "uint64",
};
const NAMES = Object.fromEntries(Object.entries(DTYPES).map(([dtype, type]) => [type, dtype]));
const ONNX = { float32: "float", float64: "double" };
const INVALID = /ERROR_CODE: 2\b/;
const CYCLE = 1024;

// Text that the runtime prints, such as its profile, must not end up between the frames.
const write = fs.writeSync.bind(fs);
let printed = [];
fs.writeSync = (place, text, ...rest) => {
  if (place !== 1) return write(place, text, ...rest);
  printed.push(String(text));
  return String(text).length;
};
console.log = (...texts) => printed.push(`${texts.join(" ")}\n`);

function exactly(size) {
  const found = Buffer.alloc(size);
  for (let have = 0; have < size; ) {
    const more = fs.readSync(0, found, have, size - have, null);
    if (more === 0) return null;
    have += more;
  }
  return found;
}

function readFrame() {
  const size = exactly(4);
  if (size === null) return null;
  const request = JSON.parse(exactly(size.readUInt32LE(0)).toString("utf8"));
  const arrays = Object.create(null); // here, __proto__ is a name like any other
  for (const [name, dtype, shape] of request.arrays) {
    const type = DTYPES[dtype];
    if (!type) throw new Error(`tensor ${name} is ${dtype}, which ONNX Runtime Web does not support`);
    const Array = TYPES[type];
    const bytes = exactly(shape.reduce((a, b) => a * b, 1) * Array.BYTES_PER_ELEMENT);
    arrays[name] = { type, shape, data: new Array(new Uint8Array(bytes).buffer) };
  }
  return [request, arrays];
}

function writeFrame(content, arrays = {}) {
  const listed = Object.entries(arrays).map(([name, { type, shape }]) => [name, NAMES[type], shape]);
  const text = Buffer.from(JSON.stringify({ ...content, arrays: listed }), "utf8");
  const size = Buffer.alloc(4);
  size.writeUInt32LE(text.length, 0);
  const parts = Object.values(arrays).map(({ data }) => Buffer.from(data.buffer, data.byteOffset, data.byteLength));
  for (const part of [size, text, ...parts]) {
    for (let done = 0; done < part.length; ) done += write(1, part, done, part.length - done);
  }
}

/** Yield the inputs of one query after another: the samples in shuffled rounds, stacked if there are batches. */
function* queries(samples, { samples_per_query: each = 1, batch = 1, seed = 0 }) {
  let state = (seed + 1) >>> 0;
  const random = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  const order = [];
  while (order.length < Math.max(CYCLE, samples.length) * each) {
    const round = samples.map((_, i) => i);
    for (let i = round.length - 1; i > 0; i--) {
      const other = Math.floor(random() * (i + 1));
      [round[i], round[other]] = [round[other], round[i]];
    }
    order.push(...round);
  }
  for (let place = 0; ; place = (place + each) % (order.length - each + 1)) {
    const wanted = order.slice(place, place + each).map((i) => samples[i]);
    const groups = [];
    for (let i = 0; i < wanted.length; i += batch) groups.push(stacked(wanted.slice(i, i + batch)));
    yield groups;
  }
}

function stacked(group) {
  if (group.length === 1) return group[0];
  return Object.fromEntries(
    Object.entries(group[0]).map(([name, { type, shape }]) => {
      const parts = group.map((sample) => sample[name].data);
      const data = new TYPES[type](parts.reduce((sum, part) => sum + part.length, 0));
      parts.reduce((place, part) => (data.set(part, place), place + part.length), 0);
      return [name, { type, shape: [shape[0] * group.length, ...shape.slice(1)], data }];
    }),
  );
}

const described = (specs) =>
  specs.map(({ name, isTensor, type, shape }) => {
    if (!isTensor || !TYPES[type]) throw new Error(`${name} is not a tensor of numbers`);
    return [name, `tensor(${ONNX[type] ?? type})`, shape.map((size) => (size === "" ? null : size))];
  });

async function open(ort, request, sessions) {
  const externalData = request.data.map(([path, file]) => ({ path, data: new Uint8Array(fs.readFileSync(file)) }));
  const profiled = request.profile.length > 0;
  const how = { optimization: request.optimization, config: request.session_options, externalData, profiled };
  const session = await ort.InferenceSession.create(new Uint8Array(fs.readFileSync(request.model)), sessionOptions(how));
  sessions.push({ session, runners: [], profile: request.profile[0] });
  const { inputMetadata, outputMetadata } = session;
  const specs = { inputs: described(inputMetadata), outputs: described(outputMetadata) };
  return { session: sessions.length - 1, ...specs, providers: [request.provider] };
}

async function burst(ort, { session, runners }, { runner, length_s, lead_in_s, slow }) {
  const used = process.cpuUsage();
  const next = async () => {
    for (const feeds of runners[runner].next().value) await session.run(tensors(ort, feeds));
  };
  const now = () => performance.now() / 1e3;
  for (const end = now() + lead_in_s; !slow && now() < end; ) await next();
  const samples = [];
  const begin = now();
  for (let last = begin; last < begin + length_s || !samples.length; ) {
    const before = now();
    await next();
    last = now();
    samples.push(last - before);
  }
  const busy_s = now() - begin;
  const { user, system } = process.cpuUsage(used);
  const arrays = {
    samples: { type: "float64", shape: [samples.length], data: Float64Array.from(samples) },
    disturbed: { type: "bool", shape: [0], data: new Uint8Array() },
  };
  return [{ busy_s, cpu_s: (user + system) / 1e6 }, arrays];
}

async function answer(ort, request, arrays, sessions) {
  if (request.do === "open") return [await open(ort, request, sessions)];
  const known = sessions[request.session];
  const { session, runners } = known;
  switch (request.do) {
    case "run": {
      const results = await session.run(tensors(ort, arrays), request.outputs);
      const found = Object.entries(results).filter(([, { type }]) => TYPES[type]);
      return [{}, Object.fromEntries(found.map(([name, { type, dims, data }]) => [name, { type, shape: dims, data }]))];
    }
    case "prepare": {
      const samples = Array.from({ length: request.samples }, () => Object.create(null));
      for (const [key, value] of Object.entries(arrays)) {
        const space = key.indexOf(" ");
        samples[Number(key.slice(0, space))][key.slice(space + 1)] = value;
      }
      return [{ runner: runners.push(queries(samples, request.queries)) - 1 }];
    }
    case "burst":
      return burst(ort, known, request);
    case "end profiling": {
      printed = [];
      session.endProfiling();
      const file = `${known.profile}.json`;
      fs.writeFileSync(file, printed.join(""));
      return [{ profile: file }];
    }
    case "close":
      sessions[request.session] = null;
      await session.release();
      return [{}];
    default:
      throw new Error(`unknown request ${request.do}`);
  }
}

const [folder, files] = process.argv.slice(2);
const runtime = readChecked(pathToFileURL(`${folder}/`), JSON.parse(files)).then(startRuntime);
const sessions = [];
for (let frame = readFrame(); frame !== null; frame = readFrame()) {
  try {
    writeFrame(...(await answer(await runtime, ...frame, sessions)));
  } catch (error) {
    const text = String(error?.message ?? error).replace(/\s+/g, " ");
    writeFrame({ error: text, kind: INVALID.test(text) ? "InvalidArgument" : "Error" });
  }
}
process.exit(0);
