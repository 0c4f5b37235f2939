// Decode a model's outputs to an answer, as edgeq_device/answers does in Python: by the head in edgeq-web.json.
//
//   const found = decode(outputs, head, frame);   outputs as {name: {type, shape, data}}, as `run` returns them
//   toJson(found)                                 the names of `edgeq-run infer --json`
//
// Positions are in pixels of the picture, not clipped to it. A frame is {original, size, scale, offset}, each [x, y]:
// x of the input = x of the picture * scale + offset.

const LIMIT = 300;
const MOST_CLASSES = 2 ** 20;
const COCO_POINTS = ["nose", "eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle"].flatMap((name) => (name === "nose" ? [name] : [`left_${name}`, `right_${name}`]));
const COCO_GAPS = [12, 26, 29, 30, 45, 66, 68, 69, 71, 83];
const MOST_MASK_BYTES = 2 ** 30;
const boxes = (confidence, iou) => ({ confidence, ...(iou ? { iou } : {}), limit: LIMIT });

/** The families that this file decodes: their tasks, usual thresholds, and the parameters that they know. */
export const FAMILIES = {
  classify: { task: "classify", thresholds: { confidence: 0, limit: 5 }, parameters: ["scores", "offset"], decode: classes },
  yolov8: { task: "detect", thresholds: boxes(0.25, 0.7), parameters: ["unit"], candidates: (outputs, head, size) => best(rowsOf(outputs, head, true), 4, size, head) },
  yolov5: { task: "detect", thresholds: boxes(0.25, 0.45), parameters: ["unit"], candidates: (outputs, head, size) => best(rowsOf(outputs, head), 5, size, head) },
  yolox: { task: "detect", thresholds: boxes(0.25, 0.65), parameters: [], candidates: gridRows },
  detections: { task: "detect", thresholds: boxes(0.25), parameters: ["unit", "offset", "numbers"], candidates: selected },
  "yolo-seg": { task: "segment", thresholds: boxes(0.25, 0.7), parameters: ["unit", "layout"], candidates: withCoefficients, masks },
  "yolo-pose": { task: "pose", thresholds: boxes(0.25, 0.7), parameters: ["unit", "keypoints", "values"], candidates: withKeypoints },
  ctc: { task: "text", thresholds: {}, parameters: ["layout", "blank", "space"], decode: text },
};

/** Return why a head cannot be decoded here, or "" if it can. */
export function whyNot(head) {
  if (!head) return "nothing says what they mean";
  if (!Object.hasOwn(FAMILIES, head.family)) return `this page does not decode the family ${head.family}`;
  const unknown = Object.keys(head.parameters ?? {}).find((name) => !FAMILIES[head.family].parameters.includes(name));
  return unknown === undefined ? "" : `this page does not know the parameter ${unknown} of ${head.family}`;
}

/**
 * Return the answer of one run: {task, boxes [[x1, y1, x2, y2]], scores, classes, masks, keypoints, text, confidence, top,
 * labels, keypointNames, image}. masks are Uint8Array(height * width) of 0 and 1 or null; keypoints are [[x, y, score]] or null.
 *
 * thresholds replaces some of the head's: {confidence, iou, limit}.
 */
export function decode(outputs, head, frame = null, thresholds = {}) {
  const problem = whyNot(head);
  if (problem) throw new Error(`the outputs have no decoder: ${problem}`);
  const family = FAMILIES[head.family];
  const limits = { ...family.thresholds, ...head.thresholds, ...thresholds };
  const common = { labels: head.labels ?? [], keypointNames: namesOf(head), image: frame?.original ?? null };
  const empty = { task: family.task, boxes: [], scores: [], classes: [], masks: null, keypoints: null, text: null, confidence: null, top: [] };
  if (family.decode) return { ...empty, ...family.decode(outputs, head, limits), ...common };
  if (!frame) throw new Error("objects need the frame of a picture");
  const objects = suppress(family.candidates(outputs, head, frame.size), limits);
  const point = (x, y) => [(x - frame.offset[0]) / frame.scale[0], (y - frame.offset[1]) / frame.scale[1]];
  return {
    ...empty,
    boxes: objects.map(({ box: [x1, y1, x2, y2] }) => [...point(x1, y1), ...point(x2, y2)]),
    scores: objects.map(({ score }) => score),
    classes: objects.map(({ number }) => number),
    masks: family.masks ? family.masks(outputs, head, objects, frame) : null,
    keypoints: objects.some(({ points }) => points) ? objects.map(({ points }) => points.map(([x, y, score]) => [...point(x, y), score])) : null,
    ...common,
  };
}

/** Return the names of keypoints; names that do not match one to one would name the wrong points. */
function namesOf({ keypoint_names: names = [], parameters = {} }) {
  const all = names.length ? names : COCO_POINTS;
  return all.length === parameters.keypoints ? all : [];
}

/** Return the name of a class, or its number as text. */
export const labelOf = (labels, number) => (number >= 0 && number < labels.length ? labels[number] : String(number));

/** Return plain values for JSON, under the names that edgeq's commands use. */
export function toJson(answer) {
  const record = { task: answer.task };
  const axes = (points) => ({ x: points.map(([x]) => digits(x)), y: points.map(([, y]) => digits(y)) });
  if (answer.image) record.image = { width: answer.image[0], height: answer.image[1] };
  if (answer.text !== null) record.text = answer.text;
  if (answer.confidence !== null) record.confidence = digits(answer.confidence);
  const entry = (number, score) => ({ name: labelOf(answer.labels, number), class: number, confidence: digits(score) });
  if (answer.top.length) record.classes = answer.top.map(([number, score]) => entry(number, score));
  if (answer.text === null && !answer.top.length) {
    record.objects = answer.boxes.map((box, i) => {
      const object = { ...entry(answer.classes[i], answer.scores[i]), box: Object.fromEntries(["x1", "y1", "x2", "y2"].map((name, j) => [name, digits(box[j])])) };
      if (answer.masks) {
        object.area = answer.masks[i].reduce((sum, one) => sum + one, 0);
        object.segments = axes(trace(answer.masks[i], ...answer.image));
      }
      if (answer.keypoints) {
        object.keypoints = { ...axes(answer.keypoints[i]), visible: answer.keypoints[i].map(([, , score]) => digits(score)) };
        if (answer.keypointNames.length) object.keypoints.names = [...answer.keypointNames];
      }
      return object;
    });
  }
  return record;
}

const digits = (value) => (Number.isFinite(value) ? Number(value.toPrecision(6)) : null);

/** Return an output's values as numbers. */
function valuesOf({ type, data }) {
  if (type === "float16" && data instanceof Uint16Array) return Float64Array.from(data, fromHalf);
  return typeof data[0] === "bigint" ? Float64Array.from(data, Number) : data;
}

function fromHalf(bits) {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

function outputOf(outputs, head, role) {
  const name = Object.hasOwn(head.outputs, role) ? head.outputs[role] : "";
  if (!Object.hasOwn(outputs, name)) throw new Error(`the model has no output for ${role}`);
  return { shape: outputs[name].shape, values: valuesOf(outputs[name]) };
}

/** Read [1, N, columns]; with `turned`, the longer axis is N. Return {count, columns, at(row, column)}. */
function rowsOf(outputs, head, turned = false, role = "rows") {
  const { shape, values } = outputOf(outputs, head, role);
  if (shape.length !== 3 || shape[0] !== 1) throw new Error(`output [${shape}] is not [1, N, columns]`);
  const [, first, second] = shape;
  if (turned && first < second) return { count: second, columns: first, at: (row, column) => values[column * second + row] };
  return { count: first, columns: second, at: (row, column) => values[row * second + column] };
}

function factors(head, size) {
  const unit = head.parameters?.unit ?? "pixel";
  if (unit !== "pixel" && unit !== "share") throw new Error(`the unit is ${unit}`);
  return unit === "share" ? size : [1, 1];
}

const corners = (x, y, width, height) => [x - width / 2, y - height / 2, x + width / 2, y + height / 2];

/** Return the best class of each row. Scores are in the columns from `start` to `end`; at 5, column 4 is objectness. */
function best(rows, start, size, head, { end = rows.columns, box, more } = {}) {
  if (end <= start) throw new Error("the scores have no class");
  const [fx, fy] = factors(head, size);
  const boxOf = box ?? ((row) => corners(rows.at(row, 0) * fx, rows.at(row, 1) * fy, rows.at(row, 2) * fx, rows.at(row, 3) * fy));
  return Array.from({ length: rows.count }, (_, row) => {
    const sure = start === 5 ? rows.at(row, 4) : 1;
    let [number, score] = [0, -Infinity];
    for (let column = start; column < end; column++) {
      const value = sure * rows.at(row, column);
      if (value > score) [number, score] = [column - start, value];
    }
    return { row, number, score, box: boxOf(row), ...more?.(row) };
  });
}

function gridRows(outputs, head, size) {
  const rows = rowsOf(outputs, head);
  const levels = [[8, 16, 32], [8, 16, 32, 64], [4, 8, 16, 32], [16, 32]];
  const sides = (stride) => size.map((side) => Math.floor(side / stride));
  const cells = (strides) => strides.reduce((sum, stride) => sum + sides(stride)[0] * sides(stride)[1], 0);
  const strides = levels.find((one) => rows.count && cells(one) === rows.count);
  if (!strides) throw new Error(`${rows.count} rows are not the cells of an input of ${size[0]}x${size[1]}`);
  const places = strides.flatMap((stride) => {
    const [width, height] = sides(stride);
    return Array.from({ length: width * height }, (_, i) => [i % width, Math.floor(i / width), stride]);
  });
  const box = (row) => {
    const [column, line, stride] = places[row];
    return corners((rows.at(row, 0) + column) * stride, (rows.at(row, 1) + line) * stride, Math.exp(rows.at(row, 2)) * stride, Math.exp(rows.at(row, 3)) * stride);
  };
  return best(rows, 5, size, head, { box });
}

function selected(outputs, head, size) {
  const rows = rowsOf(outputs, head);
  if (rows.columns !== 6) throw new Error("the rows do not have 6 columns");
  const [fx, fy] = factors(head, size);
  const objects = Array.from({ length: rows.count }, (_, row) => ({
    number: classOf(rows.at(row, 5), head.parameters ?? {}),
    score: rows.at(row, 4),
    box: [0, 1, 2, 3].map((column) => rows.at(row, column) * (column % 2 ? fy : fx)),
  }));
  return objects.filter(({ number }) => number >= 0);
}

/** Return a class counted from 0, or -1 for a row that fills up. COCO numbers its 80 classes from 1 to 90, with gaps. */
function classOf(value, { offset = 0, numbers }) {
  const number = Math.abs(value) < MOST_CLASSES ? Math.trunc(value) - offset : -1;
  if (numbers !== "coco" || number < 0) return number;
  return number >= 90 || COCO_GAPS.includes(number + 1) ? -1 : number - COCO_GAPS.filter((gap) => gap <= number).length;
}

function withCoefficients(outputs, head, size) {
  const rows = rowsOf(outputs, head, true);
  const end = rows.columns - prototypesOf(outputs, head).channels;
  const more = (row) => ({ coefficients: (k) => rows.at(row, end + k) });
  return best(rows, 4, size, head, { end, more });
}

function withKeypoints(outputs, head, size) {
  const rows = rowsOf(outputs, head, true);
  const { keypoints: count, values = 3 } = head.parameters ?? {};
  const end = rows.columns - count * values;
  if (!(count >= 1 && (values === 2 || values === 3))) throw new Error("the number of keypoints is not known");
  const [fx, fy] = factors(head, size);
  const point = (row, k) => [rows.at(row, end + values * k) * fx, rows.at(row, end + values * k + 1) * fy, values === 3 ? rows.at(row, end + values * k + 2) : 1];
  const more = (row) => ({ lazyPoints: () => Array.from({ length: count }, (_, k) => point(row, k)) });
  return best(rows, 4, size, head, { end, more });
}

/** Return the best objects, best first. An object is dropped if it overlaps a better one of its class by more than iou. */
function suppress(objects, { confidence = 0, iou, limit = LIMIT }) {
  const strong = objects.filter(({ box, score }) => score > confidence && box.every(Number.isFinite));
  strong.sort((a, b) => b.score - a.score); // stable: of equal scores, the earlier one comes first
  const kept = [];
  for (const object of strong) {
    if (kept.length >= limit) break;
    const rival = (other) => other.number === object.number && overlap(other.box, object.box) > iou;
    if (iou === undefined || !kept.some(rival)) kept.push(object);
  }
  return kept.map(({ lazyPoints, ...object }) => (lazyPoints ? { ...object, points: lazyPoints() } : object));
}

function overlap(a, b) {
  const area = (x1, y1, x2, y2) => Math.max(x2 - x1, 0) * Math.max(y2 - y1, 0);
  const common = area(Math.max(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.min(a[3], b[3]));
  const union = area(...a) + area(...b) - common;
  return union > 0 ? common / union : 0;
}

function prototypesOf(outputs, head) {
  const { shape, values } = outputOf(outputs, head, "prototypes");
  if (shape.length !== 4 || shape[0] !== 1) throw new Error(`prototypes [${shape}] are not [1, M, h, w]`);
  const last = head.parameters?.layout === "NHWC";
  const [height, width, channels] = last ? shape.slice(1) : [shape[2], shape[3], shape[1]];
  const at = last ? (k, i) => values[i * channels + k] : (k, i) => values[k * height * width + i];
  return { channels, height, width, at };
}

/** Return a mask for each object in the picture's size: resampled bilinearly, compared with 0, and cut to the box. */
function masks(outputs, head, objects, { original, size, scale, offset }) {
  const [width, height] = original;
  if (objects.length * width * height > MOST_MASK_BYTES) throw new Error(`${objects.length} masks of ${width}x${height} pixels are too large. Give a smaller picture, or raise the confidence`);
  const map = prototypesOf(outputs, head);
  const axis = (length, i, cells) => Array.from({ length }, (_, at) => {
    const input = (at + 0.5) * scale[i] + offset[i];
    const place = Math.min(Math.max((input * cells) / size[i] - 0.5, 0), cells - 1);
    return { at, input, low: Math.floor(place), high: Math.min(Math.floor(place) + 1, cells - 1), part: place - Math.floor(place) };
  });
  const [columns, lines] = [axis(width, 0, map.width), axis(height, 1, map.height)];
  return objects.map(({ box, coefficients }) => {
    // A mask also ends where a crop cut the picture.
    const [x1, y1, x2, y2] = box.map((edge, i) => Math.min(Math.max(edge, 0), size[i % 2]));
    const mask = new Uint8Array(width * height);
    const sums = new Float64Array(map.width * map.height);
    for (let k = 0; k < map.channels; k++) {
      const weight = coefficients(k);
      for (let i = 0; i < sums.length; i++) sums[i] += weight * map.at(k, i);
    }
    const across = columns.filter(({ input }) => input >= x1 && input < x2);
    for (const y of lines) {
      if (!(y.input >= y1 && y.input < y2)) continue;
      const [top, bottom] = [y.low * map.width, y.high * map.width];
      for (const x of across) {
        const above = sums[top + x.low] * (1 - x.part) + sums[top + x.high] * x.part;
        const below = sums[bottom + x.low] * (1 - x.part) + sums[bottom + x.high] * x.part;
        mask[y.at * width + x.at] = above * (1 - y.part) + below * y.part > 0 ? 1 : 0;
      }
    }
    return mask;
  });
}

function classes(outputs, head, { confidence, limit }) {
  const { shape, values } = outputOf(outputs, head, "scores");
  if (![2, 4].includes(shape.length) || values.length !== shape[1] || values.length < 2) throw new Error(`scores [${shape}] are not [1, C]`);
  let scores = Array.from(values);
  if (head.parameters?.scores === "logits") {
    const largest = scores.reduce((a, b) => Math.max(a, b));
    scores = scores.map((value) => Math.exp(value - largest));
    const sum = scores.reduce((a, b) => a + b);
    scores = scores.map((value) => value / sum);
  }
  const ranked = [...scores.slice(head.parameters?.offset ?? 0).entries()].sort((a, b) => b[1] - a[1]);
  return { top: ranked.slice(0, limit).filter(([, score]) => score >= confidence) };
}

/**
 * Read text by connectionist temporal classification: the best symbol of each step, repeats joined, without blanks.
 * Labels are the alphabet, with or without the blank, and perhaps without the space at its end.
 */
function text(outputs, head) {
  const { shape, values } = outputOf(outputs, head, "steps");
  const { layout = "TC", blank: given = 0, space = null } = head.parameters ?? {};
  if (shape.length !== 3 || !(shape[0] === 1 || shape[1] === 1) || !values.length) throw new Error(`steps [${shape}] are not [1, T, C]`);
  if (layout !== "TC" && layout !== "CT") throw new Error(`the layout is ${layout}`);
  const [first, second] = [shape[0] === 1 ? shape[1] : shape[0], shape[2]];
  const [steps, count] = layout === "CT" ? [second, first] : [first, second];
  const at = layout === "CT" ? (step, k) => values[k * second + step] : (step, k) => values[step * second + k];
  const blank = given === "last" ? count - 1 : given;
  if (!(Number.isInteger(blank) && blank >= 0 && blank < count)) throw new Error(`the blank is ${given}`);
  const labels = head.labels ?? [];
  const symbols = [...labels];
  if (labels.length && labels.length < count) {
    if (labels.length === count - 2) symbols.push(" ");
    symbols.splice(blank, 0, "");
  }
  if (labels.length && symbols.length !== count) throw new Error(`the alphabet has ${labels.length} symbols for ${count} classes`);
  const numbers = Array.from({ length: count }, (_, k) => k);
  const rows = Array.from({ length: steps }, (_, step) => numbers.map((k) => at(step, k)));
  const probable = rows.every((row) => row.every((value) => value >= 0) && Math.abs(row.reduce((a, b) => a + b, 0) - 1) < 1e-2);
  const best = rows.map((row) => row.reduce((top, value, k) => (value > row[top] ? k : top), 0));
  const starts = best.flatMap((k, step) => (k !== blank && k !== best[step - 1] ? [step] : []));
  const sure = starts.map((step) => {
    const top = rows[step][best[step]];
    return probable ? top : 1 / rows[step].reduce((sum, value) => sum + Math.exp(value - top), 0);
  });
  const confidence = sure.length ? sure.reduce((a, b) => a + b) / sure.length : null;
  if (!labels.length) return { text: starts.map((step) => best[step]).join(" "), confidence };
  const read = (symbol) => {
    if (symbol === space) return " ";
    const special = [...symbol].length > 2 && ["<>", "[]"].includes(symbol[0] + symbol.at(-1));
    return special ? "" : symbol.replaceAll("\u2581", " "); // SentencePiece's mark of a word
  };
  return { text: starts.map((step) => read(symbols[best[step]])).join("").trim(), confidence };
}

/**
 * Return the outline of a mask's largest region as [[x, y]] of pixel centres, clockwise (Moore's neighbour tracing).
 * Corners between which the outline is straight are left out.
 */
export function trace(mask, width, height) {
  const regions = new Int32Array(mask.length);
  const around = [[0, -1], [-1, -1], [-1, 0], [-1, 1], [0, 1], [1, 1], [1, 0], [1, -1]];
  let [count, largest, most, start] = [0, 0, 0, -1];
  for (let i = 0; i < mask.length; i++) {
    if (!mask[i] || regions[i]) continue;
    const stack = [i];
    regions[i] = ++count;
    let pixels = 0;
    while (stack.length) {
      const at = stack.pop();
      pixels++;
      const [y, x] = [Math.floor(at / width), at % width];
      for (const [dy, dx] of around) {
        const [line, column] = [y + dy, x + dx];
        const next = line * width + column;
        if (line < 0 || column < 0 || line >= height || column >= width || !mask[next] || regions[next]) continue;
        regions[next] = count;
        stack.push(next);
      }
    }
    if (pixels > most) [largest, most, start] = [count, pixels, i];
  }
  if (!count) return [];
  const inside = (y, x) => y >= 0 && x >= 0 && y < height && x < width && regions[y * width + x] === largest;
  const begin = [Math.floor(start / width), start % width];
  let [[y, x], background, first] = [begin, 0, null];
  const points = [];
  for (;;) {
    const turn = [0, 1, 2, 3, 4, 5, 6, 7].map((k) => (background + k) % 8).find((d) => inside(y + around[d][0], x + around[d][1]));
    // The outline is closed when the first step is repeated.
    if (turn === undefined || (y === begin[0] && x === begin[1] && turn === first)) break;
    points.push([x, y]);
    first ??= turn;
    [y, x] = [y + around[turn][0], x + around[turn][1]];
    background = (turn + (turn % 2 ? 5 : 6)) % 8;
  }
  if (points.length < 2) return [[begin[1], begin[0]]];
  const turns = points.filter((point, i) => {
    const [back, next] = [points.at(i - 1), points[(i + 1) % points.length]];
    return point[0] - back[0] !== next[0] - point[0] || point[1] - back[1] !== next[1] - point[1];
  });
  return turns.length ? turns : [points[0]];
}
