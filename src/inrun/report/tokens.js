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
    const readout = el("output"), body = shaded(text, readout);
    const name = el("b");
    name.textContent = String(text.id);
    byId("tokens-texts").append(el("article", { class: "shaded" }, el("h3", null, name, `, step ${count(text.step)}: value ${number(text.value)}`, readout), body));
  }
}
