"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const made = (tag, text, name) => Object.assign(document.createElement(tag), { textContent: text, className: name || "" });

// Formulas are trees: a number, the name of a size, or an operation and its operands.
const OPERATIONS = {
  "+": (...x) => x.reduce((a, b) => a + b, 0), "-": (a, b) => (b === undefined ? -a : a - b),
  "*": (...x) => x.reduce((a, b) => a * b, 1), "/": (a, b) => a / b, "//": (a, b) => Math.floor(a / b),
  "%": (a, b) => ((a % b) + b) % b, "**": (a, b) => a ** b, min: Math.min, max: Math.max, floor: Math.floor, ceil: Math.ceil,
};
function calc(tree, sizes) {
  if (typeof tree === "number") return tree;
  if (typeof tree === "string") return sizes[tree] ?? NaN;
  return Array.isArray(tree) ? OPERATIONS[tree[0]](...tree.slice(1).map((part) => calc(part, sizes))) : NaN;
}

function spell(number, units, step) {
  if (!Number.isFinite(number)) return "\u2013";
  let i = 0;
  for (; Math.abs(number) >= step && i < units.length - 1; i += 1) number /= step;
  return `${Math.abs(number) >= 100 || number === 0 ? number.toFixed(0) : number.toPrecision(3)}\u00a0${units[i]}`.trim();
}
const bytes = (number) => spell(number, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
const flops = (number) => spell(number, ["", "k", "M", "G", "T", "P", "E"], 1000);
const time = (seconds) => spell(seconds * 1e9, ["ns", "\u00b5s", "ms", "s"], 1000);

// ---- one graph at a time

function choose() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const target = wanted && at(wanted);
  const articles = [...document.querySelectorAll("article")];
  const shown = (target && target.closest("article")) || articles[0];
  for (const article of articles) article.hidden = article !== shown;
  for (const link of document.querySelectorAll(".tabs a")) {
    if (shown && link.getAttribute("href") === `#${shown.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (target && target !== shown) target.scrollIntoView();
}
addEventListener("hashchange", choose);
choose();

// ---- the reasons behind the cells of layers and rewrites

function connectGrid(article, graph) {
  const rows = [...article.querySelectorAll(".grid tbody tr")].map((row) => [...row.querySelectorAll(".cell")]);
  const panel = article.querySelector(".reason");
  if (!rows.length) return;
  function show(button) {
    for (const other of rows.flat()) {
      other.setAttribute("aria-pressed", String(other === button));
      other.tabIndex = other === button ? 0 : -1;
    }
    const list = made("dl", "", "pairs");
    for (const [word, text] of graph.reasons[Number(button.dataset.reason)]) list.append(made("dt", word), made("dd", text));
    panel.replaceChildren(made("h4", button.getAttribute("aria-label")), list);
  }
  rows.forEach((row, i) => row.forEach((button, j) => {
    button.addEventListener("click", () => show(button));
    button.addEventListener("keydown", (event) => {
      const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] || [0, 0];
      const next = rows[i + down] && rows[i + down][j + right];
      if ((!down && !right) || !next) return;
      event.preventDefault();
      next.focus();
    });
  }));
  const first = rows.flat().find((button) => button.classList.contains("near")) || rows[0][0];
  show(first);
}

// ---- bytes, flops and time, for the sizes that the sliders say

function connectCosts(article, graph) {
  const section = article.querySelector(".costs");
  if (!section) return;
  const inputs = [...section.querySelectorAll("input, select")];
  const named = (name) => section.querySelector(`[name="${name}"]`);
  const machine = named("machine"), bandwidth = named("bandwidth"), peak = named("peak");
  const body = section.querySelector(".ops tbody");
  const pairs = [...body.querySelectorAll("tr[data-op]")].map((row) => [row, at(row.querySelector(".more").getAttribute("aria-controls"))]);
  const left = article.querySelector(".left tbody"), second = article.querySelector(".second tbody");

  function sizesNow() {
    const sizes = {};
    for (const slider of section.querySelectorAll("input[type=range]")) {
      sizes[slider.dataset.size] = 2 ** Number(slider.value);
      section.querySelector(`output[for="${slider.id}"]`).value = sizes[slider.dataset.size];
      slider.setAttribute("aria-valuetext", String(sizes[slider.dataset.size]));
    }
    const prefill = section.querySelector("input[value=prefill]");
    if (prefill && prefill.checked) Object.assign(sizes, { S: 1, R: 1, C: sizes.T });
    else if ("T" in sizes) Object.assign(sizes, { S: sizes.T, R: sizes.T });
    const context = section.querySelector("[data-size=C]");
    if (context) context.disabled = Boolean(prefill && prefill.checked);
    return sizes;
  }

  function update() {
    const sizes = sizesNow(), speed = Number(bandwidth.value) * 1e9, most = Number(peak.value) * 1e12;
    const took = (moved, done) => (speed > 0 ? Math.max(moved / speed, most > 0 ? done / most : 0) : NaN);
    const found = graph.ops.map(([count, moved, done]) => {
      const [a, b] = [count * calc(moved, sizes), count * calc(done, sizes)];
      return [a, b, took(a, b)];
    });
    const sums = [0, 1, 2].map((i) => found.reduce((sum, row) => sum + (Number.isFinite(row[i]) ? row[i] : 0), 0));
    const by = speed > 0 ? 2 : 0;
    pairs.forEach(([row]) => {
      const [moved, done, seconds] = found[Number(row.dataset.op)];
      row.querySelector(".bytes").textContent = bytes(moved);
      row.querySelector(".flops").textContent = flops(done);
      row.querySelector(".time").textContent = speed > 0 ? time(seconds) : "\u2013";
      row.querySelector(".bound").textContent = speed > 0 && most > 0 ? (done / most > moved / speed ? "compute" : "memory") : "";
      row.querySelector(".bar").style.width = `${(100 * found[Number(row.dataset.op)][by]) / (sums[by] || 1)}%`;
    });
    pairs.sort(([a], [b]) => found[Number(b.dataset.op)][by] - found[Number(a.dataset.op)][by] || 0);
    body.append(...pairs.flat());
    const told = { bytes: bytes(sums[0]), flops: flops(sums[1]), time: speed > 0 ? time(sums[2]) : "set a bandwidth" };
    for (const [name, text] of Object.entries(told)) section.querySelector(`.total [data-total=${name}]`).textContent = text;

    if (left) rank(left, (row) => {
      const [count, tree] = graph.savings[Number(row.dataset.saving)];
      return count * calc(tree, sizes);
    }, (moved) => moved / speed, sums[2]);
    if (second) rank(second, (row) => found[Number(row.dataset.op)][0], (moved, row) => found[Number(row.dataset.op)][2], sums[2]);

    function rank(table, amount, seconds, all) {
      const rows = [...table.rows].map((row) => [row, amount(row)]);
      for (const [row, moved] of rows) {
        row.querySelector(".bytes").textContent = moved === 0 ? "none" : bytes(moved);
        row.querySelector(".time").textContent = speed > 0 ? time(seconds(moved, row)) : "\u2013";
        row.querySelector(".share").textContent = speed > 0 && all > 0 ? `${((100 * seconds(moved, row)) / all).toFixed(1)} %` : "\u2013";
      }
      table.append(...rows.sort((a, b) => b[1] - a[1] || 0).map(([row]) => row));
    }
  }

  machine.addEventListener("change", () => {
    const [, speed, most] = machine.value === "own" ? ["", graph.machine.bandwidth, graph.machine.flops]
      : DATA.machines[Number(machine.value)];
    bandwidth.value = speed ? speed / 1e9 : "";
    peak.value = most ? most / 1e12 : "";
    update();
  });
  for (const input of inputs) if (input !== machine) input.addEventListener("input", update);
  for (const [row, more] of pairs) {
    const button = row.querySelector(".more");
    button.addEventListener("click", () => {
      more.hidden = !more.hidden;
      button.setAttribute("aria-expanded", String(!more.hidden));
    });
  }
  update();
}

function connectPhases(article, graph) {
  const most = Math.max(...graph.phases);
  article.querySelectorAll(".phases .bar").forEach((bar, i) => { bar.style.width = `${(100 * graph.phases[i]) / most}%`; });
}

for (const graph of DATA.graphs) {
  const article = at(graph.id);
  connectGrid(article, graph);
  connectCosts(article, graph);
  connectPhases(article, graph);
}
