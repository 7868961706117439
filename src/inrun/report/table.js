// A table of examples: views, search, sorting and paging over columns; only one page is in the document.

function exampleTable(root, data, options) {
  const columns = data.columns, n = columns.id.length;
  const names = { label: columns.label_names, group: columns.group_names };
  const unit = scale(Object.values(data.lists).flat().map((i) => columns.value[i]));
  const largest = Math.max(...Object.values(data.lists).flat().map((i) => Math.abs(columns.value[i] || 0)), 1e-300);
  const mostHarm = Math.max(...data.lists.suspects.map((i) => columns.harm[i] || 0), 1e-300);
  const shown = Object.keys(data.content).length > 0;
  const texts = Object.values(data.content).some((c) => c.text !== undefined);
  const word = (name, i) => (columns[name][i] < 0 ? null : names[name][columns[name][i]]);
  const heads = [
    { key: "rank", name: "#" },
    shown && { key: "example", name: "example" },
    { key: "id", name: "id", sort: true },
    columns.label && { key: "label", name: "label", sort: true },
    columns.group && { key: "group", name: "group", sort: true },
    { key: "value", name: ("value " + unit.unit).trim(), sort: true, numeric: true },
    { key: "harm", name: "harm", sort: true, numeric: true },
    columns.loss && { key: "loss", name: "mean loss", sort: true, numeric: true },
    columns.change && { key: "change", name: "change of loss", sort: true, numeric: true },
    { key: "steps", name: "steps", sort: true, numeric: true },
  ].filter(Boolean);
  const state = { view: options.views[0].key, query: "", sort: null, up: false, page: 0, size: 10 };
  let rows = [];

  function matches(query) {
    const hit = {};
    for (const name of ["label", "group"]) if (names[name]) hit[name] = names[name].map((x) => x.toLowerCase().includes(query));
    return (i) => String(columns.id[i]).toLowerCase().includes(query)
      || (hit.label && hit.label[columns.label[i]]) || (hit.group && hit.group[columns.group[i]])
      || Boolean(data.content[i] && data.content[i].text && data.content[i].text.toLowerCase().includes(query));
  }

  function key(name) {
    if (name === "label" || name === "group") return (i) => word(name, i);
    return (i) => columns[name][i];
  }

  function order() {
    rows = state.view === "all" ? Array.from({ length: n }, (_, i) => i) : data.lists[state.view].slice();
    const query = state.query.trim().toLowerCase();
    if (query) rows = rows.filter(matches(query));
    if (state.sort) {
      const of = key(state.sort), sign = state.up ? 1 : -1;
      const text = new Intl.Collator("en", { numeric: true });
      rows.sort((a, b) => {
        const x = of(a), y = of(b);
        if (x === y) return a - b;
        if (x === null || x === undefined) return 1; // what has no value comes last, either way
        if (y === null || y === undefined) return -1;
        return sign * (typeof x === "number" ? x - y : text.compare(x, y));
      });
    }
  }

  function meter(value, most) {
    const bar = el("i", { class: value < 0 ? "neg" : "pos" });
    const part = Math.min(1, Math.abs(value) / most) * 50;
    bar.style.width = part + "%";
    bar.style.left = (value < 0 ? 50 - part : 50) + "%";
    return el("span", { class: "meter", "aria-hidden": "true" }, bar);
  }

  function content(i) {
    const c = data.content[i];
    if (!c) return [el("span", { class: "none" }, "–")];
    const found = [];
    if (c.image) found.push(el("img", { src: c.image, alt: `image of example ${columns.id[i]}` }));
    if (c.text !== undefined) {
      const text = el("div", { class: "text", dir: "auto" });
      text.textContent = c.text;
      found.push(text);
      found.push(el("button", { type: "button", class: "more", hidden: "", "aria-expanded": "false", onclick: (event) => {
        const open = text.classList.toggle("open");
        event.target.textContent = open ? "less" : "more";
        event.target.setAttribute("aria-expanded", String(open));
      } }, "more"));
      if (c.length) found.push(el("span", { class: "cut" }, `  cut here; ${count(c.length)} characters in all`));
    }
    return found;
  }

  function cell(head, i, rank) {
    const k = head.key;
    if (k === "rank") return el("td", { class: "rank" }, count(rank + 1));
    if (k === "example") return el("td", { class: texts ? "example" : "example image", "data-name": "" }, ...content(i));
    if (k === "value") {
      const td = el("td", { class: "num", "data-name": "value" }, unit.show(columns.value[i]));
      if (columns.value[i] !== null) td.append(meter(columns.value[i], largest));
      return td;
    }
    if (k === "harm") return el("td", { class: "num", "data-name": "harm" }, columns.harm[i] === null ? "–" : columns.harm[i].toFixed(mostHarm < 10 ? 2 : 1));
    if (k === "loss" || k === "change") return el("td", { class: "num", "data-name": head.name }, columns[k][i] === null ? "–" : columns[k][i].toFixed(3));
    if (k === "steps") return el("td", { class: "num", "data-name": "steps" }, count(columns.steps[i]));
    const bdi = el("bdi", { dir: "auto" });
    const text = k === "id" ? columns.id[i] : word(k, i);
    bdi.textContent = text === null ? "–" : text;
    const short = bdi.textContent.length <= 16 ? " nowrap" : "";
    return el("td", { class: (k === "id" ? "id" : "word") + short, "data-name": k }, bdi);
  }

  const tabs = el("div", { class: "tabs", role: "group", "aria-label": "Which examples" });
  const search = el("input", { type: "search", placeholder: "Search id, text, label, group", "aria-label": "Search the examples" });
  const sorter = el("select", { "aria-label": "Sort by" });
  const body = el("tbody"), headRow = el("tr"), caption = el("caption");
  const status = el("span", { role: "status" });
  const size = el("select", { "aria-label": "Rows on a page" }, ...[10, 25, 100].map((s) => el("option", { value: s }, `${s} rows`)));
  const back = el("button", { type: "button" }, "Previous"), next = el("button", { type: "button" }, "Next");

  function draw(reorder) {
    if (reorder) { order(); state.page = 0; }
    const pages = Math.max(1, Math.ceil(rows.length / state.size));
    state.page = Math.min(state.page, pages - 1);
    const first = state.page * state.size;
    body.replaceChildren(...rows.slice(first, first + state.size).map((i, k) =>
      el("tr", null, ...heads.map((h) => cell(h, i, first + k)))));
    for (const text of body.querySelectorAll(".text")) text.nextSibling.hidden = text.scrollHeight <= text.clientHeight + 1;
    if (!rows.length) body.append(el("tr", null, el("td", { colspan: heads.length, class: "none" }, "Nothing matches.")));
    const view = options.views.find((v) => v.key === state.view);
    caption.textContent = view.note + (unit.unit ? ` Values ${unit.unit}.` : "");
    for (const th of headRow.children) {
      if (state.sort && th.dataset.key === state.sort) th.setAttribute("aria-sort", state.up ? "ascending" : "descending");
      else th.removeAttribute("aria-sort");
    }
    sorter.value = state.sort ? state.sort + (state.up ? "+" : "-") : "";
    for (const tab of tabs.children) tab.setAttribute("aria-pressed", String(tab.dataset.key === state.view));
    status.textContent = rows.length ? `${count(first + 1)}–${count(Math.min(first + state.size, rows.length))} of ${count(rows.length)}` : "0 of 0";
    back.disabled = state.page === 0;
    next.disabled = state.page >= pages - 1;
  }

  for (const v of options.views) {
    tabs.append(el("button", { type: "button", "data-key": v.key, onclick: () => { state.view = v.key; state.sort = null; draw(true); } }, v.name));
  }
  sorter.append(el("option", { value: "" }, "as listed"));
  for (const head of heads) {
    const th = el("th", { scope: "col", "data-key": head.key, class: head.numeric ? "num" : "" });
    if (head.sort) {
      th.append(el("button", { type: "button", onclick: () => {
        if (state.sort === head.key) state.up = !state.up;
        else { state.sort = head.key; state.up = !head.numeric; }
        draw(true);
      } }, head.name));
      sorter.append(el("option", { value: head.key + "-" }, `${head.key}, highest first`), el("option", { value: head.key + "+" }, `${head.key}, lowest first`));
    } else th.textContent = head.name;
    headRow.append(th);
  }
  let timer = null;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { state.query = search.value; draw(true); }, 120); });
  sorter.addEventListener("change", () => { state.sort = sorter.value.slice(0, -1) || null; state.up = sorter.value.endsWith("+"); draw(true); });
  size.addEventListener("change", () => { state.size = Number(size.value); draw(true); });
  back.addEventListener("click", () => { state.page -= 1; draw(false); });
  next.addEventListener("click", () => { state.page += 1; draw(false); });
  root.append(
    el("div", { class: "tools" }, options.views.length > 1 ? tabs : null, search, el("label", { class: "sorter" }, "sort ", sorter)),
    el("div", { class: "frame" }, el("table", { class: "rows" }, caption, el("thead", null, headRow), body)),
    el("div", { class: "pager" }, status, el("span", { class: "space" }), size, back, next),
  );
  draw(true);
}
