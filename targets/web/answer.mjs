// Answer a picture with a bundle's model: prepare it, run the model, decode the outputs.
//
//   const model = await load(new URL("./", import.meta.url));   from edgeq.mjs
//   const found = await answer(model, image);                   a file, <img>, <canvas>, <video>, ImageBitmap, ImageData
//   console.log(toJson(found));
//
// The picture is resized with Pillow's integer arithmetic, first along rows. Pillow 13 sometimes resizes columns first,
// and then rounds some values differently. Browsers turn photos upright (EXIF), which edgeq's commands do not.

import { prepare, run } from "./edgeq.mjs";
import { decode, toJson } from "./decode.mjs";

export { toJson };

const MOST_PIXELS = 2 ** 26;

/** Return the answer for one picture; see `decode` in decode.mjs for its fields. */
export async function answer(model, image, thresholds = {}) {
  const { outputs, frame } = await infer(model, image);
  return decode(outputs, model.manifest.head, frame, thresholds);
}

/** Run the model on one picture. Return {outputs, frame, prepare_ms, run_ms}. */
export async function infer(model, image) {
  const start = performance.now();
  const { item, frame } = prepareImage(model.manifest.preprocessing, await pixelsOf(image));
  const feeds = prepare(model, item);
  const prepared = performance.now();
  const outputs = await run(model, feeds);
  return { outputs, frame, prepare_ms: prepared - start, run_ms: performance.now() - prepared };
}

/** Return why pictures cannot be prepared here, or "" if they can. */
export function whyNoPictures(recipe) {
  if (!recipe) return "the model takes arrays: the bundle has no preprocessing";
  return recipe.input && recipe.image ? "" : `the page would have to do this itself: ${(recipe.caller ?? []).join("; ")}`;
}

/** Return the pixels of a picture as {width, height, data}, four bytes a pixel. */
export async function pixelsOf(image) {
  if (image?.data && image.width) return image; // ImageData, or pixels of node
  const source = image instanceof Blob ? await createImageBitmap(image, { premultiplyAlpha: "none", colorSpaceConversion: "none" }) : image;
  const width = source.videoWidth ?? source.naturalWidth ?? source.width;
  const height = source.videoHeight ?? source.naturalHeight ?? source.height;
  if (!(width > 0 && height > 0 && width * height <= MOST_PIXELS)) throw new Error(`a picture of ${width}x${height} pixels cannot be used`);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(source, 0, 0);
  return context.getImageData(0, 0, width, height);
}

/** Do the steps on pixels. Return the item for `prepare`, and the frame of the picture at the model's input. */
export function prepareImage(recipe, { width, height, data }) {
  const problem = whyNoPictures(recipe);
  if (problem) throw new Error(`pictures cannot be prepared here: ${problem}`);
  const rgb = new Uint8Array(3 * width * height);
  for (let i = 0, j = 0; i < rgb.length; i += 3, j += 4) [rgb[i], rgb[i + 1], rgb[i + 2]] = [data[j], data[j + 1], data[j + 2]];
  let pixels = { width, height, channels: 3, order: "RGB", data: rgb };
  let frame = { original: [width, height], size: [width, height], scale: [1, 1], offset: [0, 0] };
  for (const step of recipe.image) {
    if (!Object.hasOwn(PIXEL_STEPS, step.op)) throw new Error(`this page does not know the step ${step.op}`);
    const [changed, next] = PIXEL_STEPS[step.op](pixels, frame, step);
    [pixels, frame] = [{ order: pixels.order, ...changed }, next];
  }
  for (const { op, ...options } of recipe.steps) if (op === "crop") frame = cropped(frame, options);
  const item = { type: "uint8", shape: [pixels.height, pixels.width, pixels.channels], data: pixels.data, axes: "HWC", channels: pixels.order };
  return { item, frame };
}

const ROUNDINGS = {
  floor: Math.floor,
  ceil: Math.ceil,
  round: (value) => (value % 1 === 0.5 ? 2 * Math.round(value / 2) : Math.round(value)), // half to even
};
const rounded = (value, rule = "floor") => {
  if (!Object.hasOwn(ROUNDINGS, rule)) throw new Error(`this page does not know the rounding ${rule}`);
  return ROUNDINGS[rule](value);
};
const placed = (frame, x, y, size) => ({ ...frame, size, offset: [frame.offset[0] + x, frame.offset[1] + y] });
const cropped = (frame, { size, rounding }) => {
  const [x, y] = [0, 1].map((i) => rounded((frame.size[i] - size[i]) / 2, rounding));
  if (x < 0 || y < 0) throw new Error(`a picture of ${frame.size.join("x")} is smaller than the crop of ${size.join("x")}`);
  return placed(frame, -x, -y, size);
};

function resized(pixels, frame, { size, rule = "exact", rounding, filter = "bilinear" }) {
  const { width, height } = pixels;
  const fixed = { short: Math.min(width, height), long: Math.max(width, height) }[rule];
  const scale = Math.min(size[0] / width, size[1] / height);
  const [across, down] = rule === "exact" ? size : [width, height].map((side) => rounded(rule === "fit" ? side * scale : (size[0] * side) / fixed, rounding));
  if (!(across >= 1 && down >= 1 && across * down <= MOST_PIXELS)) throw new Error(`a picture of ${width}x${height} would become ${across}x${down}`);
  const [x, y] = [across / frame.size[0], down / frame.size[1]];
  const scaled = { ...frame, size: [across, down], scale: [frame.scale[0] * x, frame.scale[1] * y], offset: [frame.offset[0] * x, frame.offset[1] * y] };
  return [resample(pixels, across, down, filter), scaled];
}

function copied(from, to, x, y) {
  // Negative places crop.
  const [left, top] = [Math.max(0, -x), Math.max(0, -y)];
  const width = Math.min(from.width - left, to.width);
  for (let line = 0; line < Math.min(from.height - top, to.height); line++) {
    const begin = ((line + top) * from.width + left) * from.channels;
    to.data.set(from.data.subarray(begin, begin + width * from.channels), ((line + Math.max(0, y)) * to.width + Math.max(0, x)) * to.channels);
  }
  return to;
}

function blank([width, height], channels) {
  if (!(width >= 1 && height >= 1 && width * height <= MOST_PIXELS)) throw new Error(`the preprocessing makes a picture of ${width}x${height} pixels`);
  return { width, height, channels, data: new Uint8Array(width * height * channels) };
}

const PIXEL_STEPS = {
  resize: resized,
  crop: (pixels, frame, step) => {
    const next = cropped(frame, step);
    const [x, y] = [0, 1].map((i) => next.offset[i] - frame.offset[i]);
    return [copied(pixels, blank(step.size, pixels.channels), x, y), next];
  },
  letterbox: (pixels, frame, { size, position, value = [114], filter, rounding }) => {
    const [inner, scaled] = resized(pixels, frame, { size, rule: "fit", filter, rounding });
    const [x, y] = position === "center" ? [0, 1].map((i) => Math.floor((size[i] - scaled.size[i]) / 2)) : [0, 0];
    const canvas = blank(size, pixels.channels);
    for (let i = 0; i < canvas.data.length; i++) canvas.data[i] = value[(i % pixels.channels) % value.length];
    return [copied(inner, canvas, x, y), placed(scaled, x, y, size)];
  },
  channels: (pixels, frame, { order }) => {
    if (pixels.channels === 1 || pixels.order === order) return [pixels, frame];
    const [red, blue] = pixels.order === "BGR" ? [2, 0] : [0, 2];
    if (order !== "L") {
      const data = pixels.data.map((_, i) => pixels.data[i + 2 - 2 * (i % 3)]); // red and blue change places
      return [{ ...pixels, data, order }, frame];
    }
    const grey = blank([pixels.width, pixels.height], 1);
    // Pillow's weights of ITU-R 601 in 16-bit fixed point.
    for (let i = 0, j = 0; i < grey.data.length; i++, j += 3) grey.data[i] = (19595 * pixels.data[j + red] + 38470 * pixels.data[j + 1] + 7471 * pixels.data[j + blue] + 32768) >> 16;
    return [grey, frame];
  },
};

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => (Math.abs(x) >= 1 ? 0 : sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x)))],
  bicubic: [2, (x) => bicubic(Math.abs(x))],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};
function bicubic(x) {
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? ((x - 5) * x + 8) * x * -0.5 + 2 : 0;
}

/** Resize with the arithmetic of Pillow's Resample.c: fixed-point weights of 22 bits, first along rows, then down. */
function resample(pixels, width, height, filter) {
  if (width === pixels.width && height === pixels.height) return pixels;
  if (filter === "nearest") return nearest(pixels, width, height);
  if (!Object.hasOwn(FILTERS, filter)) throw new Error(`this page does not know the filter ${filter}`);
  const { channels } = pixels;
  let { data } = pixels;
  if (width !== pixels.width) {
    const rows = new Uint8ClampedArray(width * pixels.height * channels);
    for (const [x, { begin, weights }] of weightsOf(pixels.width, width, filter).entries()) {
      for (let y = 0; y < pixels.height; y++) {
        for (let c = 0; c < channels; c++) {
          let sum = 2 ** 21;
          for (let k = 0, at = (y * pixels.width + begin) * channels + c; k < weights.length; k++, at += channels) sum += data[at] * weights[k];
          rows[(y * width + x) * channels + c] = Math.floor(sum / 2 ** 22);
        }
      }
    }
    data = rows;
  }
  if (height !== pixels.height) {
    const row = width * channels;
    const lines = new Uint8ClampedArray(row * height);
    for (const [y, { begin, weights }] of weightsOf(pixels.height, height, filter).entries()) {
      for (let i = 0; i < row; i++) {
        let sum = 2 ** 21;
        for (let k = 0, at = begin * row + i; k < weights.length; k++, at += row) sum += data[at] * weights[k];
        lines[y * row + i] = Math.floor(sum / 2 ** 22);
      }
    }
    data = lines;
  }
  return { width, height, channels, data: new Uint8Array(data.buffer) };
}

function weightsOf(from, to, filter) {
  const [reach, shape] = FILTERS[filter];
  const stretch = Math.max(from / to, 1);
  return Array.from({ length: to }, (_, i) => {
    const centre = (i + 0.5) * (from / to);
    const begin = Math.max(0, Math.trunc(centre - reach * stretch + 0.5));
    const end = Math.min(from, Math.trunc(centre + reach * stretch + 0.5));
    const weights = Array.from({ length: end - begin }, (_, k) => shape((k + begin - centre + 0.5) * (1 / stretch)));
    const sum = weights.reduce((a, b) => a + b, 0);
    return { begin, weights: weights.map((weight) => (sum ? weight / sum : weight) * 2 ** 22).map((weight) => Math.trunc(weight + (weight < 0 ? -0.5 : 0.5))) };
  });
}

function nearest({ width: from, height: lines, channels, data }, width, height) {
  const found = blank([width, height], channels);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const at = (Math.floor((y + 0.5) * (lines / height)) * from + Math.floor((x + 0.5) * (from / width))) * channels;
      for (let c = 0; c < channels; c++) found.data[(y * width + x) * channels + c] = data[at + c];
    }
  }
  return found;
}
