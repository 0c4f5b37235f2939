// Returns the words that are broken across lines, the texts of too little contrast, and the elements wider than the page.
(root) => {
  const found = { broken: [], pale: [], wide: [] };
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const onto = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.unshift(rgba(getComputedStyle(e).backgroundColor));
    return layers.reduce((below, top) => onto(top, below), [255, 255, 255]);
  };
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const texts = document.createTreeWalker(document.querySelector(root), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, element = text.parentElement;
    if (!text.data.trim() || element.closest("style, script, title, .label-text") || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), drawn = element.closest("svg");
    const below = ground(drawn ? drawn.parentElement : element);
    const [a, b] = [luminance(onto(rgba(drawn ? style.fill : style.color), below)), luminance(below)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.pale.push(`${text.data.trim().slice(0, 60)}: ${contrast.toFixed(2)}`);
    for (const word of text.data.matchAll(/\p{L}{2,}/gu)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((r) => r.width > 0).map((r) => Math.round(r.top)));
      if (lines.size > 1) found.broken.push(`${word[0]} in ${text.data.trim().slice(0, 60)}`);
    }
  }
  for (const e of document.querySelectorAll(`${root}, ${root} *`)) {
    const inside = e.closest(".scroll, pre, .label-text, svg");
    if (!inside && e.getBoundingClientRect().right > innerWidth + 1) found.wide.push(e.outerHTML.slice(0, 80));
  }
  return found;
}
