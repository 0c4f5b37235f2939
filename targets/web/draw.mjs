// Draw an answer on a canvas, and list it. All names come from a bundle, so they become text, never markup.

import { labelOf } from "./decode.mjs";

// The limbs of COCO's 17 keypoints.
const LIMBS = [[0, 1], [0, 2], [1, 3], [2, 4], [5, 6], [5, 7], [7, 9], [6, 8], [8, 10], [5, 11], [6, 12], [11, 12], [11, 13], [13, 15], [12, 14], [14, 16]];
const SEEN = 0.5;
const LARGE = 1280;

export const element = (name, text = "", kind = "") => Object.assign(document.createElement(name), { textContent: text, className: kind });

/** Return the colour of a class: turning by the golden angle keeps neighbours apart. */
const hueOf = (number) => (number * 137.508 + 210) % 360;
// Classes of nearly the same hue still differ in lightness.
const lightnessOf = (number) => [0.52, 0.4, 0.64][number % 3];
const colourOf = (number, alpha = 1) => `hsl(${hueOf(number)} 85% ${100 * lightnessOf(number)}% / ${alpha})`;

const percent = (score) => `${(100 * score).toFixed(score < 0.1 ? 1 : 0)} %`;

/** Draw the picture and the answer on it. `only` is the number of one object to stress. */
export function draw(canvas, picture, answer, only = null) {
  // A small picture is enlarged, so that lines and letters stay sharp.
  const zoom = Math.max(1, Math.min(4, LARGE / picture.width));
  [canvas.width, canvas.height] = [picture.width, picture.height].map((side) => Math.round(side * zoom));
  const context = canvas.getContext("2d");
  context.scale(zoom, zoom);
  context.drawImage(layerOf(picture), 0, 0);
  if (!answer?.boxes.length) return;
  if (answer.masks) drawMasks(context, answer, only);
  // Lines and letters have the same size on the screen for each size of picture.
  const unit = Math.max(canvas.width / (canvas.clientWidth || canvas.width), canvas.height / (canvas.clientHeight || canvas.height)) / zoom;
  const order = answer.boxes.map((_, i) => i).reverse(); // the best object is drawn on top
  for (const i of order) drawBox(context, answer, i, unit, only === null || only === i);
  for (const i of order) if (answer.keypoints && (only === null || only === i)) drawKeypoints(context, answer.keypoints[i], unit);
}

function drawBox(context, { boxes, scores, classes, labels }, i, unit, strong) {
  const [x1, y1, x2, y2] = boxes[i];
  const colour = colourOf(classes[i], strong ? 1 : 0.25);
  context.lineWidth = 2.5 * unit;
  context.strokeStyle = colour;
  context.strokeRect(x1, y1, x2 - x1, y2 - y1);
  if (!strong) return;
  const text = `${labelOf(labels, classes[i])} ${percent(scores[i])}`;
  const letters = context.canvas.clientWidth < 500 ? 11 : 13;
  context.font = `600 ${letters * unit}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  const [width, height] = [context.measureText(text).width + 10 * unit, (letters + 7) * unit];
  const left = Math.max(0, Math.min(x1 - 1.25 * unit, context.canvas.width / context.getTransform().a - width));
  const top = y1 >= height ? y1 - height : Math.max(0, y1);
  context.fillStyle = colour;
  context.fillRect(left, top, width, height);
  context.fillStyle = (hueOf(classes[i]) > 40 && hueOf(classes[i]) < 200) || classes[i] % 3 === 2 ? "#000" : "#fff";
  context.fillText(text, left + 5 * unit, top + height / 2);
}

function drawMasks(context, { masks, classes, image: [width, height] }, only) {
  const layer = new ImageData(width, height);
  for (let i = masks.length - 1; i >= 0; i--) {
    if (only !== null && only !== i) continue;
    const [red, green, blue] = rgbOf(classes[i]);
    for (let at = 0; at < masks[i].length; at++) if (masks[i][at]) layer.data.set([red, green, blue, 120], 4 * at);
  }
  context.drawImage(layerOf(layer), 0, 0);
}

function layerOf(pixels) {
  const canvas = new OffscreenCanvas(pixels.width, pixels.height);
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

function rgbOf(number) {
  const [hue, light] = [hueOf(number), lightnessOf(number)];
  const part = (n) => light - 0.85 * Math.min(light, 1 - light) * Math.max(-1, Math.min((n + hue / 30) % 12 - 3, 9 - ((n + hue / 30) % 12), 1));
  return [0, 8, 4].map((n) => Math.round(255 * part(n)));
}

function drawKeypoints(context, points, unit) {
  context.lineWidth = 2.5 * unit;
  context.strokeStyle = "#ffd23f";
  if (points.length === 17) {
    for (const [from, to] of LIMBS) {
      if (points[from][2] < SEEN || points[to][2] < SEEN) continue;
      context.beginPath();
      context.moveTo(points[from][0], points[from][1]);
      context.lineTo(points[to][0], points[to][1]);
      context.stroke();
    }
  }
  for (const [x, y, score] of points) {
    if (score < SEEN) continue;
    context.beginPath();
    context.arc(x, y, 4 * unit, 0, 2 * Math.PI);
    context.fillStyle = "#ff3d71";
    context.fill();
    context.lineWidth = unit;
    context.strokeStyle = "#fff";
    context.stroke();
  }
}

/** Return one sentence that says the answer, for people who do not see the picture. */
export function sentenceOf(answer) {
  if (answer.text !== null) return answer.text === "" ? "No text." : `Text: ${answer.text}`;
  if (answer.top.length) return `${labelOf(answer.labels, answer.top[0][0])}, ${percent(answer.top[0][1])}`;
  if (answer.task === "classify") return "No class.";
  if (!answer.boxes.length) return "Nothing above this confidence.";
  const counts = new Map();
  for (const number of answer.classes) counts.set(number, (counts.get(number) ?? 0) + 1);
  return [...counts].map(([number, count]) => (count > 1 ? `${count} × ` : "") + labelOf(answer.labels, number)).join(", ");
}

/** Return the elements that list the answer. `stress` is called with the number of an object, or null. */
export function listOf(answer, stress) {
  if (answer.text !== null) return element("p", answer.text, "read");
  const list = element("ol");
  for (const [number, score] of answer.top) {
    const item = element("li", "", "class");
    const bar = element("span", "", "bar");
    bar.append(element("i"));
    bar.firstChild.style.width = `${100 * Math.min(Math.max(score, 0), 1)}%`;
    bar.setAttribute("aria-hidden", "true");
    item.append(element("span", labelOf(answer.labels, number), "name"), element("span", percent(score), "score"), bar);
    list.append(item);
  }
  for (const [i, [x1, y1, x2, y2]] of answer.boxes.entries()) {
    const item = element("li", "", "object");
    item.tabIndex = 0;
    const dot = element("span", "", "dot");
    dot.style.background = colourOf(answer.classes[i]);
    const more = [`${Math.round(x1)}, ${Math.round(y1)} – ${Math.round(x2)}, ${Math.round(y2)} px`];
    if (answer.masks) more.push(`${answer.masks[i].reduce((sum, one) => sum + one, 0)} px²`);
    if (answer.keypoints) more.push(`${answer.keypoints[i].filter(([, , score]) => score >= SEEN).length} keypoints`);
    item.append(dot, element("span", labelOf(answer.labels, answer.classes[i]), "name"), element("span", percent(answer.scores[i]), "score"), element("span", more.join(" · "), "more"));
    for (const [event, value] of [["mouseenter", i], ["focus", i], ["mouseleave", null], ["blur", null]]) item.addEventListener(event, () => stress(value));
    list.append(item);
  }
  return list;
}

/** Return a table. Numbers are set to the right. */
export function tableOf(title, heads, rows) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  const numeric = (cell) => typeof cell === "number" || /^(–|-?[\d]+\.[\d]+)$/.test(cell);
  for (const [i, text] of heads.entries()) {
    const cell = element("th", text, rows.length && numeric(rows[0][i]) ? "n" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) line.append(element("td", String(cell), numeric(cell) ? "n" : ""));
  }
  return [element("h2", title), table];
}
