// Curves of the metrics: one panel each, drawn when it comes into view.
const DASHES = ["solid", "dash", "dot", "dashdot"];
const curveSettings = { smoothing: 0, band: true };
const panelCards = new Map(); // title of a panel -> { panel, card, target } (the element of its figure)
const addedPanels = []; // that the reader asked for
let families = [];
readers.push(() => { families = [...new Set(RUNS.map((run) => run.family))]; });
const panelWatcher = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
  panelWatcher.unobserve(entry.target);
  drawPanel(entry.target);
}), { rootMargin: "300px" });

// [steps, values] of a metric where it was measured.
function measured(run, metric) {
  const values = run.curves[metric] || [], pairs = [[], []];
  values.forEach((value, place) => {
    if (value != null) { pairs[0].push(run.curves.step[place]); pairs[1].push(value); }
  });
  return pairs;
}

const standardError = (metric) => metric.replace(/^eval\/[^/]+\//, "$&stderr/");

// Half of the 95% interval of each value of an evaluation, over prompts like its own, as a bar at its point.
function errorBars(run, metric, steps, tint) {
  const errors = metric.startsWith("eval/") ? run.curves[standardError(metric)] : undefined;
  if (!errors) return {};
  const at = new Map(run.curves.step.map((step, place) => [step, errors[place]]));
  const halves = steps.map((step) => (at.get(step) == null ? null : 1.96 * at.get(step)));
  return { error_y: { type: "data", array: halves, color: withAlpha(tint, 0.55), thickness: 1.2, width: 3 },
    customdata: halves.map((half) => (half == null ? "" : " ± " + number(half, 2))) };
}

// Exponential moving average, begun at the first value.
function smoothed(values, weight) {
  let mean = values[0];
  return values.map((value) => (mean = weight * mean + (1 - weight) * value));
}

// Mean, smallest and largest of several curves at each step that all of them have.
function acrossSeeds(curves) {
  const maps = curves.map(([steps, values]) => new Map(steps.map((step, place) => [step, values[place]])));
  const steps = curves[0][0].filter((step) => maps.every((one) => one.has(step)));
  const at = (step) => maps.map((one) => one.get(step));
  return { steps, mean: steps.map((step) => at(step).reduce((sum, value) => sum + value, 0) / maps.length),
    low: steps.map((step) => Math.min(...at(step))), high: steps.map((step) => Math.max(...at(step))) };
}

function withAlpha(hex, alpha) {
  return "rgba(" + [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",") + "," + alpha + ")";
}

const familyName = (family) => {
  const runs = RUNS.filter((run) => run.family === family);
  return plain(runs[0].name) + (runs.length === 1 ? "" : " and " + (runs.length - 1) + " more");
};

// Traces of one metric of one family of runs.
function curveTraces(metric, family, tint, dash, label) {
  const runs = RUNS.filter((run) => run.family === family && measured(run, metric)[0].length);
  if (!runs.length) return [];
  const { smoothing, band } = curveSettings;
  const raw = runs.map((run) => measured(run, metric));
  const curves = raw.map(([steps, values]) => [steps, smoothing ? smoothed(values, smoothing) : values]);
  const line = { color: tint, dash, width: 1.8 };
  const few = raw[0][0].length <= 60;
  const hover = (name, more = "") => "step %{x}: %{y:.5g}" + more + "<extra>" + name.replace(/[<>&]/g, " ") + "</extra>";
  const common = { type: "scatter", line, marker: { size: 4, color: tint }, mode: few ? "lines+markers" : "lines" };
  if (band && runs.length > 1) {
    const { steps, mean, low, high } = acrossSeeds(curves);
    const edge = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, x: steps };
    return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: withAlpha(tint, 0.18) },
      { ...common, x: steps, y: mean, name: label + ", mean of " + runs.length, hovertemplate: hover(label + ", mean"), meta: runs[0].name }];
  }
  return runs.flatMap((run, place) => {
    const own = runs.length > 1 ? label + " " + plain(run.name) : label;
    const faint = smoothing ? [{ type: "scatter", mode: "lines", x: raw[place][0], y: raw[place][1], line: { color: withAlpha(tint, 0.25), width: 1 },
      hoverinfo: "skip", showlegend: false }] : [];
    const bars = smoothing ? {} : errorBars(run, metric, curves[place][0], tint);
    return [...faint, { ...common, ...bars, x: curves[place][0], y: curves[place][1], name: own, hovertemplate: hover(own, bars.customdata ? "%{customdata}" : ""), showlegend: place === 0, meta: run.name }];
  });
}

// Of one family a colour is a metric; of several it is a family, as the legend above says, and a dash is a metric.
function panelTraces(panel) {
  if (families.length === 1) return panel.metrics.flatMap((metric, place) => curveTraces(metric, families[0], colour(place), "solid", plain(metric)));
  const dash = (place) => DASHES[place % DASHES.length];
  const traces = families.flatMap((family, order) => panel.metrics.flatMap((metric, place) =>
    curveTraces(metric, family, colour(order), dash(place), familyName(family) + ": " + plain(metric)).map((trace) => ({ ...trace, showlegend: false }))));
  const keys = panel.metrics.length < 2 ? [] : panel.metrics.map((metric, place) => ({
    type: "scatter", mode: "lines", x: [null], y: [null], name: plain(metric), line: { color: cssColour("--soft"), dash: dash(place), width: 1.8 }, hoverinfo: "skip" }));
  return [...traces, ...keys];
}

function drawPanel(target) {
  const { panel } = panelCards.get(target.dataset.panel);
  const traces = panelTraces(panel);
  const names = traces.filter((trace) => trace.showlegend !== false && trace.name).length;
  const layout = figureLayout({
    xaxis: { nticks: 8, tickformat: "d", range: stepRange() },
    yaxis: { uirevision: String(panel.log), type: panel.log ? "log" : "linear", rangemode: panel.zero && !panel.log ? "tozero" : "normal", exponentformat: "power" },
    showlegend: names > 1 && names <= 12, hovermode: "x",
  });
  Plotly.react(target, traces, layout, FIGURE);
  if (!target.dataset.listens) {
    target.dataset.listens = "yes";
    target.on("plotly_click", (event) => showStep(event.points[0].data.meta, event.points[0].x));
  }
}

function stepRange() {
  const steps = RUNS.flatMap((run) => run.curves.step || []);
  const low = Math.min(...steps), high = Math.max(...steps), room = Math.max(0.5, 0.03 * (high - low));
  return [low - room, high + room];
}

function panelCard(panel) {
  const target = element("div", { class: "plot", "data-panel": panel.title });
  const button = element("button", { type: "button", "aria-pressed": String(panel.log), title: "logarithmic scale", click: () => {
    panel.log = !panel.log;
    button.setAttribute("aria-pressed", String(panel.log));
    drawPanel(target);
  } }, "log");
  const card = element("div", { class: "card panel" },
    element("div", { class: "panel-head" }, element("h2", {}, panel.title, panel.unit ? element("span", { class: "unit" }, panel.unit) : null), button), target);
  panelCards.set(panel.title, { panel, card, target });
  return card;
}

// Cards of all panels in their order; those that are there stay, with the scale that the reader has chosen.
function layPanels() {
  [...addedPanels, ...DATA.panels].forEach((panel, place) => {
    const known = panelCards.get(panel.title);
    const card = known ? known.card : panelCard(panel);
    if (known) known.panel.metrics = panel.metrics;
    card.dataset.find = (panel.title + " " + panel.metrics.join(" ")).toLowerCase();
    card.title = panel.metrics.join("\n");
    const holder = byId("panels");
    if (holder.children[place] !== card) holder.insertBefore(card, holder.children[place] || null);
  });
  filterPanels(byId("find-panel").value);
  const known = new Set([...addedPanels, ...DATA.panels].flatMap((panel) => panel.metrics));
  const others = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].filter((name) => name !== "step" && !known.has(name)).sort();
  fillSelect(byId("add-metric"), [["", "another metric …"], ...others.map((name) => [name, name])]);
  byId("run-legend").replaceChildren(...(families.length > 1 ? families.map((family, order) => element("span", {},
    element("span", { class: "swatch", style: "background:" + colour(order) }), visible(familyName(family)))) : []));
  byId("band").parentElement.hidden = families.length === RUNS.length;
  redrawPanels();
}

// Those in view at once, the others when they come into view.
function redrawPanels() {
  for (const { target } of panelCards.values()) { panelWatcher.unobserve(target); panelWatcher.observe(target); }
}

function filterPanels(words) {
  for (const card of byId("panels").children) card.hidden = !card.dataset.find.includes(words.toLowerCase());
}

// Show the panel of a metric; one that no panel has is added.
function findPanel(metric) {
  byId("find-panel").value = metric;
  addPanel(metric);
  filterPanels(metric);
}

function addPanel(metric) {
  if ([...addedPanels, ...DATA.panels].some((panel) => panel.metrics.includes(metric))) return;
  addedPanels.unshift({ title: metric, metrics: [metric], unit: "", log: false, zero: false });
  layPanels();
}

function startCurves() {
  layPanels();
  byId("add-metric").addEventListener("change", (event) => { if (event.target.value) addPanel(event.target.value); event.target.value = ""; });
  byId("smoothing").addEventListener("input", (event) => {
    curveSettings.smoothing = Number(event.target.value);
    byId("smoothing-value").textContent = event.target.value;
    redrawPanels();
  });
  byId("band").addEventListener("change", (event) => { curveSettings.band = event.target.checked; redrawPanels(); });
  byId("find-panel").addEventListener("input", (event) => filterPanels(event.target.value));
  repaints.push(redrawPanels);
}
