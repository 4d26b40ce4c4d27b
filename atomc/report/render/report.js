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
  if (target && target.tagName === "DETAILS") target.open = true;
  if (target && target !== shown) target.scrollIntoView();
}
addEventListener("hashchange", choose);
choose();

// ---- the reasons behind the cells of layers and rewrites

function connectGrid(article, graph) {
  const rows = [...article.querySelectorAll(".grid tbody tr:has(.cell)")].map((row) => [...row.querySelectorAll(".cell")]);
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
      if ((!down && !right) || !next || next.closest("[hidden]")) return;
      event.preventDefault();
      next.focus();
    });
  }));
  const more = article.querySelector(".grid .more");
  if (more) more.addEventListener("click", () => {
    const folded = at(more.getAttribute("aria-controls"));
    folded.hidden = !folded.hidden;
    more.setAttribute("aria-expanded", String(!folded.hidden));
  });
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

  // The machine that is chosen, as long as nobody wrote other numbers for it.
  function machineNow() {
    const known = machine.value === "own" ? graph.machine : DATA.machines[Number(machine.value)];
    const speed = Number(bandwidth.value) * 1e9, most = Number(peak.value) * 1e12;
    const same = Math.abs(speed - known.bandwidth) < 1e6 && Math.abs(most - (known.flops || 0)) < 1e9;
    return { speed, most, launch: known.launch, rows: same ? known.rows : [] };
  }

  // Seconds of one call, what they are bound by, and whether the kernel was measured.
  function seconds(op, moved, done, tokens, on) {
    if (!(on.speed > 0)) return [NaN, "", false];
    const most = on.most * op.rate, work = Math.max(moved / on.speed, most > 0 ? done / most : 0);
    const within = ([first, last]) => first <= tokens && (last === null || tokens <= last);
    const [, , name, kernel] = op.runs.find(within) || [];
    const row = on.rows.find(([of, by, first, last]) => of === name && by === kernel && within([first, last]));
    const floor = row ? row[4] : on.launch, total = floor + work / (row ? row[5] : 1);
    return [total, floor > total / 2 ? "launch" : most > 0 && done / most > moved / on.speed ? "compute" : "memory", Boolean(row)];
  }

  function update() {
    const sizes = sizesNow(), on = machineNow(), speed = on.speed;
    const tokens = sizes.T ?? Math.max(1, ...Object.values(sizes));
    const found = graph.ops.map((op) => {
      const moved = calc(op.bytes, sizes), done = calc(op.flops, sizes);
      const [each, bound, measured] = seconds(op, moved, done, tokens, on);
      return { bytes: op.count * moved, flops: op.count * done, time: op.count * each, bound, measured };
    });
    const sum = (name) => found.reduce((all, op) => all + (Number.isFinite(op[name]) ? op[name] : 0), 0);
    const by = speed > 0 ? "time" : "bytes", whole = sum(by), all = sum("time");
    const timed = (op) => (Number.isFinite(op.time) ? `${op.measured ? "" : "\u2265\u00a0"}${time(op.time)}` : "\u2013");
    const percent = (part) => (Number.isFinite(part) ? `${(100 * part).toFixed(1)}\u00a0%` : "\u2013");
    pairs.forEach(([row]) => {
      const op = found[Number(row.dataset.op)];
      row.querySelector(".bytes").textContent = bytes(op.bytes);
      row.querySelector(".flops").textContent = flops(op.flops);
      row.querySelector(".time").textContent = timed(op);
      row.querySelector(".bound").textContent = op.bound;
      row.querySelector(".bar").style.width = `${(100 * op[by]) / (whole || 1)}%`;
      row.querySelector(".percent").textContent = percent(op[by] / whole);
    });
    pairs.sort(([a], [b]) => found[Number(b.dataset.op)][by] - found[Number(a.dataset.op)][by] || 0);
    body.append(...pairs.flat());
    const measured = found.some((op) => op.measured) && found.reduce((part, op) => part + (op.measured ? op.time : 0), 0) / all;
    const told = {
      bytes: bytes(sum("bytes")), flops: flops(sum("flops")), time: speed > 0 ? time(all) : "set a bandwidth",
      kind: measured ? `predicted; kernels measured for ${percent(measured)} of it` : "takes at least (lower bound)",
    };
    for (const [name, text] of Object.entries(told)) section.querySelector(`.total [data-total=${name}]`).textContent = text;

    const moved = (row) => graph.savings[Number(row.dataset.saving)][0] * calc(graph.savings[Number(row.dataset.saving)][1], sizes);
    const of = (row) => found[Number(row.dataset.op)];
    if (left) rank(left, (row) => ({ bytes: moved(row), time: speed > 0 ? moved(row) / speed : NaN, measured: false }));
    if (second) rank(second, of);

    function rank(table, cost) {
      const rows = [...table.rows].map((row) => [row, cost(row)]);
      for (const [row, found] of rows) {
        row.querySelector(".bytes").textContent = found.bytes === 0 ? "none" : bytes(found.bytes);
        row.querySelector(".time").textContent = found.bytes === 0 ? "\u2013" : timed(found);
        row.querySelector(".share").textContent = percent(found.time / all);
      }
      table.append(...rows.sort((a, b) => b[1].bytes - a[1].bytes || 0).map(([row]) => row));
    }
  }

  machine.addEventListener("change", () => {
    const known = machine.value === "own" ? graph.machine : DATA.machines[Number(machine.value)];
    bandwidth.value = known.bandwidth ? known.bandwidth / 1e9 : "";
    peak.value = known.flops ? known.flops / 1e12 : "";
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
