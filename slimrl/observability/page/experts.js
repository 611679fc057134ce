// Load of the experts: all layers at one step, and one layer over all steps.
const expertsState = { load: null };

const heatLayout = (x, y) => figureLayout({ margin: { l: 55, r: 10, t: 8, b: 40 }, xaxis: { title: { text: x }, type: "category", nticks: 20 }, yaxis: { title: { text: y }, type: "category", nticks: 16 } });

function heatTrace(z, x, y, hover) {
  const most = Math.max(2, Math.min(8, expertsState.most));
  return { type: "heatmap", z, x, y, zmin: 0, zmax: most, colorscale: [[0, "#1d4ed8"], [1 / most, isDark() ? "#1e293b" : "#f8fafc"], [1, "#dc2626"]],
    colorbar: { thickness: 10, title: { text: "of the mean", font: { size: 10 } } }, hovertemplate: hover + ": %{z:.3f} of the mean<extra></extra>" };
}

const loadRow = (values, layer) => Array.from(values.subarray(layer * expertsState.load.experts, (layer + 1) * expertsState.load.experts), (value) => (Number.isNaN(value) ? null : value));

function drawExperts() {
  const { load, values } = expertsState;
  if (!load) return;
  const place = Number(byId("expert-step").value), layer = Number(byId("expert-layer").value);
  const experts = Array.from({ length: load.experts }, (_, number) => number);
  byId("expert-step-value").textContent = "step " + load.steps[place];
  Plotly.react(byId("expert-layers"), [heatTrace(load.layers.map((_, row) => loadRow(values[place], row)), experts, load.layers, "layer %{y}, expert %{x}")], heatLayout("expert", "layer"), FIGURE);
  Plotly.react(byId("expert-steps"), [heatTrace(experts.map((expert) => values.map((one) => loadRow(one, layer)[expert])), load.steps, experts, "step %{x}, expert %{y}")], heatLayout("step", "expert"), FIGURE);
}

async function readExperts() {
  const run = Number(byId("expert-run").value);
  const load = await unpacked("e" + run);
  const values = load.loads.map(quantityValues);
  Object.assign(expertsState, { load, values, most: Math.max(...load.loads.map((one) => one.high)) });
  byId("expert-step").max = load.steps.length - 1;
  byId("expert-step").value = load.steps.length - 1;
  fillSelect(byId("expert-layer"), load.layers.map((layer, place) => [place, "layer " + layer]));
  drawExperts();
}

function startExperts() {
  const runs = DATA.expert_runs;
  fillSelect(byId("expert-run"), runs.map((run) => [run, visible(RUNS[run].name)]));
  byId("expert-run").parentElement.hidden = runs.length < 2;
  byId("expert-run").addEventListener("change", readExperts);
  byId("expert-step").addEventListener("input", drawExperts);
  byId("expert-layer").addEventListener("change", drawExperts);
  repaints.push(drawExperts);
  readExperts();
}
