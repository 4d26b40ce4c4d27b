"use strict";

// The reasons behind a cell of layers and rewrites.
for (const button of document.querySelectorAll("button.cell")) {
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => {
    const section = button.closest("section");
    for (const other of section.querySelectorAll("button.cell")) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", "true");
    const { fired, near } = JSON.parse(button.dataset.cell);
    const list = document.createElement("ul");
    const add = (text) => list.append(Object.assign(document.createElement("li"), { textContent: text }));
    for (const [path, source, attributes] of fired) {
      add(`fired in ${path || "the graph"}${source ? ` (${source})` : ""}${attributes ? `: ${attributes}` : ""}`);
    }
    for (const [path, source, depth, expected, found] of near) {
      add(`${depth} there in ${path || "the graph"}${source ? ` (${source})` : ""}: expected ${expected}; found ${found}`);
    }
    const title = Object.assign(document.createElement("p"), { textContent: button.getAttribute("aria-label") });
    section.querySelector(".details").replaceChildren(title, list);
  });
}

function spell(number, unit, step) {
  if (!Number.isFinite(number)) return "";
  let i = 0;
  while (number >= step && i < unit.length - 1) { number /= step; i += 1; }
  return `${number >= 100 ? number.toFixed(0) : number.toPrecision(3)} ${unit[i]}`;
}

function spellTime(seconds) {
  return seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toPrecision(3)} us`;
}

// Formulas of the sizes that the sliders choose; a slider moves in powers of two.
for (const section of document.querySelectorAll("section.cost")) {
  const rows = JSON.parse(section.dataset.cost);
  const bandwidth = Number(section.dataset.bandwidth), flops = Number(section.dataset.flops);
  const sliders = [...section.querySelectorAll("input[type=range]")];
  const names = [...new Set([...sliders.map((slider) => slider.name), "T", "R", "S", "C"])];
  const formulas = rows.map(([count, ...both]) =>
    [count, ...both.map((text) => new Function(...names, `return ${text}`))]);
  const lines = [...section.querySelectorAll("tbody tr")];

  function update() {
    const sizes = Object.fromEntries(sliders.map((slider) => [slider.name, 2 ** Number(slider.value)]));
    for (const output of section.querySelectorAll("output")) output.value = sizes[output.getAttribute("name")];
    const prefill = section.querySelector("input[value=prefill]")?.checked;
    sizes.S = sizes.R = prefill ? 1 : sizes.T;
    if (prefill) sizes.C = sizes.T;
    const values = names.map((name) => sizes[name]);
    const costs = formulas.map(([count, bytes, work]) => {
      const moved = count * bytes(...values), done = count * work(...values);
      return [moved, done, bandwidth ? Math.max(moved / bandwidth, flops ? done / flops : 0) : NaN];
    });
    const sums = [0, 1, 2].map((i) => costs.reduce((sum, cost) => sum + cost[i], 0));
    const weight = bandwidth ? 2 : 0;
    lines.forEach((line, i) => {
      const [moved, done, seconds] = costs[i];
      line.querySelector(".bytes").textContent = spell(moved, ["B", "kB", "MB", "GB", "TB"], 1000);
      line.querySelector(".flops").textContent = spell(done, ["", "k", "M", "G", "T", "P"], 1000);
      line.querySelector(".time").textContent = bandwidth ? spellTime(seconds) : "";
      line.querySelector(".bar").style.width = `${(100 * costs[i][weight]) / sums[weight]}px`;
    });
    section.querySelector(".total").textContent =
      `${spell(sums[0], ["B", "kB", "MB", "GB", "TB"], 1000)}, ${spell(sums[1], ["", "k", "M", "G", "T", "P"], 1000)} flops`
      + (bandwidth ? `: at least ${spellTime(sums[2])} on this machine (a lower bound, from its data sheet)`
        : "; the bandwidth of this machine is not known, so there is no time");
  }

  for (const input of section.querySelectorAll("input")) input.addEventListener("input", update);
  update();
}
