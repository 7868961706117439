// A text whose positions are shaded by their value. Pieces are [string, value, position].

function shaded(text, readout) {
  const sizes = text.pieces.map(([, v]) => Math.abs(v)).sort((a, b) => a - b);
  const most = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1e-300;
  const body = el("p", { dir: "auto" });
  text.pieces.forEach(([piece, value, position]) => {
    const says = `position ${position}: ${number(value)}`;
    const say = () => { readout.textContent = " · " + says; };
    const span = el("span", { title: says, onmouseenter: say, onclick: say });
    span.textContent = piece;
    const part = Math.round(70 * Math.min(1, Math.abs(value) / most));
    if (part) span.style.backgroundColor = `color-mix(in srgb, var(${value < 0 ? "--neg" : "--pos"}) ${part}%, transparent)`;
    body.append(span);
  });
  if (text.length) body.append(el("em", { class: "note" }, ` … ${count(text.length)} positions in all`));
  return body;
}
