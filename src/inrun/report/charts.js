// Small helpers and the two charts: a histogram and lines. Everything from the data goes in as text.

function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function svg(tag, props) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(props || {})) node.setAttribute(key, value);
  return node;
}

const minus = (text) => text.replace(/-/g, "−");
const count = (n) => n.toLocaleString("en");

function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-4) {
    const [m, e] = x.toExponential(digits - 1).split("e");
    return minus(m) + " × 10" + [...String(Number(e))].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
  }
  return minus(Number(x.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 }));
}

// Values share one power of ten, so that columns compare at a glance.
function scale(values) {
  let top = 0;
  for (const v of values) if (v !== null && Math.abs(v) > top) top = Math.abs(v);
  const power = top ? Math.floor(Math.log10(top) / 3 - 1e-9) * 3 : 0;
  const raised = [...String(power)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
  return {
    unit: power ? "×10" + raised : "",
    tick: (v) => minus(String(Number((v / 10 ** power).toPrecision(6)))),
    show: (v) => (v === null || v === undefined ? "–" : minus((v / 10 ** power).toFixed(top / 10 ** power < 10 ? 3 : 2).replace(/^-(0\.0+)$/, "$1"))),
  };
}

function ticks(low, high, n) {
  const raw = (high - low) / n || 1;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * base).find((s) => s >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-6; k++) found.push(k ? k * step : 0);
  return found;
}

// A frame with axes that redraws itself when its width changes; left and right keys move the cursor.
function chart(root, readout, options, draw) {
  const height = options.height || 240, pad = { left: 62, right: 14, top: 10, bottom: 28 };
  let at = null, view = null;
  const tell = (index) => {
    at = index;
    view.mark(index);
    readout.textContent = options.read(index);
  };
  const render = () => {
    const width = Math.max(280, root.clientWidth - 24);
    const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": options.label });
    const x = (v) => pad.left + ((v - options.x[0]) / (options.x[1] - options.x[0] || 1)) * (width - pad.left - pad.right);
    const y = (v) => height - pad.bottom - ((v - options.y[0]) / (options.y[1] - options.y[0] || 1)) * (height - pad.top - pad.bottom);
    const text = (value, at) => { const t = svg("text", at); t.textContent = value; node.append(t); };
    for (const t of ticks(...options.y, 4)) {
      node.append(svg("line", { x1: pad.left, x2: width - pad.right, y1: y(t), y2: y(t), class: t === 0 ? "zero" : "grid" }));
      text(options.ytext(t), { x: pad.left - 8, y: y(t) + 4, "text-anchor": "end" });
    }
    for (const t of ticks(...options.x, Math.max(3, Math.floor(width / 130)))) {
      text(options.xtext(t), { x: x(t), y: height - 8, "text-anchor": x(t) > width - 40 ? "end" : "middle" });
    }
    view = draw(node, x, y, { width, height, pad });
    const pick = (event) => {
      const box = node.getBoundingClientRect();
      tell(options.nearest(options.x[0] + (((event.clientX - box.left) * (width / box.width) - pad.left) / (width - pad.left - pad.right)) * (options.x[1] - options.x[0])));
    };
    node.addEventListener("pointermove", pick);
    node.addEventListener("pointerdown", pick);
    node.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      tell(Math.min(options.n - 1, Math.max(0, at === null ? 0 : at + move)));
    });
    root.replaceChildren(node);
    if (at !== null) view.mark(at);
  };
  readout.textContent = options.hint;
  render();
  let last = root.clientWidth;
  new ResizeObserver(() => { if (root.clientWidth !== last) { last = root.clientWidth; render(); } }).observe(root);
}

function histogram(root, readout, data) {
  const { edges, counts } = data, unit = scale(edges), top = Math.max(...counts);
  // many more near 0 than elsewhere is the rule: a square-root scale keeps the tails visible
  const high = (n) => Math.sqrt(n);
  chart(root, readout, {
    label: `Histogram of ${count(data.n)} values; ${count(data.negative)} are negative.`,
    hint: "Point at a bar, or use the arrow keys, for its numbers. Heights are square roots of the counts.",
    x: [edges[0], edges[edges.length - 1]], y: [0, high(top) * 1.05], n: counts.length,
    xtext: unit.tick, ytext: (v) => count(Math.round(v * v)),
    nearest: (v) => Math.min(counts.length - 1, Math.max(0, edges.findIndex((e) => e > v) - 1)),
    read: (i) => `${count(counts[i])} examples between ${unit.show(edges[i])} and ${unit.show(edges[i + 1])} ${unit.unit}`,
  }, (node, x, y) => {
    const bars = counts.map((n, i) => {
      const bar = svg("rect", { x: x(edges[i]) + 0.5, width: Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1), y: y(high(n)), height: y(0) - y(high(n)), class: edges[i + 1] <= 1e-15 ? "bar-neg" : "bar-pos" });
      node.append(bar);
      return bar;
    });
    node.append(svg("line", { x1: x(0), x2: x(0), y1: y(0), y2: y(high(top) * 1.05), class: "zero" }));
    return { mark: (at) => bars.forEach((bar, i) => bar.classList.toggle("on", i === at)) };
  });
}

function lines(root, readout, steps, series, label, height) {
  const all = series.flatMap((s) => s.values).filter((v) => v !== null);
  let low = Math.min(...all), high = Math.max(...all);
  if (series.length > 1) { low = Math.min(0, low); high = Math.max(0, high); }
  const room = (high - low || 1) * 0.06;
  chart(root, readout, {
    label, height, hint: "Point at the chart, or use the arrow keys, for the numbers of a step.",
    x: [steps[0], steps[steps.length - 1]], y: [low - room, high + room], n: steps.length,
    xtext: (v) => (Number.isInteger(v) ? count(v) : ""), ytext: (v) => number(v, 3),
    nearest: (v) => { let best = 0; steps.forEach((s, i) => { if (Math.abs(s - v) < Math.abs(steps[best] - v)) best = i; }); return best; },
    read: (i) => [`step ${count(steps[i])}`, ...series.map((s) => `${s.name} ${number(s.values[i])}`)].join("  ·  "),
  }, (node, x, y, { height, pad }) => {
    for (const s of series) {
      const points = s.values.map((v, i) => (v === null ? null : `${x(steps[i]).toFixed(1)},${y(v).toFixed(1)}`)).filter(Boolean);
      node.append(svg("polyline", { points: points.join(" "), class: "line " + s.style }));
    }
    const cursor = svg("line", { y1: pad.top, y2: height - pad.bottom, class: "cursor", visibility: "hidden" });
    node.append(cursor);
    return { mark: (i) => { cursor.setAttribute("x1", x(steps[i])); cursor.setAttribute("x2", x(steps[i])); cursor.setAttribute("visibility", "visible"); } };
  });
}
