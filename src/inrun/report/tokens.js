// Texts whose positions are shaded by their value.

function tokens() {
  const t = data.tokens;
  if (!t) {
    byId("tokens").remove();
    document.querySelector('nav a[href="#tokens"]').remove();
    return;
  }
  const shown = t.texts.length < t.count ? `The ${count(t.texts.length)} of ${count(t.count)} that helped and hurt most in their step.` : "";
  const how = t.words ? "" : " Numbers stand for tokens whose text is not known: give inrun report a --tokenizer, or --examples with a column “tokens”.";
  byId("tokens-lead").textContent = `What each token of a text did in the step named above it. ${shown} Full colour stands for the largest values of that text; point at a token to read its value.${how}`;
  for (const text of t.texts) {
    const sizes = text.pieces.map(([, v]) => Math.abs(v)).sort((a, b) => a - b);
    const most = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1e-300;
    const body = el("p", { dir: "auto" }), readout = el("output");
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
    const name = el("b");
    name.textContent = String(text.id);
    byId("tokens-texts").append(el("article", { class: "shaded" }, el("h3", null, name, `, step ${count(text.step)}: value ${number(text.value)}`, readout), body));
  }
}
