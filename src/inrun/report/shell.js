// What all pages have: data, title, footer, colour theme.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function theme() {
  const button = byId("theme"), root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  try { const kept = localStorage.getItem("inrun-theme"); if (kept) root.dataset.theme = kept; } catch { /* storage may be off */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("inrun-theme", root.dataset.theme); } catch { /* storage may be off */ }
    label();
  });
  system.addEventListener("change", label);
  label();
}

function shell() {
  byId("title").textContent = data.title;
  byId("about").textContent = data.about.filter(Boolean).join("  ·  ");
  byId("footer").textContent = "Made by inrun. This file holds everything it shows and loads nothing.";
  theme();
}
