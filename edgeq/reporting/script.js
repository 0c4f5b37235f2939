// Show the settings of the mark that is pointed at, focused or tapped. The rest of the page works without this script.
for (const plot of document.querySelectorAll(".interactive")) {
  const panel = plot.querySelector(".detail");
  const points = plot.querySelectorAll("[data-candidate]");
  const show = (point) => {
    const detail = plot.querySelector(`[data-detail="${point.dataset.candidate}"]`);
    if (!detail) return;
    panel.replaceChildren(...detail.cloneNode(true).childNodes);
    for (const other of points) {
      other.classList.toggle("active", other.dataset.candidate === point.dataset.candidate);
    }
  };
  for (const point of points) {
    for (const event of ["mouseenter", "focus", "click"]) point.addEventListener(event, () => show(point));
  }
}
