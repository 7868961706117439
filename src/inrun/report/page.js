// Puts the data of the report into the page.

function header() {
  for (const c of data.cards) {
    byId("cards").append(el("div", { class: "card" }, el("dt", null, c.name), el("dd", { class: "number" }, minus(c.value)), el("dd", { class: "note" }, minus(c.note))));
  }
}

function overview() {
  const h = data.histogram;
  if (!h) { byId("histogram").replaceWith(el("p", { class: "empty" }, "No example has a value yet.")); return; }
  const unit = scale(h.edges), out = h.outside[0] + h.outside[1];
  byId("histogram-note").textContent = `${count(h.negative)} of ${count(h.n)} (${(100 * h.negative / h.n).toFixed(1)} %) are negative; the median is ${number(h.median)}. The axis is in ${unit.unit ? unit.unit.slice(1) + " of the" : "units of the"} validation loss`
    + (out ? `; ${count(out)} beyond the ends are in the outermost bars.` : ".");
  histogram(byId("histogram"), byId("histogram-readout"), h);
}

function audit() {
  const a = data.audit;
  if (!a) {
    byId("audit-lead").remove();
    byId("audit-charts").replaceWith(el("p", { class: "empty" }, "Fewer than two steps were audited. Set audit_every in inrun.watch to measure whether the values add up."));
    return;
  }
  byId("audit-lead").textContent = `At ${count(a.audited)} of ${count(a.steps)} steps the validation loss was measured before the step, after momentum and decay alone, and after the whole step.`;
  lines(byId("loss"), byId("loss-readout"), a.step, [{ name: "loss", values: a.loss, style: "s-loss" }],
    `Validation loss from ${number(a.loss[0])} to ${number(a.loss[a.loss.length - 1])}`, 200);
  const series = a.whole ? [
    { name: "loss drop (measured)", values: a.whole, style: "s-batch" },
    { name: "loss drop (credited, momentum included)", values: a.drop, style: "s-sum" },
    { name: "weight decay's part", values: a.decay, style: "s-nobody" },
    { name: "residual", values: a.residual, style: "s-residual" },
  ] : [
    { name: "batch share (measured)", values: a.batch_share, style: "s-batch" },
    { name: "sum of values (credited)", values: a.sum, style: "s-sum" },
    ...(a.nobody ? [{ name: "nobody's part", values: a.nobody, style: "s-nobody" }] : []),
    { name: "momentum share", values: a.momentum_share, style: "s-momentum" },
    { name: "residual", values: a.residual, style: "s-residual" },
  ];
  for (const s of series) {
    const key = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    key.append(svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, class: "line " + s.style }));
    byId("shares-legend").append(el("li", null, key, s.name));
  }
  const what = a.whole ? "Measured and credited loss drop, decay and residual" : `Batch share, sum of values, ${a.nobody ? "nobody's part, " : ""}momentum share and residual`;
  lines(byId("shares"), byId("shares-readout"), a.step, series, `${what}, summed over the audited steps`, 280);
}

function examples() {
  const n = data.columns.id.length, k = data.lists.best.length;
  if (!k) { byId("examples-table").append(el("p", { class: "empty" }, "No example has a value yet.")); byId("suspects").remove(); return; }
  const all = n < data.examples ? `A sample of ${count(n)} of ${count(data.examples)} examples.` : `All ${count(n)} examples; text and images come with the listed best, worst and suspects.`;
  exampleTable(byId("examples-table"), data, { views: [
    { key: "best", name: "Helped most", note: `The ${count(k)} highest values.` },
    { key: "worst", name: "Hurt most", note: `The ${count(k)} lowest values.` },
    { key: "all", name: "All", note: all },
  ] });
  byId("steady").textContent = data.steady;
  if (data.window) byId("suspects-how").textContent = `Ranked by how badly the model fitted them while it learned (EL2N and margin), more so in labels whose badly fitted examples were harmful, and by harm where that tells more. ${data.values_said} Visits: steps ${count(data.window.since)} to ${count(data.window.until - 1)}, ${data.window.why}.`;
  if (!data.lists.suspects.length) { byId("suspects-table").append(el("p", { class: "empty" }, "Harm needs batches of two or more examples.")); return; }
  exampleTable(byId("suspects-table"), data, { views: [{ key: "suspects", name: "Suspects", note: `The ${count(data.lists.suspects.length)} ${data.window ? "most suspicious examples" : "examples of most harm"}.` }] });
}

function epochs() {
  if (!data.epochs.length) return;
  const names = ["value", "loss", "el2n", "margin"].filter((k) => data.epochs.some((e) => typeof e[k] === "number"));
  const body = el("tbody");
  for (const e of data.epochs) {
    body.append(el("tr", null, el("td", { class: "num", "data-name": "epoch" }, count(e.epoch)),
      el("td", { class: "num", "data-name": "steps" }, `${count(e.since)} to ${count(e.until - 1)}`),
      el("td", { class: "num", "data-name": "visits" }, count(e.examples)),
      ...names.map((k) => el("td", { class: "num", "data-name": k }, number(e[k])))));
  }
  const head = ["epoch", "steps", "visits", ...names.map((k) => (k === "value" ? "sum of values" : "mean " + k))];
  byId("epochs").append(el("h3", null, "Epochs"), el("div", { class: "frame" }, el("table", { class: "rows" },
    el("thead", null, el("tr", null, ...head.map((text) => el("th", { scope: "col", class: "num" }, text)))), body)));
}

function groups() {
  const kinds = Object.keys(data.by);
  if (!kinds.length) {
    byId("by").append(el("p", { class: "empty" }, "No labels or groups are known. Give inrun report an --examples file with a label or group column to see who helped and who hurt."));
  }
  for (const kind of kinds) {
    const rows = data.by[kind], unit = scale(rows.map((r) => r.mean)), most = Math.max(...rows.map((r) => Math.abs(r.mean)), 1e-300);
    const body = el("tbody");
    for (const r of rows) {
      const bar = el("i", { class: r.mean < 0 ? "neg" : "pos" }), part = (Math.abs(r.mean) / most) * 50;
      bar.style.width = part + "%";
      bar.style.left = (r.mean < 0 ? 50 - part : 50) + "%";
      const name = el("bdi", { dir: "auto" });
      name.textContent = r.name;
      body.append(el("tr", null, el("td", { class: "word", "data-name": kind }, name),
        el("td", { class: "num", "data-name": "examples" }, count(r.n)), el("td", { class: "num", "data-name": "mean value" }, unit.show(r.mean)),
        el("td", { class: "wide", "data-name": "" }, el("span", { class: "meter", "aria-hidden": "true" }, bar)),
        el("td", { class: "num", "data-name": "negative" }, (100 * r.hurt).toFixed(0) + " %"),
        el("td", { class: "num", "data-name": "mean harm" }, r.harm === null ? "–" : r.harm.toFixed(2))));
    }
    const head = [[kind], ["examples", "num"], [("mean value " + unit.unit).trim(), "num"], [""], ["negative", "num"], ["mean harm", "num"]];
    byId("by").append(el("h3", null, `Values by ${kind}`), el("div", { class: "frame" }, el("table", { class: "rows" },
      el("thead", null, el("tr", null, ...head.map(([text, style]) => el("th", { scope: "col", class: style || "" }, text)))), body)));
  }
  data.heat.forEach(heat);
}

function heat(h) {
  const flat = h.mean.flat(), unit = scale(flat), most = Math.max(...flat.map((v) => Math.abs(v || 0)), 1e-300);
  const body = el("tbody");
  h.rows.forEach((name, r) => {
    const row = el("tr", null, el("th", { scope: "row", title: name }, el("bdi", null, name)));
    h.mean[r].forEach((v, c) => {
      const td = el("td", { title: `${h.by} ${name}, target ${h.columns[c]}: ${number(v)}` }, unit.show(v));
      const part = Math.round((Math.abs(v || 0) / most) * 75);
      td.style.backgroundColor = `color-mix(in srgb, var(${v < 0 ? "--neg" : "--pos"}) ${part}%, transparent)`;
      row.append(td);
    });
    body.append(row);
  });
  const left = [h.left_out[0] ? `${count(h.left_out[0])} smaller ${h.by}s` : "", h.left_out[1] ? `${count(h.left_out[1])} targets` : ""].filter(Boolean);
  byId("heat").append(el("h3", null, `Who teaches what: ${h.by} against target`), el("div", { class: "heat" },
    el("div", { class: "frame" }, el("table", null,
      el("caption", null, `Mean value ${unit.unit} of a ${h.by}'s examples (rows) on each validation target (columns).` + (left.length ? ` Not shown: ${left.join(", ")}.` : "")),
      el("thead", null, el("tr", null, el("td"), ...h.columns.map((c) => el("th", { scope: "col", title: c }, el("bdi", null, c))))), body))));
}

shell();
header();
overview();
audit();
epochs();
examples();
tokens();
answers();
groups();
