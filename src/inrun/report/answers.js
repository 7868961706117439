// Questions that were asked after the training, and the examples that taught the model the answer.

function answers() {
  const list = data.answers;
  if (!list) {
    byId("answers").remove();
    document.querySelector('nav a[href="#answers"]').remove();
    return;
  }
  const every = list.flatMap((q) => q.examples);
  if (!every.some((e) => e.pieces)) byId("answers-legend").remove();
  if (every.some((e) => e.pieces && !e.words)) byId("answers-words").textContent = " Numbers stand for tokens whose text is not known: give a --tokenizer, or --examples with a column “tokens”.";
  for (const q of list) {
    const title = el("h3", { class: "question", dir: "auto" });
    title.textContent = q.question;
    const most = Math.max(...q.examples.map((e) => Math.abs(e.score)), 1e-300);
    const body = el("ol", { class: "answers" });
    for (const e of q.examples) {
      const name = el("b"), bar = el("i", { class: e.score < 0 ? "neg" : "pos" }), readout = el("output");
      name.textContent = String(e.id);
      bar.style.left = "0";
      bar.style.width = (Math.abs(e.score) / most) * 100 + "%";
      const text = e.pieces ? shaded(e, readout) : el("p", { dir: "auto" });
      if (!e.pieces) text.textContent = e.text || "";
      body.append(el("li", { class: "shaded" }, el("h4", null, name, el("span", { class: "score" }, `${number(e.score)}`, readout), el("span", { class: "meter", "aria-hidden": "true" }, bar)), text));
    }
    byId("answers-list").append(el("article", null, title, el("p", { class: "note" }, `loss of this question: ${number(q.loss)}`), body));
  }
}
